"""``python -m benchmarks.goodput``: measure how much of a job's speed remains when ranks are killed regularly.

Goodput is (steps kept × the undisturbed run's time per step, same number of processes) ÷ wall time. Contestants train
the same model one after the other, each for the same time, and lose a rank every ``--every`` seconds: SameBits with a
warm spare (the victim is restarted as the next one), SameBits without (the victim is restarted without waiting),
torchrun, and torchft if an interpreter with it is named. Only steps that were kept count, so the figure includes every
cost of a recovery: a restart, a redone step, a spare's imports on the same cores. The job's own events show where the
time went, also by the names (``BadputType``) of Google's ml-goodput-measurement.

On a shared machine speed varies over time. So each contestant runs between two windows of the undisturbed run and is
compared only with those two. If they differ by more than 5 %, the contestant's figure is marked as not comparable and
left out of the ratios.

Ten minutes of each take an hour: ``--who NAME --seconds N --into FILE`` measures a part, with its own two windows, and
adds it to a file, and ``--of FILE`` makes the report of all parts. Parts of the same contestant and the same interval
between kills are summed.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from benchmarks import parts
from benchmarks.moments import Channel
from benchmarks.processes import Job, Stage, free_port, worker_module, worker_name
from benchmarks.recovery_peers import TORCHFT, TORCHRUN, name_torchft, start_torchft, torchft_needs, torchrun_needs
from benchmarks.report import MISSING, Progress, Report, rounded, table
from benchmarks.workers.paced import INTERVAL
from samebits.account.event_log import read_events
from samebits.account.goodput import badput_s
from samebits.account.history import account

CHECKPOINT_EVERY = "100"
BEGIN_WITHIN_S = 240.0
LOOK_S = 0.2
RECENT_S = 2.0
COMPARABLE = 0.05
"""The largest relative difference between the two undisturbed windows around a contestant."""


PEERS = (TORCHRUN, TORCHFT)
CONTESTANTS = ("spare", "restart", *PEERS)


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One contestant's steps, kills and time while it was measured."""

    wall_s: Annotated[float, msgspec.Meta(gt=0)]
    steps: Annotated[int, msgspec.Meta(ge=0)]
    kills: Annotated[int, msgspec.Meta(ge=0)] = 0
    buckets_s: dict[str, float] = {}

    @property
    def step_s(self) -> float:
        """Return the seconds per step."""
        return self.wall_s / max(1, self.steps)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contestant with regular kills, and the undisturbed run before and after it."""

    who: str
    workers: int
    every_s: float
    run: Run
    before: Run
    after: Run

    @property
    def name(self) -> str:
        """Return the part's name; parts with the same name are summed."""
        return f"{self.who}_every_{self.every_s:g}"

    @property
    def step_s(self) -> float:
        """Return the seconds per undisturbed step, over both windows."""
        return (self.before.wall_s + self.after.wall_s) / max(1, self.before.steps + self.after.steps)

    @property
    def spread(self) -> float:
        """Return the relative difference between the two windows."""
        return abs(self.before.step_s - self.after.step_s) / self.step_s

    @property
    def is_comparable(self) -> bool:
        """Return whether the machine was as fast after the contestant as before it."""
        return self.spread <= COMPARABLE


def goodput(of_one: Sequence[Part]) -> float:
    """Return the share of the wall time that the kept steps would have taken undisturbed.

    Each of the parts, of which there is at least one, is compared with its own windows.
    """
    return sum(part.run.steps * part.step_s for part in of_one) / sum(part.run.wall_s for part in of_one)


@dataclass(slots=True)
class Members:
    """The processes that train, by the timestamps of the last seconds, and the greatest step."""

    channel: Channel
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)
    highest: int = 0

    def look(self) -> None:
        self.channel.drain()
        for moment in self.channel.take():
            if moment.name == "stepped":
                self.seen[moment.pid] = (moment.who, moment.at_s)
                self.highest = max(self.highest, moment.step or 0)

    def now(self) -> dict[int, str]:
        recent = time.monotonic() - RECENT_S
        return {pid: who for pid, (who, at_s) in self.seen.items() if at_s > recent}


Kill = Callable[[int, str], None]
"""Kills the process with this pid and name."""


