"""``python -m benchmarks.goodput``: what is left of a job's speed when a rank is killed again and again.

Goodput is (steps kept × the undisturbed run's time per step, same number of processes) ÷ wall time. Contestants train
the same model one after the other, each for the same time, and lose a rank every ``--every`` seconds: SameBits with a
warm spare (the victim is started again as the next one), SameBits without (the victim is started again and waits for
nothing), torchrun. The one idea: only steps that were kept count, so whatever a recovery costs, a restart, a redone
step, a spare's imports on the same cores, is in the figure; where it went, the job's own events say.

A machine that others use too is faster at one time than at another. So each contestant stands between two windows of
the undisturbed run, and is held against those two alone; where they differ by more than 5 %, its figure is given, said
to be not comparable, and left out of the ratios.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.moments import Channel
from benchmarks.processes import Job, Stage, free_port, worker_module, worker_name
from benchmarks.recovery_peers import TORCHRUN, torchrun_needs
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


def _torchrun(workers: int, module: list[str]) -> list[str]:
    options = [
        f"--nproc-per-node={workers}",
        "--max-restarts=1000",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--monitor-interval=0.1",
    ]
    return [sys.executable, "-m", "torch.distributed.run", *options, *module]


def report(trials: dict[str, Paired], has_peer: bool) -> Report:
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
        peers={TORCHRUN: figures(trials[TORCHRUN]) if has_peer else MISSING},
        ours={name: figures(one) for name, one in trials.items() if name != TORCHRUN},
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each contestant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two ranks, 40 seconds each")
    options = parser.parse_args()
    workers, for_s = (2, 40.0) if options.quick else (options.workers, options.seconds)
    missing = {TORCHRUN: needs} if (needs := torchrun_needs()) else {}
    progress = Progress(f"{workers} ranks, a kill every {options.every:g} s, {for_s:g} s each", missing)
    rng = random.Random(options.seed)
    contestants: dict[str, Callable[[], Run]] = {
        "spare": lambda: ours(workers, 1, for_s, options.every, rng),
        "restart": lambda: ours(workers, 0, for_s, options.every, rng),
    }
    if not missing:
        contestants[TORCHRUN] = lambda: torchrun(workers, for_s, options.every, rng)

    def window() -> Run:
        found = undisturbed(workers, for_s / 4, rng)
        progress.say(f"undisturbed: {found.steps / found.wall_s:.1f} steps/s")
        return found

    trials: dict[str, Paired] = {}
    before = window()
    for name, contestant in contestants.items():
        run = contestant()
        progress.say(f"{name}: {run.steps / run.wall_s:.1f} steps/s, {run.kills} kills")
        after = window()
        trials[name] = Paired(run, before, after)
        before = after
    report(trials, not missing).print(people(trials))


if __name__ == "__main__":
    main()
