"""Count the silent corruptions that are located to their rank and repaired, by what is overwritten and how.

``python -m benchmarks.corruption [--draws N] [--seed N]``. A job of three ranks trains with CONSISTENCY=majority:50 and
AUDIT=50. In each window of 50 steps one corruption is drawn (``benchmarks.corruption_draws``) and written to memory.
All windows have the same data and begin with the same state, so the hash near the end of a window shows whether the
result is that of an undisturbed window.

A corruption is *located* if the scheduler's log names its rank and no other, and *repaired* if all hashes are then
right, in the same processes. It is *harmless* if it changed no bit, or left every hash right without a repair, as an
exponent bit stuck at its own value does. Everything else is *missed*. A job that ends on a corruption is followed by
another from the next draw on. With ``--clean STEPS``, nothing is overwritten, and every name in the log is a false
alarm.

A thousand draws take half an hour: ``--draws 40 --seed 3 --into FILE`` measures a part and adds it to a file, and
``--of FILE`` makes the report of all parts.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import parts
from benchmarks.corruption_draws import (
    AUDIT_EVERY,
    COMPARED_EVERY,
    HASHED_AT,
    WINDOW,
    WORLD_SIZE,
    Draw,
    Place,
    draw,
    window_of,
)
from benchmarks.processes import Job, Stage
from benchmarks.report import Progress, Report, rounded, table

SETTINGS = {"CONSISTENCY": f"majority:{COMPARED_EVERY}", "AUDIT": str(AUDIT_EVERY)}
LONGEST_WINDOW_S = 300.0
"""Without an event for this long, the start included, the job counts as hung."""
LOOK_EVERY_S = 0.1
SAID_EVERY = 10
"""Number of draws between two progress lines."""
HARMLESS, LOCATED, REPAIRED, MISSED = OUTCOMES = ("harmless", "located", "repaired", "missed")
_DIFFERS = re.compile(
    r" ranks? ([\d, and]+) \(worker [^)]*.*?\) differs? from ranks? .*? (?:after|at the end,) step (\d+)"
)
_AUDITED = re.compile(r", step (\d+): rank .*most likely rank (\d+)'s device is at fault")
_ENDS = re.compile(r"the job ends: (.*)")


class Found(msgspec.Struct, frozen=True):
    """The result of one draw; a line of the file of ``--into``."""

    seed: int
    number: int
    kind: str
    place: str
    outcome: str
    named: list[int]
    said: str = ""


class Clean(msgspec.Struct, frozen=True):
    """Steps without a corruption."""

    clean_steps: int
    false_alarms: list[str]


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file: either a draw's result or steps without a corruption."""

    found: Found | None = None
    clean: Clean | None = None


@dataclass(slots=True)
class Log:
    """The lines of a scheduler's log that name ranks, by window.

    Attributes:
        named: the ranks that were named.
        said: the first line that names a rank.
        why_it_ended: the reason why the job ended, if it did.
    """

    named: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    said: dict[int, str] = field(default_factory=dict)
    why_it_ended: str = ""

    @classmethod
    def of(cls, text: str) -> Log:
        """Parse a log."""
        log = cls()
        for line in text.splitlines():
            for ranks, step in [(m[1], m[2]) for m in _DIFFERS.finditer(line)] + [
                (m[2], m[1]) for m in _AUDITED.finditer(line)
            ]:
                window = window_of(int(step))
                log.named[window] |= {int(one) for one in re.findall(r"\d+", ranks)}
                log.said.setdefault(window, line)
            if (ends := _ENDS.search(line)) and not log.why_it_ended:
                log.why_it_ended = ends[1]
        return log


