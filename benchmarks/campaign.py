"""``python -m benchmarks.campaign``: every published kind of fault, under SameBits and its peers, in one table.

Each job is trained undisturbed once and then once per kind (``campaign_kinds``); it must end with the undisturbed run's
sha256. SameBits trains the digits (DDP), a transformer on a mesh (HSDP) and a script with Hugging Face's Trainer, as a
user starts them: ``samebits run`` with one spare, all settings at their defaults. The drill injects the faults. The
peers (``--who``) train the benchmarks' model with their launchers and checkpoints (``campaign_peers``).

A job's verdict is ``same bits``, ``other bits``, ``ended`` (it stopped before its last step) or ``hung``. The exit
status is 1 if a job of SameBits got any verdict but the first, or ended without its fault.

``--into FILE`` adds each result to a file, ``--of FILE`` reports such a file, and ``--pages FILE`` puts its table into
docs/contributors/evidence.md: the newest verdict on each kind in each job.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import campaign_peers as peers
from benchmarks import parts
from benchmarks.campaign_kinds import KINDS, QUICK, Kind, named
from benchmarks.processes import REPOSITORY
from benchmarks.recovery_peers import interpreter
from benchmarks.report import MISSING, Progress, Report, table
from samebits.account.events import EventKind
from samebits.account.history import account
from samebits.commands.drill.command import free_port
from samebits.commands.drill.orders import ImpossibleError
from samebits.commands.drill.plan import DrillOutcome, Injected, Planned, drawn, steps_of
from samebits.commands.drill.rehearsal import Rehearsal, free_environment

OURS = "SameBits"
PAGE = Path("docs") / "contributors" / "evidence.md"
BEGIN, END = "<!-- campaign:begin -->\n", "<!-- campaign:end -->"
EARLIEST, LATEST = 0.1, 0.65
"""The shares of a job between which faults strike: silent ones are compared only every 50 steps."""
_FINAL = re.compile(rb"^final step=\d+ .*?sha256=([0-9a-f]{64})", re.MULTILINE)
_STUCK = ("it did not train again within", "it did not finish")


class Verdict(enum.StrEnum):
    """How a disturbed job ended."""

    SAME = "same bits"
    OTHER = "other bits"
    ENDED = "ended"
    HUNG = "hung"
    NOT_GIVEN = "not given"
    NO_DEVICE = "not on this machine"


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of fault in one job of one system; ``seconds`` is the time until all ranks trained again."""

    kind: str
    system: str
    job: str
    verdict: Verdict
    seconds: float | None = None
    detail: str = ""

    @property
    def name(self) -> str:
        """Return the system, the job if the system has several, and the kind."""
        return ", ".join(filter(None, (self.system, self.job, self.kind)))

    @property
    def is_wrong(self) -> bool:
        return self.verdict in (Verdict.OTHER, Verdict.ENDED, Verdict.HUNG, Verdict.NOT_GIVEN)


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """A job of SameBits."""

    name: str
    ranks: int
    words: tuple[str, ...]


SCRIPTS = (
    Script("digits", 3, ("examples/digits/train.py", "--steps", "300", "--save-checkpoint-steps", "20")),
    Script(
        "mesh", 4, ("examples/mesh/train.py", "--dp-replicate", "2", "--dp-shard", "2", "--steps", "200", "--dim", "32")
    ),
    Script("trainer", 3, ("examples/frameworks/transformers_trainer.py", "--epochs", "24")),
)


# --- jobs of SameBits -------------------------------------------------------------------------------------------------


