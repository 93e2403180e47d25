"""One trial of a recovery, ours or torchrun's: start a job, kill one rank at a random moment, see when what happened.

Here live the trials, and the points in time that one yields. Never here: how many trials there are and what is made of
them. The one idea: a recovery is over when every rank has finished a step that no rank had finished before the kill.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.moments import Channel, Moment
from benchmarks.processes import Job, Stage, free_port, worker_module, worker_name

WORLD_SIZE = 4
FIRST_KILL_AT_STEP = 25
KILL_WITHIN_S = 0.3  # at a random moment of so many seconds from that step on: most of a checkpoint interval
TRAINING_WITHIN_S = 120.0
RECOVERED_WITHIN_S = 60.0
TORCHRUN = "torchrun"


@dataclass(frozen=True, slots=True)
class Timeline:
    """One recovery of ours: seconds from the kill to the last process that reached each point."""

    told_s: float
    """every survivor knows, by its own collective or from the scheduler"""
    waits_s: float
    """every survivor has left its collective, dropped its group and is in the rendezvous"""
    spawned_s: float
    """the victim is gone and its replacement is being spawned"""
    asks_s: float
    """the replacement has imported everything and asks for its seat"""
    seated_s: float
    enters_s: float
    """the replacement has built model, DDP and optimizer and enters the rendezvous"""
    placed_s: float
    formed_s: float
    trains_s: float
    """the user's function runs again on every rank, at the restore point"""
    stepped_s: float
    """every rank has finished one step"""
    total_s: float
    """every rank has finished a step that is new"""
    redone_steps: int

    @property
    def own_start_s(self) -> float:
        return self.asks_s - self.spawned_s

    @property
    def above_start_s(self) -> float:
        return self.total_s - self.own_start_s


@dataclass(frozen=True, slots=True)
class Restart:
    """One recovery by torchrun: seconds from the kill to the last worker that reached each point."""

    asks_s: float
    stepped_s: float
    total_s: float
    redone_steps: int


# --- ours -------------------------------------------------------------------------------------------------------------


def recover_ours(victim: int, rng: random.Random) -> tuple[Timeline, float]:
    """Kill that rank once; returns the timeline, and the milliseconds of a step before the kill."""
    with Stage() as stage:
        job = Job(stage, "recovery", WORLD_SIZE)
        job.start_scheduler()
        workers = [job.start_worker(slot) for slot in range(WORLD_SIZE)]
        before = _wait_until_training(stage, WORLD_SIZE, rng)
        survivors = frozenset(workers[slot].pid for slot in range(WORLD_SIZE) if slot != victim)
        killed_s = time.monotonic()
        stage.end(worker_name(victim))
        spawned_s = time.monotonic()
        newcomer = job.start_worker(victim).pid
        members = survivors | {newcomer}

        def recovered() -> bool:
            left = stage.channel.select("enters", since_s=killed_s, pids=survivors)
            if len(left) < len(survivors) or newcomer not in stage.channel.reached:
                return False
            highest = _highest(stage.channel, _last(left))
            return all(stage.channel.reached[pid] > highest for pid in members)

        stage.channel.wait_for(recovered, RECOVERED_WITHIN_S, "all four ranks finishing a new step")
        return timeline(stage.channel, killed_s, spawned_s, survivors, newcomer), _step_ms(before)


def timeline(channel: Channel, killed_s: float, spawned_s: float, survivors: frozenset[int], newcomer: int) -> Timeline:
    """What the moments of a recovery say; pids of those who were there before and of the one who came back."""
    members, new = survivors | {newcomer}, frozenset({newcomer})

    def of_each(pids: frozenset[int], *names: str) -> list[list[Moment]]:
        every = [one for name in names for one in channel.select(name, since_s=killed_s, pids=pids)]
        return [sorted((one for one in every if one.pid == pid), key=_at_s) for pid in pids]

    left_s = max(moments[0].at_s for moments in of_each(survivors, "enters"))
    highest = _highest(channel, left_s)
    trains = {moments[-1].pid: moments[-1] for moments in of_each(members, "trains")}
    restored = trains[newcomer].step or 0
    steps = [
        one for one in channel.select("stepped", since_s=killed_s, pids=members) if one.at_s > trains[one.pid].at_s
    ]
    points_s = {
        "told_s": max(moments[0].at_s for moments in of_each(survivors, "told", "failed")),
        "waits_s": left_s,
        "spawned_s": spawned_s,
        "asks_s": _last(channel.select("asks", pids=new)),
        "seated_s": _last(channel.select("seated", pids=new)),
        "enters_s": of_each(new, "enters")[0][0].at_s,
        "placed_s": max(moments[-1].at_s for moments in of_each(members, "placed")),
        "formed_s": max(moments[-1].at_s for moments in of_each(members, "formed")),
        "trains_s": _last(trains.values()),
        "stepped_s": _last(one for one in steps if one.step == restored + 1),
        "total_s": _last(one for one in steps if one.step == highest + 1),
    }
    return Timeline(**{name: at_s - killed_s for name, at_s in points_s.items()}, redone_steps=highest - restored)