@dataclass(slots=True)
class Ran:
    """The results of one job.

    Attributes:
        corrupted: draw → whether it changed any bit.
        hashes: window → the last hash of each worker.
        log: its scheduler's log.
        has_ended: whether all workers trained to the end.
    """

    corrupted: dict[int, bool]
    hashes: dict[int, dict[str, str]]
    log: Log
    has_ended: bool

    def is_right(self, window: int) -> bool:
        """Return whether all ranks ended the window with the hash of the undisturbed window."""
        of_window = self.hashes.get(window, {})
        return len(of_window) == WORLD_SIZE and set(of_window.values()) == set(self.hashes[0].values())

    def judge(self, seed: int, one: Draw) -> Found | None:
        """Return the result of a draw; None if the job had ended before it."""
        if one.number not in self.corrupted:
            return None
        named, said = self.log.named.get(one.window, set()), self.log.said.get(one.window, "")
        is_right, is_located = self.is_right(one.window), named == {one.victim} and one.place is not Place.SUM
        outcome = MISSED
        if is_located:
            outcome = REPAIRED if is_right else LOCATED
        elif not named and is_right:
            outcome = HARMLESS
        if outcome != REPAIRED and not self.has_ended and one.number == max(self.corrupted):
            said = f"{said} the job ended: {self.log.why_it_ended}"
        return Found(seed, one.number, one.kind.name, one.place.name, outcome, sorted(named), said)


def run(seed: int, first: int, count: int, progress: Progress, *, steps: int = 0) -> Ran:
    """Run one job from draw ``first`` on until it ends.

    Args:
        seed: the seed of the draws.
        first: the first draw.
        count: number of draws; 0: nothing is overwritten.
        progress: reports the hashes.
        steps: total of steps; by default those of the draws.
    """
    with Stage() as stage:
        job = Job(stage, "corruption", WORLD_SIZE, **SETTINGS)
        job.start_scheduler()
        words = [str(one) for one in (seed, first, count, *([steps] if steps else []))]
        workers = [job.start_worker(slot, *words) for slot in range(WORLD_SIZE)]
        _follow(stage, workers, progress)
        corrupted: dict[int, bool] = {}
        for one in stage.channel.select("corrupted"):
            assert one.step is not None, "the draw's number is sent in its place"
            corrupted[one.step] = one.text == "changed" or corrupted.get(one.step, False)
        hashes: dict[int, dict[str, str]] = defaultdict(dict)
        for one in stage.channel.select("hashed"):
            hashes[window_of(one.step or 0)][one.who] = one.text or ""
        log = Log.of((stage.folder / "scheduler.log").read_text(errors="replace"))
        has_ended = len(stage.channel.select("ended")) == WORLD_SIZE
        if not has_ended and not log.why_it_ended:
            print(stage.logs())
        return Ran(corrupted, hashes, log, has_ended)


