"""What goes wrong in a run, and how often: drawn from the seed, a different mix for every run (swarm testing).

A run with every fault at once finds less than many runs with a few each, so each kind is switched off in half of them.
A fault is a function of the world; adding a kind is one entry of ``FAULTS``.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World


class Naming(enum.Enum):
    """What NODE_ID the operator gives."""

    SLOTS = "digits"
    NAMES = "names"
    FRESH = "a new name at every start"


@dataclass(frozen=True, slots=True)
class Mix:
    """One run's world: sizes, timings and probabilities. Durations in seconds."""

    world_size: int
    naming: Naming
    cool_down_s: float
    topo_timeout_s: float
    chaos_s: float
    quiet_start_s: float  # before the first fault of a process
    target_step: int
    save_every: int
    step_s: float
    saves_s: float
    prepares_s: float
    keep: int
    has_own_parts: bool
    breaks_sockets: bool  # whoever leaves a collective tells its neighbours so
    is_ordered: bool
    has_stragglers: bool
    p_drop: float
    p_duplicate: float
    p_slow: float
    slow_s: float
    fsync_s: float
    p_torn: float
    p_echo: float
    sweep_s: float  # how often the operator looks
    rates_hz: dict[str, float]  # fault → events per second

    @classmethod
    def draw(cls, rng: random.Random) -> Mix:
        """A mix for this seed."""
        quiet = rng.random() < 0.4  # connections as good as TCP's: then the processes are what fails
        scale = rng.choice((0.3, 1.0, 1.0, 2.0))
        chaos_s, step_s = rng.uniform(20.0, 150.0), rng.choice((0.2, 0.4, 1.0))
        return cls(
            world_size=rng.choice((1, 2, 2, 3, 3, 3, 4, 5, 8)),
            naming=rng.choice((Naming.SLOTS, Naming.SLOTS, Naming.NAMES, Naming.FRESH)),
            cool_down_s=rng.choice((0.0, 1.0, 1.0, 5.0, 30.0)),
            topo_timeout_s=rng.choice((60.0, 150.0)),
            chaos_s=chaos_s,
            quiet_start_s=rng.choice((0.0, 15.0)),
            target_step=3 + int(chaos_s * rng.choice((0.1, 0.5, 0.8)) / step_s),
            save_every=rng.choice((1, 3, 5, 10)),
            step_s=step_s,
            saves_s=rng.choice((0.01, 0.3, 3.0)),
            prepares_s=rng.choice((0.1, 1.0, 8.0)),
            keep=rng.choice((2, 3, 100)),
            has_own_parts=rng.random() < 0.3,
            breaks_sockets=rng.random() < 0.5,
            is_ordered=quiet or rng.random() < 0.5,
            has_stragglers=not quiet and rng.random() < 0.5,
            p_drop=0.0 if quiet else rng.choice((0.0, 0.02, 0.2)),
            p_duplicate=0.0 if quiet else rng.choice((0.0, 0.05, 0.3)),
            p_slow=0.0 if quiet else rng.choice((0.0, 0.0, 0.02, 0.1)),
            slow_s=rng.choice((2.0, 10.0, 60.0)),
            fsync_s=rng.choice((0.0, 0.0, 0.01, 0.3, 3.0)),
            p_torn=rng.choice((0.0, 0.02, 0.1)),
            p_echo=rng.choice((0.0, 0.05)),
            sweep_s=rng.choice((2.0, 5.0, 20.0)),
            rates_hz={
                kind: scale * rng.choice((1.0, 0.3)) / fault.usually_every_s
                for kind, fault in FAULTS.items()
                if rng.random() < 0.4
            },
        )


class Faults:
    """Lets faults happen until the run is calm."""

    def __init__(self, world: World) -> None:
        self._world = world
        for kind, rate_hz in world.mix.rates_hz.items():
            self._plan(kind, rate_hz, world.mix.quiet_start_s)

    def _plan(self, kind: str, rate_hz: float, later_s: float = 0.0) -> None:
        self._world.after(later_s + self._world.rng.expovariate(rate_hz), self._happen, kind, rate_hz)

    def _happen(self, kind: str, rate_hz: float) -> None:
        if self._world.is_calm:
            return
        if FAULTS[kind].happen(self._world):
            self._world.count(kind)
        self._plan(kind, rate_hz)


def _some_worker(world: World, *, running: bool = False) -> Worker | None:
    workers = [worker for worker in world.workers if worker.is_alive and not (running and worker.is_paused)]
    return world.rng.choice(workers) if workers else None