def measure(stage: Stage, workers: int, for_s: float, every_s: float, rng: random.Random, kill: Kill | None) -> Run:
    """Wait for the start, then count steps; ``kill``, if given, ends a training process every ``every_s``."""
    members, deadline_s = Members(stage.channel), time.monotonic() + BEGIN_WITHIN_S
    while len(members.now()) < workers:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(members.now())} of {workers} ranks train after {BEGIN_WITHIN_S:g} s")
        time.sleep(LOOK_S)
        members.look()
    kills, began_s, first = 0, time.monotonic(), members.highest
    due_s = began_s + every_s
    while (now_s := time.monotonic()) < began_s + for_s:
        members.look()
        training = members.now()
        # The next kill waits until all ranks train, so that no rank is killed while one is still missing.
        if kill is not None and now_s >= due_s and len(training) >= workers:
            pid = rng.choice(sorted(training))
            kill(pid, training[pid])
            members.seen.pop(pid)
            kills += 1
            due_s = max(due_s + every_s, now_s)
        time.sleep(LOOK_S)
    members.look()
    return Run(time.monotonic() - began_s, members.highest - first, kills)


def undisturbed(workers: int, for_s: float) -> Run:
    with Stage() as stage:
        command = _torchrun(workers, [*worker_module("recovery")[1:], "plain"])
        stage.start("plain", command, {}, is_parent=True)
        return measure(stage, workers, for_s, math.inf, random.Random(), None)


