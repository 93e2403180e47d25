"""One trial of a recovery by restart: start a job, kill one rank at a random time, and time each phase.

A recovery is over when every rank has finished a step that no rank had finished before the kill.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.moments import Channel, Moment
from benchmarks.processes import Job, Stage, worker_module, worker_name

WORLD_SIZE = 4
FIRST_KILL_AT_STEP = 25
KILL_WITHIN_S = 0.3  # at a random time within this many seconds of that step: most of a checkpoint interval
TRAINING_WITHIN_S = 120.0
RECOVERED_WITHIN_S = 60.0
SETTLED_S = 0.2


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
    def script_s(self) -> float:
        """Return the time in which the replacement's script builds model, samples, DDP and optimizer."""
        return self.enters_s - self.seated_s

    @property
    def above_start_s(self) -> float:
        return self.total_s - self.own_start_s

    @property
    def above_start_and_script_s(self) -> float:
        return self.above_start_s - self.script_s


# --- ours -------------------------------------------------------------------------------------------------------------


def recover_ours(victim: int, rng: random.Random) -> tuple[Timeline, float]:
    """Kill that rank once; return the timeline, and the duration of a step before the kill in milliseconds."""
    with Stage() as stage:
        job = Job(stage, "recovery", WORLD_SIZE)
        job.start_scheduler()
        workers = [job.start_worker(slot) for slot in range(WORLD_SIZE)]
        before = wait_until_training(stage, WORLD_SIZE, rng)
        survivors = frozenset(workers[slot].pid for slot in range(WORLD_SIZE) if slot != victim)
        killed_s = time.monotonic()
        stage.end(worker_name(victim))
        spawned_s = time.monotonic()
        newcomer = job.start_worker(victim).pid

        def recovered() -> bool:
            return is_recovered(stage.channel, killed_s, survivors, newcomer)

        stage.channel.wait_for(recovered, RECOVERED_WITHIN_S, "all four ranks finishing a new step")
        return timeline(stage.channel, killed_s, spawned_s, survivors, newcomer), _step_ms(before)


def is_recovered(channel: Channel, killed_s: float, survivors: frozenset[int], newcomer: int) -> bool:
    """Return whether every rank has finished a step that no rank had finished before the kill."""
    left = channel.select("enters", since_s=killed_s, pids=survivors)
    if {one.pid for one in left} < survivors or not channel.select("trains", pids=frozenset({newcomer})):
        return False
    highest = _highest(channel, last_s(left), newcomer)
    return all(channel.reached[pid] > highest for pid in survivors | {newcomer})


def timeline(channel: Channel, killed_s: float, spawned_s: float, survivors: frozenset[int], newcomer: int) -> Timeline:
    """Evaluate the events of a recovery; ``survivors`` and ``newcomer`` are pids."""
    members, new = survivors | {newcomer}, frozenset({newcomer})

    def of_each(pids: frozenset[int], *names: str) -> list[list[Moment]]:
        every = [one for name in names for one in channel.select(name, since_s=killed_s, pids=pids)]
        return [sorted((one for one in every if one.pid == pid), key=_at_s) for pid in pids]

    left_s = max(moments[0].at_s for moments in of_each(survivors, "enters"))
    highest = _highest(channel, left_s, newcomer)
    trains = {moments[-1].pid: moments[-1] for moments in of_each(members, "trains")}
    restored = trains[newcomer].step or 0
    steps = [
        one for one in channel.select("stepped", since_s=killed_s, pids=members) if one.at_s > trains[one.pid].at_s
    ]
    points_s = {
        "told_s": max(moments[0].at_s for moments in of_each(survivors, "told", "failed")),
        "waits_s": left_s,
        "spawned_s": spawned_s,
        "asks_s": last_s(channel.select("asks", pids=new)),
        "seated_s": last_s(channel.select("seated", pids=new)),
        "enters_s": of_each(new, "enters")[0][0].at_s,
        "placed_s": max(moments[-1].at_s for moments in of_each(members, "placed")),
        "formed_s": max(moments[-1].at_s for moments in of_each(members, "formed")),
        "trains_s": last_s(trains.values()),
        "stepped_s": last_s(one for one in steps if one.step == restored + 1),
        "total_s": last_s(one for one in steps if one.step == highest + 1),
    }
    return Timeline(**{name: at_s - killed_s for name, at_s in points_s.items()}, redone_steps=highest - restored)


def _highest(channel: Channel, until_s: float, newcomer: int) -> int:
    """Return the greatest step that any process had finished by ``until_s``.

    A step may have been committed by a process that was killed before it could report it; the newcomer then starts
    after it.
    """
    begins = [one.step or 0 for one in channel.select("trains", pids=frozenset({newcomer}))]
    return max(*begins, *(one.step or 0 for one in channel.select("stepped") if one.at_s <= until_s))


def last_s(moments: Iterable[Moment]) -> float:
    return max(map(_at_s, moments))


def _at_s(moment: Moment) -> float:
    return moment.at_s


def wait_until_training(stage: Stage, processes: int, rng: random.Random) -> list[Moment]:
    """Wait until that many processes train, and then for a random time; return the steps of one of them."""

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


# --- the floor --------------------------------------------------------------------------------------------------------


def start_alone_s() -> float:
    """Measure a worker's imports in a process that does nothing else, on an otherwise idle machine."""
    with Stage() as stage:
        began_s = time.monotonic()
        command = [sys.executable, "-c", "import benchmarks.workers.recovery"]
        status = stage.start("imports", command, {}).wait()
        if status != 0:
            raise ChildProcessError(f"the imports of a worker ended with status {status}:\n{stage.logs()}")
        return time.monotonic() - began_s


def detection_s() -> float:
    """Measure the kernel's part: from kill -9 of a process as large as a rank until its connection closes."""
    with Stage() as stage, socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(TRAINING_WITHIN_S)
        stage.start("holder", [*worker_module("recovery"), "holder", str(listening.getsockname()[1])], {})
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(TRAINING_WITHIN_S)
            time.sleep(SETTLED_S)
            killed_s = time.monotonic()
            os.kill(stage.pids()["holder"], signal.SIGKILL)
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1)
            return time.monotonic() - killed_s