class Ours:
    """The jobs of one script: first the undisturbed one, with which the others are compared.

    Raises:
        RuntimeError: the undisturbed job does not finish, or prints no sha256.
    """

    def __init__(self, script: Script, folder: Path, seed: int) -> None:
        self._script, self._folder, self._seed = script, folder, seed
        self._folder.mkdir()
        outcome = self._rehearsal("undisturbed").run()
        self._last_step = outcome.last_step
        self._step_s = account(outcome.events)["buckets_s"]["productive"] / max(1, self._last_step)
        self.final = finals(folder / "undisturbed" / "device")
        if outcome.problem or not self.final:
            raise RuntimeError(f"{script.name} undisturbed: {outcome.problem or 'no sha256 was printed'}")

    def disturb(self, kinds: Sequence[Kind]) -> list[Result]:
        """Run one job with these kinds of fault, and judge it."""
        name = "-".join(kind.name.replace(" ", "_") for kind in kinds)
        outcome = self._rehearsal(name).run(plan := self._plan(kinds), steps_of(plan, self._last_step), self._step_s)
        final = finals(self._folder / name / "device")
        results = [judged(kind, self._script.name, outcome, final == self.final) for kind in kinds]
        if not any(result.is_wrong for result in results):
            shutil.rmtree(self._folder / name)
        return results

    def _plan(self, kinds: Sequence[Kind]) -> list[Planned]:
        faults = [kind.fault for kind in kinds for _ in range(kind.times) if kind.fault is not None]
        plan = drawn(faults, len(faults), self._seed)
        width = LATEST - EARLIEST
        return [dataclasses.replace(one, share=EARLIEST + width * one.share) for one in plan]

    def _rehearsal(self, name: str) -> Rehearsal:
        path, *words = self._script.words
        start = ["-n", str(self._script.ranks), "--spares", "1", str(REPOSITORY / path), *words]
        environment = free_environment(os.environ) | {"OMP_NUM_THREADS": "1"}
        return Rehearsal(self._folder / name, start, environment, self._script.ranks + 1, free_port(), lambda _: None)


def finals(log_dir: Path) -> frozenset[bytes]:
    """Return every final sha256 that a job's workers printed."""
    return frozenset(found for log in log_dir.glob("worker_*.log") for found in _FINAL.findall(log.read_bytes()))


def judged(kind: Kind, job: str, outcome: DrillOutcome, is_same: bool) -> Result:
    """Return the result of one of the kinds in a job."""
    given = [one for one in outcome.injected if one.fault is kind.fault]
    missed = [one for one in outcome.not_injected if one.fault is kind.fault]
    times_s = [one.recovered_s for one in given if one.recovered_s is not None]
    detail = "; ".join([*(_words(one) for one in given), *(f"not given: {one.why}" for one in missed)])
    if any(event.kind is EventKind.INTERRUPTED for event in outcome.events):
        detail = f"resumed by `samebits recover`; {detail}"
    if outcome.problem:
        verdict = Verdict.HUNG if outcome.problem.startswith(_STUCK) else Verdict.ENDED
        detail = f"{outcome.problem}; {detail}"
    elif not is_same:
        verdict = Verdict.OTHER
    else:
        verdict = Verdict.SAME if given and not missed else Verdict.NOT_GIVEN
    return Result(kind.name, OURS, job, verdict, max(times_s, default=None), detail)


def _words(one: Injected) -> str:
    return f"after step {one.step}: {one.did}"


def run_ours(options: argparse.Namespace, folder: Path, progress: Progress) -> Iterator[Result]:
    """Yield the results of every script."""
    for script in [one for one in SCRIPTS if one.name in options.job]:
        kinds = [kind for kind in named(options.only) if kind.fault is not None and script.name not in kind.lacking]
        if not kinds:
            continue
        ours = Ours(script, folder / script.name, options.seed)
        progress.say(f"{OURS}, {script.name}, undisturbed: sha256 {', '.join(map(_short, sorted(ours.final)))}")
        for begin in range(0, len(kinds), options.per_job):
            yield from ours.disturb(kinds[begin : begin + options.per_job])


def _short(sha256: bytes) -> str:
    return f"{sha256.decode()[:12]}…"


# --- jobs of the peers ------------------------------------------------------------------------------------------------