def torchrun(workers: int, for_s: float, every_s: float, rng: random.Random) -> Run:
    with Stage() as stage:
        shared = {INTERVAL: CHECKPOINT_EVERY, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        stage.start(TORCHRUN, _torchrun(workers, worker_module(TORCHRUN)[1:]), shared, is_parent=True)
        return measure(stage, workers, for_s, every_s, rng, lambda pid, _: os.kill(pid, signal.SIGKILL))


def ours(workers: int, spares: int, for_s: float, every_s: float, rng: random.Random) -> Run:
    with Stage() as stage:
        job = Job(stage, "recovery", workers, **{INTERVAL: CHECKPOINT_EVERY, "SPARE_NUM": str(spares)})
        job.start_scheduler()
        for slot in range(workers + spares):
            job.start_worker(slot)

        def lose(_: int, who: str) -> None:
            stage.end(who)
            job.start_worker(int(who.removeprefix(worker_name(0)[:-1])))

        run = measure(stage, workers, for_s, every_s, rng, lose)
        spent = account(read_events(stage.folder / "recovery"), time.time())["buckets_s"]
        return msgspec.structs.replace(run, buckets_s=spent)


def torchft(workers: int, for_s: float, every_s: float, rng: random.Random, python: str) -> Run:
    with Stage() as stage:
        start = start_torchft(stage, python)
        for rank in range(workers):
            start(rank)

        def lose(_: int, who: str) -> None:
            stage.end(who)
            start(int(who.removeprefix(worker_name(0)[:-1])))

        return measure(stage, workers, for_s, every_s, rng, lose)


def _torchrun(workers: int, module: list[str]) -> list[str]:
    options = [
        f"--nproc-per-node={workers}",
        "--max-restarts=1000",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--monitor-interval=0.1",
    ]
    return [sys.executable, "-m", "torch.distributed.run", *options, *module]


def measure_parts(options: argparse.Namespace, names: Sequence[str], progress: Progress) -> list[Part]:
    """Measure one part of each contestant; the window after it is the one before the next."""
    workers, for_s, every_s = options.workers, options.seconds, options.every
    contestants: dict[str, Callable[[random.Random], Run]] = {
        "spare": lambda rng: ours(workers, 1, for_s, every_s, rng),
        "restart": lambda rng: ours(workers, 0, for_s, every_s, rng),
        TORCHRUN: lambda rng: torchrun(workers, for_s, every_s, rng),
        TORCHFT: lambda rng: torchft(workers, for_s, every_s, rng, options.torchft),
    }
    found, before = [], undisturbed(workers, for_s / 4)
    for name in names:
        run = contestants[name](random.Random(f"{options.seed} {name}"))
        after = undisturbed(workers, for_s / 4)
        found.append(Part(name, workers, every_s, run, before, after))
        if options.into is not None:
            parts.add(options.into, found[-1])
        progress.say(f"{found[-1].name}: {run.steps / run.wall_s:.1f} steps/s, {run.kills} kills")
        before = after
    return found


def by_name(found: Sequence[Part]) -> dict[str, list[Part]]:
    """Group the parts whose figures are summed.

    Raises:
        ValueError: there are no parts, or they have different world sizes.
    """
    sizes = sorted({part.workers for part in found})
    if len(sizes) != 1:
        raise ValueError(f"expected parts of one number of ranks, found {sizes}. Fix: a file for each number of ranks")
    measured: dict[str, list[Part]] = {}
    for part in found:
        measured.setdefault(part.name, []).append(part)
    return measured


def report(measured: Mapping[str, Sequence[Part]]) -> Report:
    """Return the object of the last line; a part whose windows differ too much is in no ratio."""
    comparable = {name: [part for part in of_one if part.is_comparable] for name, of_one in measured.items()}

    def figures(name: str) -> dict[str, Any]:
        of_one = measured[name]
        windows = [window.step_s * 1000 for part in of_one for window in (part.before, part.after)]
        spent = collections.Counter[str]()
        for part in of_one:
            spent.update(part.run.buckets_s)
        return {
            "parts_count": len(of_one),
            "comparable_parts_count": len(comparable[name]),
            "wall_s": rounded(sum(part.run.wall_s for part in of_one)),
            "kept_steps": sum(part.run.steps for part in of_one),
            "kills_count": sum(part.run.kills for part in of_one),
            "undisturbed_fastest_step_ms": rounded(min(windows)),
            "undisturbed_slowest_step_ms": rounded(max(windows)),
            **{f"{name}_s": rounded(s) for name, s in spent.items()},
            **{f"{name}_s": rounded(s) for name, s in badput_s(spent).items()},
        }

    every = [
        window.step_s * 1000 for of_one in measured.values() for part in of_one for window in (part.before, part.after)
    ]
    of_peers = {name: figures(name) for name, of_one in measured.items() if of_one[0].who in PEERS}
    missing = [peer for peer in PEERS if not any(of_one[0].who == peer for of_one in measured.values())]
    return Report(
        benchmark="goodput",
        floor={
            "undisturbed_step_ms": rounded(sum(every) / len(every)),
            "undisturbed_fastest_step_ms": rounded(min(every)),
            "undisturbed_slowest_step_ms": rounded(max(every)),
        },
        peers={**of_peers, **dict.fromkeys(missing, MISSING)},
        ours={name: figures(name) for name in measured if name not in of_peers},
        ratios={f"goodput_{name}": rounded(goodput(of_one)) for name, of_one in comparable.items() if of_one},
    )


def people(measured: Mapping[str, Sequence[Part]]) -> str:
    """Format one row per part."""
    rows, odd = [], []
    for name, of_one in measured.items():
        for part in of_one:
            run, figure = part.run, f"{goodput([part]):.3f}"
            windows = f"{part.before.step_s * 1000:.1f}, {part.after.step_s * 1000:.1f}"
            shown = figure if part.is_comparable else f"({figure})"
            rate = f"{run.steps / run.wall_s:.1f}"
            rows.append([name, run.kills, run.steps, f"{run.wall_s:.0f}", rate, windows, shown])
            if not part.is_comparable:
                odd.append(
                    f"{name}: not comparable: the undisturbed run before it and after it differ by {part.spread:.0%} "
                    f"(more than {COMPARABLE:.0%}); the machine was not equally fast"
                )
    head = ["", "kills", "steps kept", "s", "steps/s", "undisturbed ms/step before, after", "goodput"]
    return "\n".join([table(head, rows), *odd])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help="seconds under kills for each system; each undisturbed window takes a quarter of this",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="train two ranks for 40 seconds under each system")
    parser.add_argument(
        "--who",
        nargs="+",
        choices=CONTESTANTS,
        default=CONTESTANTS,
        metavar="NAME",
        help=f"systems to measure: {', '.join(CONTESTANTS)}",
    )
    name_torchft(parser)
    parser.add_argument("--into", type=Path, metavar="FILE", help="append each part to this file, as a line of JSON")
    parser.add_argument("--of", type=Path, metavar="FILE", help="measure nothing; report the results in this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.workers, options.seconds = 2, 40.0
    needs = {TORCHRUN: torchrun_needs(), TORCHFT: torchft_needs(options.torchft)}
    missing = {name: what for name, what in needs.items() if what and name in options.who}
    names = [name for name in options.who if name not in missing]
    if options.of is not None:
        try:
            measured = by_name(parts.read(options.of, Part))
        except (OSError, ValueError) as error:
            parser.error(f"--of: {error}")
    elif not names:
        parser.error(f"--who: no contestant can take part: {missing}")
    else:
        what = f"{options.workers} ranks, a kill every {options.every:g} s, {options.seconds:g} s each"
        measured = by_name(measure_parts(options, names, Progress(what, missing)))
    report(measured).print(people(measured))


if __name__ == "__main__":
    main()
