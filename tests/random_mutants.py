"""``python -m tests.random_mutants``: change one random token of a package, and check whether its quick tests notice.

A comparison is reversed, ``and`` replaced by ``or``, a ``not`` removed, plus replaced by minus. Each mutant is alone in
a private copy of the repository, where the package's quick tests run; a mutant that they pass is printed with its line.
Such a mutant either changes nothing relevant, or shows that a test is missing. Unlike handwritten mutants, random ones
are not limited to faults that their author has thought of. Prints one line per mutant, and one JSON object last.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
COPIED = ("runtime", "tests", "benchmarks", "examples", "scripts", "docs")
COPIED_FILES = ("pyproject.toml", "setup.cfg", "constraints.txt", "README.md", "README.zh-CN.md")
SIMULATION = ("-m", "tests.simulation", "--seeds", "400", "--start", "0")
LONGEST = 5.0  # multiple of the unchanged code's run, plus a minute: then it hangs
SWAPPED: Mapping[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
}


def pytest_of(*words: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:xdist", "-m", "not system and not thorough", *words)


LAUNCHER = pytest_of(
    *("tests/launcher", "tests/commands", "tests/hosts"),
    *(f"--ignore-glob=*/{name}" for name in ("test_*_sh.py", "launcher/test_secret.py")),
)

# Every package's quick tests, in the order they are run: nothing that starts a job or calls the scripts.
QUICK: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "core": (pytest_of("tests/core"), SIMULATION),
    "net": (pytest_of("tests/net", "tests/hostile"),),
    "store": (pytest_of("tests/store", "tests/crash_points/test_crash_points.py", "tests/fuzz"),),
    "service": (pytest_of("tests/service", "tests/hostile"),),
    **dict.fromkeys(("launcher", "commands", "hosts"), (LAUNCHER,)),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One token of one file, by its position in the file's bytes, and its replacement."""

    path: str
    line: int
    at: int
    old: str
    new: str
    text: str  # the original line

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old} → {self.new or 'nothing'}"

    def applied(self, source: bytes) -> bytes:
        end = self.at + len(self.old)
        assert source[self.at : end] == self.old.encode()
        return source[: self.at] + self.new.encode() + source[end:]


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield every mutant of a file, in the order of its lines."""
    lines, starts = source.decode().splitlines(), [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tokens = [(starts[row - 1] + column, text) for row, column, text in _tokens(source)]

    def between(first: ast.AST, second: ast.AST, old: str) -> int:
        """Return the position of the operator between two operands; otherwise there are only brackets and comments."""
        begin, end = _end(first), _start(second)
        words = old.split()
        found = [at for at, text in tokens if begin <= at < end and text == words[0]]
        assert len(found) == 1, (path, old, source[begin:end])
        return found[0]

    def _start(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(node: ast.AST) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def swapped(operator: ast.AST, first: ast.AST, second: ast.AST) -> Iterator[Mutant]:
        if (pair := SWAPPED.get(type(operator))) is not None:
            at = between(first, second, pair[0])
            old = re.match(re.escape(pair[0]).replace(r"\ ", r"\s+"), source[at:].decode())
            assert old is not None
            line = source[:at].count(b"\n")
            yield Mutant(path, line + 1, at, old[0], pair[1], lines[line])

    found: list[Mutant] = []
    for node in _outside_texts(ast.parse(source)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for operator, first, second in zip(node.ops, operands, operands[1:], strict=False):
                found += swapped(operator, first, second)
        elif isinstance(node, ast.BoolOp):
            for first, second in zip(node.values, node.values[1:], strict=False):
                found += swapped(node.op, first, second)
        elif isinstance(node, ast.BinOp) and not (_is_text(node.left) or _is_text(node.right)):
            found += swapped(node.op, node.left, node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found.append(Mutant(path, node.lineno, _start(node), "not ", "", lines[node.lineno - 1]))
    yield from sorted(found, key=lambda mutant: mutant.at)


def _outside_texts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below, except inside f-strings, which are one token to Python 3.11."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield child
            yield from _outside_texts(child)


def _tokens(source: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield row, column in bytes, and text."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type in (tokenize.OP, tokenize.NAME):
            row, column = token.start
            yield row, len(lines[row - 1].decode()[:column].encode()), token.string


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def mutants_of_room(room: str) -> list[Mutant]:
    paths = sorted((REPOSITORY / "runtime" / "samebits" / room).rglob("*.py"))
    names = [path.relative_to(REPOSITORY).as_posix() for path in paths]
    return [mutant for name in names for mutant in mutants_of(name, (REPOSITORY / name).read_bytes())]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a mutant: what noticed it (empty: nothing did), and after how long."""

    mutant: Mutant
    killed_by: str
    took_s: float