def _kill_worker(world: World) -> bool:
    worker = _some_worker(world)
    if worker is None:
        return False
    world.note("fault", "kill -9", worker)
    worker.die(unnoticed=world.rng.random() < 0.2)
    world.operator.start_worker_later(worker.node)
    return True


def _kill_two_workers(world: World) -> bool:
    return _kill_worker(world) and _kill_worker(world)


def _kill_scheduler(world: World) -> bool:
    if world.host.core is None:
        return False
    world.host.die(reboots=world.rng.random() < 0.15)
    world.operator.start_scheduler_later()
    return True


def _kill_everything(world: World) -> bool:
    world.note("fault", "kill -9 of everything")
    _kill_scheduler(world)
    for worker in list(world.workers):
        worker.die()
    return True


def _crash_loop(world: World) -> bool:
    """The scheduler dies again and again, a few seconds after each start."""
    world.operator.crash_loops = world.rng.randint(2, 5)
    return _kill_scheduler(world)


def _stop_worker(world: World) -> bool:
    """SIGSTOP, at times for longer than lease and cool-down, and often a replacement is started meanwhile."""
    worker = _some_worker(world, running=True)
    if worker is None:
        return False
    worker.pause()
    world.after(world.rng.choice((0.5, 4.0, 8.0, 45.0, 90.0)) * world.rng.uniform(0.8, 1.2), worker.resume)
    if world.rng.random() < 0.5:
        world.operator.start_worker_later(worker.node, duplicate=True)
    return True


def _stop_scheduler(world: World) -> bool:
    host = world.host
    if host.core is None or host.is_paused:
        return False
    host.pause()
    life = host.life
    world.after(
        world.rng.choice((0.3, 2.0, 8.0, 40.0)) * world.rng.uniform(0.8, 1.2),
        lambda: host.resume() if host.life == life else None,
    )
    if world.rng.random() < 0.3:  # the workers' heartbeats to it time out meanwhile
        for worker in world.workers:
            world.after(world.rng.uniform(0.0, 3.0), worker.flap)
    return True


def _flap(world: World) -> bool:
    worker = _some_worker(world)
    if worker is None:
        return False
    world.note("fault", "connection breaks", worker)
    worker.flap()
    return True


def _start_duplicate(world: World) -> bool:
    worker = _some_worker(world)
    if worker is None:
        return False
    world.operator.start_worker_later(worker.node, duplicate=True)
    return True


def _raise_in_worker(world: World) -> bool:
    worker = _some_worker(world, running=True)
    if worker is None:
        return False
    world.note("fault", "exception", worker)
    worker.fail("ValueError: no such sample")
    return True


def _terminate_worker(world: World) -> bool:
    worker = _some_worker(world, running=True)
    if worker is None:
        return False
    world.note("fault", "SIGTERM", worker)
    worker.terminate()
    return True


def _ask_to_stop(world: World) -> bool:
    """Ctrl-C in a follower: a stop request, and sometimes SIGTERM to everybody before it is heard."""
    world.note("fault", "Ctrl-C")
    if world.rng.random() < 0.7:
        world.host.ask_to_stop("Ctrl-C")
    if world.rng.random() < 0.5:
        for worker in list(world.workers):
            worker.terminate()
    return True


def _lose_disk(world: World) -> bool:
    """A node dies and its checkpoint directory with it."""
    worker = _some_worker(world)
    if worker is None:
        return False
    world.note("fault", "loses its disk", worker)
    worker.die()
    world.checkpoints_of(worker.node).lose()
    world.operator.start_worker_later(worker.node)
    return True


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong; ``happen`` says whether it could."""

    happen: Callable[[World], bool]
    usually_every_s: float


FAULTS: dict[str, Fault] = {
    "worker killed": Fault(_kill_worker, 10.0),
    "two workers killed": Fault(_kill_two_workers, 30.0),
    "scheduler killed": Fault(_kill_scheduler, 15.0),
    "everything killed": Fault(_kill_everything, 60.0),
    "scheduler crash-loops": Fault(_crash_loop, 40.0),
    "worker stopped": Fault(_stop_worker, 10.0),
    "scheduler stopped": Fault(_stop_scheduler, 15.0),
    "connection broken": Fault(_flap, 5.0),
    "duplicate started": Fault(_start_duplicate, 20.0),
    "exception raised": Fault(_raise_in_worker, 20.0),
    "worker terminated": Fault(_terminate_worker, 30.0),
    "stop asked for": Fault(_ask_to_stop, 60.0),
    "disk lost": Fault(_lose_disk, 30.0),
}
