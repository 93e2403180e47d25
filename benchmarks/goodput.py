"""``python -m benchmarks.goodput``: what is left of a job's speed when a rank is killed again and again.

Goodput is (steps kept × the undisturbed run's time per step, same number of processes) ÷ wall time. Contestants train
the same model one after the other, each for the same time, and lose a rank every ``--every`` seconds: SameBits with a
warm spare (the victim is started again as the next one), SameBits without (the victim is started again and waits for
nothing), torchrun, and torchft where an interpreter with it is named. The one idea: only steps that were kept count,
so whatever a recovery costs, a restart, a redone step, a spare's imports on the same cores, is in the figure; where it
went, the job's own events say.

A machine that others use too is faster at one time than at another. So each contestant stands between two windows of
the undisturbed run, and is held against those two alone; where they differ by more than 5 %, its figure is given, said
to be not comparable, and left out of the ratios.

With ``--keep FILE`` every measurement that is through is kept, so that the same command goes on where it was ended;
``--part`` ends it after the next one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.moments import Channel
from benchmarks.processes import Job, Stage, free_port, worker_module, worker_name
from benchmarks.recovery_peers import TORCHFT, TORCHRUN, start_torchft, torchft_needs, torchrun_needs
from benchmarks.report import MISSING, Progress, Report, rounded, table
from benchmarks.workers.paced import INTERVAL
from runtime.ops.history_show import account
from runtime.service.events import read_events

CHECKPOINT_EVERY = "100"
BEGIN_WITHIN_S = 240.0
LOOK_S = 0.2
RECENT_S = 2.0
COMPARABLE = 0.05
"""By so much of their mean the two undisturbed windows around a contestant may differ."""


@dataclass(slots=True)
class Run:
    """What one contestant did while it was measured."""

    wall_s: float = 0.0
    steps: int = 0
    kills: int = 0
    buckets_s: dict[str, float] = field(default_factory=dict)

    def goodput(self, step_s: float) -> float:
        """Of the time, what its steps would have taken undisturbed."""
        return self.steps * step_s / self.wall_s

    @property
    def step_s(self) -> float:
        """Seconds a step took."""
        return self.wall_s / self.steps if self.steps else math.inf


@dataclass(frozen=True, slots=True)
class Paired:
    """A contestant, and the undisturbed run right before and right after it."""

    run: Run
    before: Run
    after: Run

    @property
    def step_s(self) -> float:
        """Of both windows together."""
        return (self.before.wall_s + self.after.wall_s) / max(1, self.before.steps + self.after.steps)

    @property
    def spread(self) -> float:
        """By which share of their mean the two windows differ."""
        return abs(self.before.step_s - self.after.step_s) / self.step_s

    @property
    def is_comparable(self) -> bool:
        """Whether the machine was as fast after the contestant as before it."""
        return self.spread <= COMPARABLE

    @property
    def goodput(self) -> float:
        """The contestant's, by the two windows."""
        return self.run.goodput(self.step_s)


@dataclass(slots=True)
class Members:
    """Who trains, by the moments of the last seconds; and how far the furthest has come."""

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
"""Ends the process with this pid, which calls itself so."""


def measure(stage: Stage, workers: int, for_s: float, every_s: float, rng: random.Random, kill: Kill | None) -> Run:
    """Let it begin, then count its steps; where ``kill`` is given, every ``every_s`` one of those who train is lost."""
    members, deadline_s = Members(stage.channel), time.monotonic() + BEGIN_WITHIN_S
    while len(members.now()) < workers:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(members.now())} of {workers} ranks train after {BEGIN_WITHIN_S:g} s")
        time.sleep(LOOK_S)
        members.look()
    run, began_s, first = Run(), time.monotonic(), members.highest
    due_s = began_s + every_s
    while (now_s := time.monotonic()) < began_s + for_s:
        members.look()
        training = members.now()
        # One that is not back yet is not killed twice: the next one falls due when all train.
        if kill is not None and now_s >= due_s and len(training) >= workers:
            pid = rng.choice(sorted(training))
            kill(pid, training[pid])
            members.seen.pop(pid)
            run.kills += 1
            due_s = max(due_s + every_s, now_s)
        time.sleep(LOOK_S)
    members.look()
    run.wall_s, run.steps = time.monotonic() - began_s, members.highest - first
    return run


def undisturbed(workers: int, for_s: float, rng: random.Random) -> Run:
    with Stage() as stage:
        command = _torchrun(workers, [*worker_module("recovery")[1:], "plain"])
        stage.start("plain", command, {}, is_parent=True)
        return measure(stage, workers, for_s, math.inf, rng, None)


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
        run.buckets_s = account(read_events(stage.folder / "recovery"), time.time())["buckets_s"]
        return run


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


PEERS = (TORCHRUN, TORCHFT)