def _highest(channel: Channel, until_s: float) -> int:
    """The greatest step any process had finished by then."""
    return max(one.step or 0 for one in channel.select("stepped") if one.at_s <= until_s)


def _last(moments: Iterable[Moment]) -> float:
    return max(map(_at_s, moments))


def _at_s(moment: Moment) -> float:
    return moment.at_s


def _wait_until_training(stage: Stage, processes: int, rng: random.Random) -> list[Moment]:
    """Until that many processes train, and then some; returns the steps of one of them."""

    def all_train() -> bool:
        reached = stage.channel.reached.values()
        return len(reached) == processes and min(reached) >= FIRST_KILL_AT_STEP

    stage.channel.wait_for(all_train, TRAINING_WITHIN_S, "training")
    time.sleep(rng.uniform(0, KILL_WITHIN_S))
    stage.channel.drain()
    steps = stage.channel.select("stepped")
    return [one for one in steps if one.pid == steps[0].pid]


def _step_ms(steps: Sequence[Moment]) -> float:
    return (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1) * 1e3


# --- torchrun ---------------------------------------------------------------------------------------------------------


def recover_torchrun(victim: int, rng: random.Random, variables: dict[str, str], within_s: float) -> Restart | None:
    """Kill that rank once; None if the job was not training again within that time."""
    with Stage() as stage:
        stage.start(TORCHRUN, torchrun_command(), variables, is_parent=True)
        _wait_until_training(stage, WORLD_SIZE, rng)
        channel = stage.channel
        old = frozenset(channel.reached)
        pid = next(one.pid for one in channel.moments if one.who == f"torchrun_{victim}")
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        try:
            channel.wait_for(lambda: len(_beyond(channel, old)) == WORLD_SIZE, within_s, "torchrun's recovery")
        except TimeoutError:
            return None
        return restart(channel, killed_s, old, _beyond(channel, old))


def restart(channel: Channel, killed_s: float, old: frozenset[int], new: frozenset[int]) -> Restart:
    """What the moments of a restart say; pids of the workers before and after."""
    highest = max(channel.reached[pid] for pid in old)
    restored = min(one.step or 0 for one in channel.select("trains", pids=new))
    steps = channel.select("stepped", since_s=killed_s, pids=new)
    return Restart(
        asks_s=_last(channel.select("asks", pids=new)) - killed_s,
        stepped_s=_last(one for one in steps if one.step == restored + 1) - killed_s,
        total_s=_last(one for one in steps if one.step == highest + 1) - killed_s,
        redone_steps=highest - restored,
    )


def _beyond(channel: Channel, old: frozenset[int]) -> frozenset[int]:
    """The processes started since that have finished a step no old one had."""
    highest = max(channel.reached[pid] for pid in old)
    return frozenset(pid for pid, step in channel.reached.items() if pid not in old and step > highest)


def has_torchrun() -> bool:
    """Whether this torch brings it; torch itself is not loaded."""
    torch = importlib.util.find_spec("torch")
    return (
        torch is not None and torch.origin is not None and (Path(torch.origin).parent / "distributed/run.py").exists()
    )


def torchrun_command() -> list[str]:
    options = {
        "--nproc-per-node": WORLD_SIZE,
        "--max-restarts": 100,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"127.0.0.1:{free_port()}",
    }
    flags = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "torch.distributed.run", *flags, *worker_module(TORCHRUN)[1:]]


# --- the floor --------------------------------------------------------------------------------------------------------


def start_alone_s() -> float:
    """How long a worker's imports take in a process that does nothing else, on an otherwise idle machine."""
    with Stage() as stage:
        began_s = time.monotonic()
        command = [sys.executable, "-c", "import benchmarks.workers.recovery"]
        status = stage.start("imports", command, {}).wait()
        if status != 0:
            raise ChildProcessError(f"the imports of a worker ended with status {status}:\n{stage.logs()}")
        return time.monotonic() - began_s