def run_peers(options: argparse.Namespace, progress: Progress, missing: dict[str, str]) -> Iterator[Result]:
    """Yield the results of every requested peer; ``missing`` gets the reason for each that does not run here."""
    for peer in [one for one in peers.PEERS if one in options.who]:
        if problem := peers.needs(peer, options.peer):
            missing[peer] = problem
        else:
            rng = random.Random(f"{options.seed} {peer}")
            undisturbed = peers.run(peer, options.peer, None, rng)
            if undisturbed.digests:
                progress.say(f"{peer}, undisturbed: sha256 {', '.join(one[:12] for one in undisturbed.digests)}…")
                for kind in [one for one in named(options.only) if one.is_for_peers]:
                    yield _of_peer(peer, options.peer, kind, undisturbed.digests, rng)
                continue
            missing[peer] = undisturbed.ended or undisturbed.hung
        progress.say(f"{peer} does not run here: {missing[peer]}")


def _of_peer(peer: str, python: str, kind: Kind, final: frozenset[str], rng: random.Random) -> Result:
    try:
        found = peers.run(peer, python, kind, rng)
    except ImpossibleError as error:
        return Result(kind.name, peer, "", Verdict.NOT_GIVEN, detail=str(error))
    if found.digests:
        verdict = Verdict.SAME if found.digests == final else Verdict.OTHER
    else:
        verdict = Verdict.HUNG if found.hung else Verdict.ENDED
    words = "; ".join(filter(None, (found.did, found.ended or found.hung)))
    return Result(kind.name, peer, "", verdict, found.seconds, words)


# --- the report -------------------------------------------------------------------------------------------------------


def text_of(results: Sequence[Result], sources: Mapping[str, Sequence[str]]) -> str:
    """Return the table, kinds by systems and jobs, and a line for each result that is wrong."""
    columns = list(dict.fromkeys((one.system, one.job) for one in results))
    rows = []
    for kind in KINDS:
        cells = [
            _cell([one for one in results if (one.kind, one.system, one.job) == (kind.name, *at)]) for at in columns
        ]
        if any(cells):
            rows.append([kind.name, *(cell or "–" for cell in cells), ", ".join(sources[kind.name])])
    wrong = [f"{one.name}: {one.verdict}: {one.detail}" for one in results if one.is_wrong]
    return "\n".join([table(["", *(f"{system} {job}".strip() for system, job in columns), "source"], rows), *wrong])


def _cell(of_one: Sequence[Result]) -> str:
    texts = []
    for one in of_one:
        texts.append(f"{one.verdict}, {one.seconds:.1f} s" if one.seconds is not None else str(one.verdict))
    return "; ".join(dict.fromkeys(texts))


