"""``python -m benchmarks.goodput``: what is left of a job's speed when a rank is killed again and again.

Goodput is (steps kept × the undisturbed run's time per step, same number of processes) ÷ wall time. Contestants train
the same model one after the other, each for the same time, and lose a rank every ``--every`` seconds: SameBits with a
warm spare (the victim is started again as the next one), SameBits without (the victim is started again and waits for
nothing), torchrun. The one idea: only steps that were kept count, so whatever a recovery costs, a restart, a redone
step, a spare's imports on the same cores, is in the figure; where it went, the job's own events say.
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


def report(plain: Run, runs: dict[str, Run], peer: Run | None) -> Report:
    """As the last line has it."""
    step_s = plain.wall_s / plain.steps

    def figures(run: Run) -> dict[str, float]:
        spent = {f"{name}_s": rounded(seconds) for name, seconds in run.buckets_s.items()}
        return {"wall_s": rounded(run.wall_s), "kept_steps": run.steps, "kills_count": run.kills, **spent}

    peers = {"torchrun": MISSING if peer is None else figures(peer)}
    goodputs = {f"goodput_{name}": rounded(run.goodput(step_s)) for name, run in runs.items()}
    if peer is not None:
        goodputs["goodput_torchrun"] = rounded(peer.goodput(step_s))
    return Report(
        benchmark="goodput",
        floor={"undisturbed_step_ms": rounded(step_s * 1000), "undisturbed_steps": plain.steps},
        peers=peers,
        ours={name: figures(run) for name, run in runs.items()},
        ratios=goodputs,
    )


def people(plain: Run, runs: dict[str, Run], peer: Run | None) -> str:
    """For people."""
    step_s = plain.wall_s / plain.steps
    every = {"undisturbed, plain DDP": plain, **runs, **({} if peer is None else {"torchrun": peer})}
    rows = [
        [name, run.kills, run.steps, f"{run.wall_s:.0f}", f"{run.steps / run.wall_s:.1f}", f"{run.goodput(step_s):.3f}"]
        for name, run in every.items()
    ]
    return table(["", "kills", "steps kept", "s", "steps/s", "goodput"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each contestant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two ranks, 40 seconds each")
    options = parser.parse_args()
    workers, for_s = (2, 40.0) if options.quick else (options.workers, options.seconds)
    missing = {"torchrun": needs} if (needs := torchrun_needs()) else {}
    progress = Progress(f"{workers} ranks, a kill every {options.every:g} s, {for_s:g} s each", missing)
    rng = random.Random(options.seed)
    half = undisturbed(workers, for_s / 4, rng)  # before and after all others: the machine may not be ours alone
    progress.say(f"undisturbed: {half.steps / half.wall_s:.1f} steps/s")
    runs = {}
    for name, spares in (("spare", 1), ("restart", 0)):
        runs[name] = ours(workers, spares, for_s, options.every, rng)
        progress.say(f"SameBits, {name}: {runs[name].steps / runs[name].wall_s:.1f} steps/s, {runs[name].kills} kills")
    peer = None if missing else torchrun(workers, for_s, options.every, rng)
    other = undisturbed(workers, for_s / 4, rng)
    plain = Run(half.wall_s + other.wall_s, half.steps + other.steps)
    report(plain, runs, peer).print(people(plain, runs, peer))


if __name__ == "__main__":
    main()
