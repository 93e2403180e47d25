"""The same scenarios with the kernel's calls failed and killed by strace(1), without interposing in Python.

A first run under strace finds the calls that touch the scenario's folder, reads and flock included. Then each of them
is failed with EIO and with ENOSPC, and killed as it enters the kernel, in a separate process. This covers calls that
bypass ``os`` and so the layer of ``child``.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.crash_points.child import read_report
from tests.crash_points.points import Violation, judge, judge_text
from tests.crash_points.scenarios import SCENARIOS, files_of

_CALLS = (
    *("openat", "write", "pwrite64", "fsync", "fdatasync", "ftruncate", "fchmod", "flock", "rmdir"),
    *("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir", "mkdirat"),
)
_LINE = re.compile(r"(\w+)\((.*)")
FAULTS = ("error=EIO", "error=ENOSPC", "signal=KILL")


@dataclass(frozen=True, slots=True)
class Point:
    """The ``number``-th call of this name since the process started."""

    name: str
    number: int
    text: str

    @property
    def asks_for_space(self) -> bool:
        return self.name not in ("flock", "unlink", "unlinkat", "fchmod") and "O_RDONLY" not in self.text


def refusal() -> str | None:
    """Return why strace cannot be used here, or None."""
    try:
        probe = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "strace is not installed"
    return None if probe.returncode == 0 else f"strace may not trace here: {probe.stderr.strip()}"


class Tracer:
    """Runs one scenario under strace, below ``place``."""

    def __init__(self, repository: Path, place: Path, name: str) -> None:
        self._repository = repository
        self._place = place
        self._folder = place / "work"
        self._name = name
        self.runs = 0

    def points(self) -> list[Point]:
        """Return the calls of an undisturbed run that touch the folder."""
        done = self._run([])
        assert done.returncode == 0, done.stderr
        counts: Counter[str] = Counter()
        points = []
        for line in (self._place / "log").read_text(errors="replace").splitlines():
            if (match := _LINE.match(line)) is None:
                continue
            counts[match[1]] += 1
            if str(self._folder) in match[2]:
                points.append(Point(match[1], counts[match[1]], line))
        return points

    def violations(self, fault: str) -> Iterator[Violation]:
        """Run one process per call with this fault at that call; return what is wrong afterwards."""
        for point in self.points():
            if fault == "error=ENOSPC" and not point.asks_for_space:
                continue
            done = self._run([f"--inject={point.name}:{fault}:when={point.number}"])
            for what in self._problems(done, fault, point):
                yield Violation(self._name, fault, point.text[:160], what)

    def _run(self, options: list[str]) -> subprocess.CompletedProcess[str]:
        self.runs += 1
        shutil.rmtree(self._place, ignore_errors=True)
        self._folder.mkdir(parents=True)
        SCENARIOS[self._name].prepare(self._folder)
        self._before = files_of(self._folder)
        calls = ",".join(f"?{name}" for name in _CALLS)
        return subprocess.run(
            [
                *("strace", "-y", "-qq", f"--trace={calls}", *options, "-o", str(self._place / "log")),
                *(sys.executable, "-B", "-m", "tests.crash_points.child", "--once", self._name, str(self._folder)),
            ],
            cwd=self._repository,
            capture_output=True,
            text=True,
            check=False,
        )

    def _problems(self, done: subprocess.CompletedProcess[str], fault: str, point: Point) -> Iterator[str]:
        report, scenario = read_report(done.stdout.splitlines()), SCENARIOS[self._name]
        if fault == "signal=KILL":
            if done.returncode not in (-signal.SIGKILL, 128 + signal.SIGKILL):
                yield f"was not killed: {done}"
                return
        elif "(INJECTED)" not in (self._place / "log").read_text(errors="replace"):
            yield f"no error was injected: {done}"
            return
        elif report["crash"] is not None:
            yield f"no error of ours:\n{report['crash']}"
        elif report["error"] is not None:
            yield from judge_text(report["error"], self._folder, fault.removeprefix("error="))
            yield from judge(scenario, self._before, self._place / "failed", report["promised"])
        # such a lock is released with its process, not earlier
        if report["retry"] is not None and "LOCK_UN" not in point.text:
            yield f"the next attempt in the same process failed:\n{report['retry']}"
        promised = report["promised"] if report["error"] is None else len(scenario.states) - 1
        try:
            yield from judge(scenario, self._before, self._folder, promised)
        except Exception:
            yield traceback.format_exc()