def _follow(stage: Stage, workers: Sequence[subprocess.Popen[bytes]], progress: Progress) -> None:
    """Return when all workers have exited, or no rank has sent anything for ``LONGEST_WINDOW_S``."""
    heard, heard_s, said = 0, time.monotonic(), 0
    while any(worker.poll() is None for worker in workers):
        time.sleep(LOOK_EVERY_S)
        stage.channel.drain()
        if len(stage.channel.moments) > heard:
            heard, heard_s = len(stage.channel.moments), time.monotonic()
        elif time.monotonic() > heard_s + LONGEST_WINDOW_S:
            return
        if (windows := len(stage.channel.select("hashed")) // WORLD_SIZE) >= said + SAID_EVERY:
            said = windows
            progress.say(f"{windows} windows")
    stage.channel.drain()


def measure(seed: int, count: int, into: Path | None, progress: Progress) -> list[Found]:
    """Carry out all draws of a seed, starting a new job after each draw that ends one, and return the results."""
    found: list[Found] = []
    first = 1
    while first <= count:
        left = count - first + 1
        ran = run(seed, first, left, progress)
        draws = [draw(seed, first + window - 1, window) for window in range(1, left + 1)]
        results = [one for one in (ran.judge(seed, a_draw) for a_draw in draws) if one is not None]
        if not results:
            raise RuntimeError(f"the job carried out no draw: {ran.log.why_it_ended or 'see its logs above'}")
        for one in results:
            if into is not None:
                parts.add(into, Line(found=one))
        found += results
        progress.say(
            f"draws {first} to {results[-1].number} of {count}: {dict(Counter(one.outcome for one in results))}"
        )
        for one in results:
            if one.outcome in (MISSED, LOCATED) and Place[one.place].is_visible:
                progress.say(
                    f"draw {one.number} ({one.kind}, {one.place}): {one.outcome}, named {one.named}: {one.said}"
                )
        first = results[-1].number + 1
    return found


def measure_clean(steps: int, into: Path | None, progress: Progress) -> Clean:
    """Train this many steps undisturbed, and return the lines that name a rank."""
    ran = run(0, 1, 0, progress, steps=steps)
    alarms = [*ran.log.said.values(), *([] if ran.has_ended else [ran.log.why_it_ended or "the job ended early"])]
    alarms += [f"window {window}: wrong hash" for window in ran.hashes if window >= 0 and not ran.is_right(window)]
    clean = Clean(steps, alarms)
    if into is not None:
        parts.add(into, Line(clean=clean))
    return clean


def _figures(found: Iterable[Found]) -> dict[str, int]:
    counted = Counter(one.outcome for one in found)
    located = counted[LOCATED] + counted[REPAIRED]
    return {
        "drawn_count": counted.total(),
        "located_count": located,
        "repaired_count": counted[REPAIRED],
        "missed_count": counted[MISSED],
        "harmless_count": counted[HARMLESS],
    }


def report(found: Sequence[Found], cleans: Sequence[Clean]) -> tuple[Report, str]:
    """Return the figures and the tables of all draws."""
    by_place = {one.name.lower(): [it for it in found if it.place == one.name] for one in Place}
    kinds = sorted({one.kind for one in found})
    visible = [one for one in found if Place[one.place].is_visible]
    uniform = [one for one in found if not Place[one.place].is_of_audited_step]
    ours: dict[str, Any] = {
        "audit_every_steps": AUDIT_EVERY,
        "compared_every_steps": COMPARED_EVERY,
        "places": {name: _figures(some) for name, some in by_place.items()},
        "kinds_where_visible": {kind.lower(): _figures(one for one in visible if one.kind == kind) for kind in kinds},
        "clean": {
            "clean_steps": sum(one.clean_steps for one in cleans),
            "false_alarm_count": sum(len(one.false_alarms) for one in cleans),
        },
        **_figures(found),
    }
    ratios = {
        "located_of_all_drawn_at_any_step": _located(_figures(uniform), all_drawn=True),
        "located_of_visible": _located(_figures(visible)),
        "repaired_of_visible": _located(_figures(visible), "repaired_count"),
    }
    header = ("place", "drawn", "located", "repaired", "missed", "harmless")
    rows = [(Place[name.upper()].value, *_figures(some).values()) for name, some in by_place.items()]
    of_kinds = [(kind.lower(), *_figures(one for one in visible if one.kind == kind).values()) for kind in kinds]
    people = f"{table(header, rows)}\n\n{table(('kind, where visible', *header[1:]), of_kinds)}\n\n{ratios}"
    return Report("corruption", {}, {}, ours, ratios), people


def _located(figures: Mapping[str, int], what: str = "located_count", *, all_drawn: bool = False) -> float | None:
    drawn = figures["drawn_count"] - (0 if all_drawn else figures["harmless_count"])
    return rounded(figures[what] / drawn) if drawn else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.corruption",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--draws", type=int, default=40, metavar="N", help="number of corruptions, from 1 to 1000 (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the draws (default: 1)")
    parser.add_argument(
        "--clean", type=int, default=0, metavar="STEPS", help="instead, train this many steps without corruptions"
    )
    parser.add_argument("--quick", action="store_true", help="inject 8 corruptions")
    parser.add_argument("--into", type=Path, metavar="FILE", help="append each result to this file, as a line of JSON")
    parser.add_argument("--of", type=Path, metavar="FILE", help="measure nothing; report the results in this file")
    options = parser.parse_args(arguments)
    if not 1 <= options.draws <= 1000:
        parser.error("--draws: expected 1 to 1000")
    if options.clean and options.clean < HASHED_AT + WINDOW:
        parser.error(f"--clean: expected at least {HASHED_AT + WINDOW} steps")
    found: list[Found] = []
    cleans: list[Clean] = []
    if options.of is not None:
        try:
            lines = parts.read(options.of, Line)
        except (OSError, ValueError) as error:
            parser.error(f"--of: {error}")
        found = [one.found for one in lines if one.found is not None]
        cleans = [one.clean for one in lines if one.clean is not None]
    elif options.clean:
        cleans = [measure_clean(options.clean, options.into, Progress(f"{options.clean} clean steps"))]
    else:
        count = 8 if options.quick else options.draws
        found = measure(options.seed, count, options.into, Progress(f"{count} draws of seed {options.seed}"))
    result, people = report(found, cleans)
    result.print(people)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