def report(trials: dict[str, Paired]) -> Report:
    """As the last line has it; a figure whose windows differ too much is in no ratio."""

    def figures(one: Paired) -> dict[str, float]:
        spent = {f"{name}_s": rounded(seconds) for name, seconds in one.run.buckets_s.items()}
        return {
            "wall_s": rounded(one.run.wall_s),
            "kept_steps": one.run.steps,
            "kills_count": one.run.kills,
            "undisturbed_before_ms": rounded(one.before.step_s * 1000),
            "undisturbed_after_ms": rounded(one.after.step_s * 1000),
            **spent,
        }

    windows = [window for one in trials.values() for window in (one.before, one.after)]
    every = [window.step_s * 1000 for window in windows]
    return Report(
        benchmark="goodput",
        floor={
            "undisturbed_step_ms": rounded(sum(every) / len(every)),
            "undisturbed_fastest_step_ms": rounded(min(every)),
            "undisturbed_slowest_step_ms": rounded(max(every)),
        },
        peers={name: figures(trials[name]) if name in trials else MISSING for name in PEERS},
        ours={name: figures(one) for name, one in trials.items() if name not in PEERS},
        ratios={f"goodput_{name}": rounded(one.goodput) for name, one in trials.items() if one.is_comparable},
    )


def people(trials: dict[str, Paired]) -> str:
    """For people."""
    rows = [
        [
            name,
            one.run.kills,
            one.run.steps,
            f"{one.run.wall_s:.0f}",
            f"{one.run.steps / one.run.wall_s:.1f}",
            f"{one.before.step_s * 1000:.1f}, {one.after.step_s * 1000:.1f}",
            f"{one.goodput:.3f}" if one.is_comparable else f"({one.goodput:.3f})",
        ]
        for name, one in trials.items()
    ]
    head = ["", "kills", "steps kept", "s", "steps/s", "undisturbed ms/step before, after", "goodput"]
    odd = [
        f"{name}: not comparable: the undisturbed run before it and after it differ by {one.spread:.0%} (more than "
        f"{COMPARABLE:.0%}); the machine was not equally fast"
        for name, one in trials.items()
        if not one.is_comparable
    ]
    return "\n".join([table(head, rows), *odd])


class Kept:
    """The measurements that are through, in a file where one is named.

    Args:
        path: of the file; None: they are kept in memory alone.
        asked: what was asked for: what another run has kept is no part of this one.
    """

    def __init__(self, path: Path | None, asked: str) -> None:
        self._path, self._asked = path, asked
        self._runs: dict[str, Run] = {}
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found["asked"] != asked:
                raise SystemExit(
                    f"{path} keeps {found['asked']}, this is {asked}. Fix: name another file, or remove it"
                )
            self._runs = {name: Run(**run) for name, run in found["runs"].items()}

    def has(self, name: str) -> bool:
        """Whether it is through."""
        return name in self._runs

    def run(self, name: str, measured: Callable[[], Run]) -> Run:
        """What it gave, now or before."""
        if name not in self._runs:
            self._runs[name] = measured()
            if self._path is not None:
                runs = {one: asdict(run) for one, run in self._runs.items()}
                self._path.write_text(json.dumps({"asked": self._asked, "runs": runs}))
        return self._runs[name]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each contestant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two ranks, 40 seconds each")
    parser.add_argument("--torchft", default=sys.executable, metavar="PYTHON", help="that has torchft (default: this)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep what is measured there, and go on from it")
    parser.add_argument("--part", action="store_true", help="with --keep: end after one more measurement")
    options = parser.parse_args()
    if options.part and options.keep is None:
        parser.error("--part: expected --keep FILE beside it, or the next part does not know of this one")
    workers, for_s, every_s = options.workers, options.seconds, options.every
    if options.quick:
        workers, for_s = 2, 40.0
    needs = {TORCHRUN: torchrun_needs(), TORCHFT: torchft_needs(options.torchft)}
    missing = {name: what for name, what in needs.items() if what}
    asked = f"{workers} ranks, a kill every {every_s:g} s, {for_s:g} s each"
    progress = Progress(asked, missing)
    kept = Kept(options.keep, f"{asked}, seed {options.seed}")

    def rng(name: str) -> random.Random:
        return random.Random(f"{options.seed} {name}")

    contestants: dict[str, Callable[[], Run]] = {
        "spare": lambda: ours(workers, 1, for_s, every_s, rng("spare")),
        "restart": lambda: ours(workers, 0, for_s, every_s, rng("restart")),
        TORCHRUN: lambda: torchrun(workers, for_s, every_s, rng(TORCHRUN)),
        TORCHFT: lambda: torchft(workers, for_s, every_s, rng(TORCHFT), options.torchft),
    }
    taking_part = [name for name in contestants if name not in missing]
    order = ["undisturbed 0"]
    for number, name in enumerate(taking_part, 1):
        order += [name, f"undisturbed {number}"]
    for name in order:
        if kept.has(name):
            continue
        measured = contestants.get(name, lambda name=name: undisturbed(workers, for_s / 4, rng(name)))  # type: ignore[misc]
        run = kept.run(name, measured)
        progress.say(f"{name}: {run.steps / run.wall_s:.1f} steps/s, {run.kills} kills")
        if options.part and name != order[-1]:
            progress.say(f"kept in {options.keep}; the same command goes on with the next of {len(order)}")
            return
    runs = {name: kept.run(name, lambda: Run()) for name in order}
    trials = {
        name: Paired(runs[name], runs[f"undisturbed {number}"], runs[f"undisturbed {number + 1}"])
        for number, name in enumerate(taking_part)
    }
    report(trials).print(people(trials))


if __name__ == "__main__":
    main()