class PrivateCopy:
    """A copy of the repository in which one mutant at a time is tried."""

    def __init__(self, folder: Path, room: str) -> None:
        self._folder = folder
        self._commands = QUICK[room]
        for name in COPIED:
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in COPIED_FILES:
            shutil.copy(REPOSITORY / name, folder / name)
        self.limit_s = 3600.0

    def whole(self) -> float:
        """Return how long the package's quick tests take on the unchanged code."""
        killed_by, took_s = self._run()
        if killed_by:
            raise SystemExit(f"random_mutants: the whole code fails {killed_by}. Fix: mend that first")
        return took_s

    def tried(self, mutant: Mutant) -> Outcome:
        path = self._folder / mutant.path
        whole = path.read_bytes()
        self._write(path, mutant.applied(whole))
        try:
            return Outcome(mutant, *self._run())
        finally:
            self._write(path, whole)

    @staticmethod
    def _write(path: Path, source: bytes) -> None:
        """Write the file and remove its compiled code, which is matched only by time and size."""
        path.write_bytes(source)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def _run(self) -> tuple[str, float]:
        began = time.monotonic()
        killed_by = ""
        for words in self._commands:
            if killed_by := self._noticed(words, began + self.limit_s):
                break
        return killed_by, time.monotonic() - began

    def _noticed(self, words: Sequence[str], deadline: float) -> str:
        environment = os.environ | {"PYTHONPATH": str(self._folder), "TMPDIR": str(self._folder.parent)}
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                [sys.executable, *words],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = child.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return "a run without an end"
            finally:
                with contextlib.suppress(ProcessLookupError):  # when all of it has ended
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        return "" if status == 0 else named_in(text) or f"exit status {status}: {text[-300:]}"


def named_in(text: str) -> str:
    """Return the first failure named by pytest or the simulator."""
    failed = r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)"
    found = re.search(rf"{failed}|^(seed \d+: \w+: .*)$", text, re.MULTILINE)
    return "" if found is None else (found[1] or found[2])[:160]


def run(room: str, chosen: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Run every mutant, on ``jobs`` private copies."""
    outcomes: list[Outcome] = []
    copies: queue.SimpleQueue[PrivateCopy] = queue.SimpleQueue()

    def tried(mutant: Mutant) -> Outcome:
        copy = copies.get()
        try:
            return copy.tried(mutant)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory(prefix="samebits-mutants-") as name:
        made = [PrivateCopy(Path(name) / f"{number}" / "copy", room) for number in range(min(jobs, len(chosen)))]
        print(f"{room}: the quick tests on the whole code …", flush=True)
        whole_s = made[0].whole()
        print(f"{room}: they pass in {whole_s:.1f} s; {len(chosen)} mutants, {len(made)} at once", flush=True)
        for copy in made:
            copy.limit_s = LONGEST * whole_s + 60.0
            copies.put(copy)
        with ThreadPoolExecutor(len(made)) as pool:
            for outcome in pool.map(tried, chosen):
                outcomes.append(outcome)
                said = f"killed in {outcome.took_s:5.1f} s by {outcome.killed_by}" if outcome.killed_by else "SURVIVES"
                print(f"{len(outcomes):4}/{len(chosen)}  {outcome.mutant}  {said}", flush=True)
                if not outcome.killed_by:
                    print(f"           {outcome.mutant.text.strip()}", flush=True)
    return outcomes


def main() -> int:
    """Return 0 if every mutant was noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_mutants", description=__doc__)
    parser.add_argument("--room", choices=QUICK, default="core", help="whose code is changed")
    parser.add_argument("--count", type=int, default=100, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--at", metavar="FILE:LINE", action="append", help="all mutants of this line instead")
    parser.add_argument("--jobs", type=int, default=1, help="private copies, each with one mutant at a time")
    options = parser.parse_args()
    every = mutants_of_room(options.room)
    if options.at:
        chosen = [one for one in every if any(f"{one.path}:{one.line}".endswith(f"/{at}") for at in options.at)]
        if not chosen:
            parser.error(f"there is no mutant at {', '.join(options.at)}, expected lines such as admission.py:149")
    else:
        chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    outcomes = run(options.room, chosen, max(1, options.jobs))
    alive = [outcome for outcome in outcomes if not outcome.killed_by]
    found = {
        "room": options.room,
        "seed": options.seed,
        "drawn_from": len(every),
        "mutants": len(outcomes),
        "killed": len(outcomes) - len(alive),
        "alive": [str(outcome.mutant) for outcome in alive],
        "slowest_kill_s": max((round(one.took_s, 1) for one in outcomes if one.killed_by), default=None),
        "took_s": round(sum(outcome.took_s for outcome in outcomes), 1),
    }
    print(json.dumps(found))
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