def page_table(results: Sequence[Result]) -> str:
    """Return the Markdown table of the newest results, kinds by systems and jobs."""
    newest = {(one.kind, one.system, one.job): one for one in results}
    columns = [at for at in _COLUMNS if any(key[1:] == at for key in newest)]
    names = [job if system == OURS else system for system, job in columns]
    lines = [f"| fault | published as | {' | '.join(names)} |", "|---" * (2 + len(columns)) + "|"]
    for kind in KINDS:
        found = [newest.get((kind.name, *at)) for at in columns]
        if any(found):
            cells = [kind.name, ", ".join(kind.sources), *("–" if one is None else str(one.verdict) for one in found)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


_COLUMNS = [*((OURS, script.name) for script in SCRIPTS), *((peer, "") for peer in peers.PEERS)]


def fill_page(results: Sequence[Result], folder: Path) -> None:
    """Replace the table between the markers of the page."""
    page = folder / PAGE
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(before + BEGIN + page_table(results) + END + after, encoding="utf-8")


def report(results: Sequence[Result], missing: Mapping[str, str]) -> Report:
    """Return the object of the last line: for each system and job, how many jobs got each verdict."""
    told: dict[str, dict[str, Any]] = {}
    for one in results:
        name = one.system if one.system != OURS else one.job
        figures = told.setdefault(name, {})
        key = f"{one.verdict.replace(' ', '_')}_count"
        figures[key] = figures.get(key, 0) + 1
        slowest = max(figures.get("slowest_recovery_s", 0.0), one.seconds or 0.0)
        figures["slowest_recovery_s"] = round(slowest, 3)
    ours = {name: told[name] for name in [one.name for one in SCRIPTS] if name in told}
    peers = {name: figures for name, figures in told.items() if name not in ours}
    counted = [one for one in results if one.system == OURS and one.verdict is not Verdict.NO_DEVICE]
    same = sum(one.verdict is Verdict.SAME for one in counted)
    return Report(
        benchmark="campaign",
        floor={"kinds_count": len(KINDS), "kinds_needing_a_device_count": sum(kind.fault is None for kind in KINDS)},
        peers={**peers, **dict.fromkeys(missing, MISSING)},
        ours=ours,
        ratios={"same_bits": round(same / len(counted), 4)} if counted else {},
    )


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    systems = [OURS, *peers.PEERS]
    names, jobs = [kind.name for kind in KINDS], [script.name for script in SCRIPTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="KIND", help=f"faults to inject: {', '.join(names)}"
    )
    parser.add_argument(
        "--job", nargs="+", choices=jobs, default=jobs, metavar="JOB", help=f"jobs to run: {', '.join(jobs)}"
    )
    parser.add_argument(
        "--who",
        nargs="+",
        choices=systems,
        default=[OURS],
        metavar="NAME",
        help=f"systems to test: {', '.join(systems)} (default: {OURS})",
    )
    parser.add_argument(
        "--peer",
        type=interpreter,
        default=sys.executable,
        metavar="PYTHON",
        help="Python interpreter in which the systems other than torchrun are installed (default: this one)",
    )
    parser.add_argument(
        "--per-job", type=int, default=1, metavar="N", help="number of kinds of fault in one job (default: 1)"
    )
    parser.add_argument("--quick", action="store_true", help=f"run only the digits example, with {', '.join(QUICK)}")
    parser.add_argument("--seed", type=int, default=1, help="seed that selects steps, times and ranks (default: 1)")
    parser.add_argument("--into", type=Path, metavar="FILE", help="append each result to this file, as a line of JSON")
    parser.add_argument("--of", type=Path, metavar="FILE", help="run nothing; report the results in this file")
    parser.add_argument(
        "--pages", type=Path, metavar="FILE", help="run nothing; put the table of this file's results into the docs"
    )
    options = parser.parse_args(arguments)
    if options.per_job < 1:
        parser.error("--per-job: expected 1 or more")
    if options.quick:
        options.only, options.job = QUICK, ["digits"]
    stored = options.pages or options.of
    if stored is not None:
        try:
            results = parts.read(stored, Result)
        except (OSError, ValueError) as error:
            parser.error(f"{'--of' if options.pages is None else '--pages'}: {error}")
        missing: dict[str, str] = {}
    else:
        results, missing = run(options)
    if options.pages is not None:
        fill_page(results, REPOSITORY)
        return 0
    print_report(results, missing)
    return 1 if any(one.is_wrong for one in results if one.system == OURS) else 0


def run(options: argparse.Namespace) -> tuple[list[Result], dict[str, str]]:
    """Run everything that was requested; the folder of a job that went wrong is kept."""
    missing: dict[str, str] = {}
    folder = Path(tempfile.mkdtemp(prefix="samebits-campaign-"))
    progress = Progress(f"{len(options.only)} kinds of fault, {', '.join(options.who)}, in {folder}", missing)
    results = [
        Result(kind.name, OURS, job, Verdict.NO_DEVICE)
        for kind in named(options.only)
        for job in (options.job if OURS in options.who else ())
        if kind.fault is None
    ]
    ours = run_ours(options, folder, progress) if OURS in options.who else iter(())
    for one in itertools.chain(ours, run_peers(options, progress, missing)):
        results.append(one)
        if options.into is not None:
            parts.add(options.into, one)
        progress.say(f"{one.name}: {_cell([one])}: {one.detail}")
    with contextlib.suppress(OSError):
        if not any(one.is_wrong for one in results):
            shutil.rmtree(folder)
    return results, missing


def print_report(results: Sequence[Result], missing: Mapping[str, str]) -> None:
    sources = {kind.name: kind.sources for kind in KINDS}
    report(results, missing).print(text_of(results, sources))


if __name__ == "__main__":
    sys.exit(main())
