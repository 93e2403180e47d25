"""The faults of a run and their times: a schedule drawn from the seed before the run starts.

A fault is a function of the world and of its own random numbers, so omitting one does not change another; this allows a
failing schedule to be minimised. Adding a kind takes one function, one entry of ``FAULTS`` and one of
``mix.USUALLY_EVERY_S``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.core.membership.replacement_proofs import proof_of
from samebits.core.messages import (
    Activity,
    Credential,
    FromWorker,
    Heartbeat,
    Holdings,
    Join,
    Leave,
    Publish,
    Register,
    ReportEnvelope,
    RoundId,
)
from samebits.core.point import Point
from samebits.core.replacement_names import may_be_replaced, number_of, root_of, successor_of
from samebits.core.reports import LastWords, PeerGone
from tests.simulation.main_thread import ENDED_KINDS, FIRST_STEPS, PAUSE_S, Kind
from tests.simulation.mix import Mix, Naming
from tests.simulation.worker import NUMERICS, PROTOCOL, Oddity, process_on

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of a run."""

    number: int
    at_s: float
    kind: str
    chance: int  # seeds the fault's own choices

    def __str__(self) -> str:
        return f"{self.at_s:9.3f} s  {self.kind}"


def draw_schedule(mix: Mix, rng: random.Random) -> list[Planned]:
    """Return every fault of the run, by time."""
    times = []
    for kind, rate_hz in mix.rates_hz.items():
        at_s = mix.quiet_start_s + rng.expovariate(rate_hz)
        while at_s < mix.chaos_s:
            times.append((at_s, kind, rng.getrandbits(32)))
            at_s += rng.expovariate(rate_hz)
    return [Planned(number, *what) for number, what in enumerate(sorted(times))]


class Faults:
    """Injects the planned faults until the run is calm."""

    def __init__(self, world: World, schedule: Iterable[Planned]) -> None:
        self._world = world
        for planned in schedule:
            world.at(planned.at_s, self._happen, planned)

    def _happen(self, planned: Planned) -> None:
        world = self._world
        world.note("fault", planned.kind)
        if not world.is_calm and FAULTS[planned.kind](world, random.Random(planned.chance)):
            world.count(planned.kind)


def _some_worker(world: World, rng: random.Random, *, running: bool = False) -> Worker | None:
    workers = [worker for worker in world.workers if worker.is_alive and not (running and worker.is_paused)]
    return rng.choice(workers) if workers else None


# ---- processes that end


def _kill_worker(world: World, rng: random.Random) -> bool:
    worker = _some_worker(world, rng)
    if worker is None:
        return False
    worker.die(unnoticed=rng.random() < 0.2)
    world.operator.start_worker_later(worker.node)
    return True


def _kill_several(world: World, rng: random.Random) -> bool:
    """Kill some workers at once, sometimes a whole host, sometimes the scheduler with them."""
    workers = [worker for worker in world.workers if worker.is_alive]
    if len(workers) < 2:
        return False
    host = rng.choice(workers).process.host
    unnoticed = rng.random() < 0.3
    chosen = rng.sample(workers, rng.randint(2, len(workers)))
    if rng.random() < 0.3:
        chosen = [worker for worker in workers if worker.process.host == host]
    for worker in chosen:
        worker.die(unnoticed=unnoticed)
        world.operator.start_worker_later(worker.node)
    if rng.random() < 0.2:
        _kill_scheduler(world, rng)
    return True


def _kill_scheduler(world: World, rng: random.Random) -> bool:
    if world.host.core is None:
        return False
    world.host.die(reboots=rng.random() < 0.1)
    world.operator.start_scheduler_later()
    return True


def _lose_power(world: World, rng: random.Random) -> bool:
    """Power off the scheduler's machine, whether or not its scheduler runs."""
    world.host.die(reboots=True)
    world.operator.start_scheduler_later()
    return True


def _kill_everything(world: World, rng: random.Random) -> bool:
    _kill_scheduler(world, rng)
    for worker in list(world.workers):
        worker.die()
    return True


def _crash_loop(world: World, rng: random.Random) -> bool:
    """Let the scheduler die repeatedly, a few seconds after each start."""
    world.operator.crash_loops = rng.randint(2, 6)
    return _kill_scheduler(world, rng)


def _raise_in_worker(world: World, rng: random.Random) -> bool:
    worker = _some_worker(world, rng, running=True)
    if worker is None:
        return False
    worker.fail("ValueError: no such sample")
    return True


def _terminate_worker(world: World, rng: random.Random) -> bool:
    """Let a worker leave gracefully."""
    worker = _some_worker(world, rng, running=True)
    if worker is None:
        return False
    worker.terminate()
    return True


def _ask_to_stop(world: World, rng: random.Random) -> bool:
    """Press Ctrl-C in a follower: a stop request, sometimes after a SIGTERM to all."""
    if rng.random() < 0.7:
        world.host.ask_to_stop("Ctrl-C")
    if rng.random() < 0.5:
        for worker in list(world.workers):
            worker.terminate()
    return True


def _ask_to_stop_together(world: World, rng: random.Random) -> bool:
    """``samebits stop --drain``, which repeats its request."""
    for after_s in (0.0, 2.0, 4.0)[: rng.randint(1, 3)]:
        world.after(after_s, lambda: world.host.ask_to_stop("samebits stop", at_commit=True))
    return True


# ---- paused processes


def _stop_worker(world: World, rng: random.Random) -> bool:
    """SIGSTOP, sometimes for longer than lease and cool-down, and often a replacement is started meanwhile."""
    worker = _some_worker(world, rng, running=True)
    if worker is None:
        return False
    worker.pause()
    world.after(rng.choice((0.5, 4.0, 8.0, 45.0, 90.0)) * rng.uniform(0.8, 1.2), worker.resume)
    if rng.random() < 0.5:
        world.operator.start_worker_later(worker.node, duplicate=True)
    return True


def _stop_scheduler(world: World, rng: random.Random) -> bool:
    host = world.host
    if host.core is None or host.is_paused:
        return False
    host.pause()
    life = host.life
    world.after(
        rng.choice((0.3, 2.0, 8.0, 40.0)) * rng.uniform(0.8, 1.2),
        lambda: host.resume() if host.life == life else None,
    )
    if rng.random() < 0.3:  # the workers' heartbeats to it time out meanwhile
        for worker in world.workers:
            world.after(rng.uniform(0.0, 3.0), worker.flap)
    return True


def _training(world: World) -> list[Worker]:
    return [one for one in world.workers if one.is_training and one.thread.hold is None and not one.is_of_another_job()]


def _hold_worker(world: World, rng: random.Random) -> bool:
    """Hold a main thread that sleeps, computes, reads, compiles or commits for too long or forever, or is astray."""
    workers = _training(world)
    workers = [one for one in workers if one.thread.steps >= FIRST_STEPS] or workers
    if not workers:
        return False
    lasts_s = rng.choice((5.0, 15.0, 60.0, None, None))
    rng.choice(workers).hold(rng.choice(list(Kind)), None if lasts_s is None else lasts_s * rng.uniform(0.7, 1.3))
    return True


def _pause_worker(world: World, rng: random.Random) -> bool:
    """Pause one main thread for seconds: a loader, a page fault, a busy neighbour."""
    workers = _training(world)
    if not workers or any(one.thread.hold is not None for one in world.workers):
        return False
    rng.choice(workers).hold(rng.choice(ENDED_KINDS), rng.uniform(0.2, PAUSE_S), is_pause=True)
    return True


def _hold_collective(world: World, rng: random.Random) -> bool:
    """Hold a collective that all have entered: a switch, a driver."""
    workers = _training(world)
    group = world.groups.of(rng.choice(workers)) if workers else None
    if group is None or not group.is_formed:
        return False
    group.is_held = True
    return True


# ---- the network


def _flap(world: World, rng: random.Random) -> bool:
    worker = _some_worker(world, rng)
    if worker is None:
        return False
    worker.flap()
    return True


def _lose_relay(world: World, rng: random.Random) -> bool:
    """Lose the relay of a host with several workers."""
    hosts = [worker.process.host for worker in world.workers if worker.connection is not None]
    return world.network.lose_relay(rng.choice(hosts), rng) > 1 if hosts else False


def _partition(world: World, rng: random.Random) -> bool:
    """Separate some workers from the scheduler, sometimes in one direction only."""
    if not world.workers:
        return False
    nodes = sorted({worker.node for worker in world.workers})
    cut_off = frozenset(rng.sample(nodes, rng.randint(1, len(nodes))))
    up, down = rng.choice(((True, True), (True, False), (False, True)))
    world.count("partition, both ways" if up and down else "partition, one way")
    lasts_s = rng.choice((1.0, 4.0, 12.0, 40.0)) * rng.uniform(0.7, 1.3)
    world.network.cut_off(cut_off, lasts_s, up=up, down=down, rng=rng)
    return True


# ---- impostors


def _start_duplicate(world: World, rng: random.Random) -> bool:
    """Start a second process of a live node: its node id is stolen."""
    worker = _some_worker(world, rng)
    if worker is None:
        return False
    world.operator.start_worker_later(worker.node, duplicate=True)
    return True


def _start_stranger(world: World, rng: random.Random) -> bool:
    """Start a process of another job, of other settings, or of another version, under a node's own name."""
    worker = _some_worker(world, rng)
    if worker is None:
        return False
    world.start_worker(worker.node, oddity=rng.choice((Oddity.OTHER_JOB, Oddity.OTHER_SETTINGS, Oddity.PROTOCOL)))
    return True


def _forge(world: World, rng: random.Random) -> bool:
    """Send in a node's name, or in that of a process long gone, over a connection without a seat."""
    core = world.host.core
    if core is None or not core.state.seats:
        return False
    seat = core.state.seats[rng.choice(sorted(core.state.seats))]
    session, incarnation = f"{seat.node}#forged", rng.randint(0, seat.incarnation + 1)
    job = rng.choice((core.state.job, core.state.job, "job-0-0"))
    sender = Credential(job, seat.node, session, incarnation)
    world.host.forge(session, _forged(world, rng, sender))
    return True


def _forged(world: World, rng: random.Random, sender: Credential) -> FromWorker:
    core = world.host.core
    assert core is not None
    state, policy = core.state, world.policy
    generation, round_ = state.generation_number, RoundId(state.term, rng.randint(1, 3))
    point = Point(world.mix.target_step + 1000, max(1, generation))
    match rng.randrange(7):
        case 0:
            activity = rng.choice(list(Activity))
            return Heartbeat(sender, state.term, activity, generation, round_, point.step)
        case 1:
            return Join(sender, round_, Holdings((point,), False, NUMERICS))
        case 2:
            return Publish(sender, generation, b"nobody#0")
        case 3:
            return ReportEnvelope(sender, LastWords("it was another process"))
        case 4:
            return Leave(sender, rng.random() < 0.5, "it was another process")
        case 5:
            return ReportEnvelope(sender, PeerGone(rng.choice(sorted(seat.session for seat in state.seats.values()))))
        case _:
            there = process_on("host-9", 9)
            incarnation = max(1, sender.incarnation)
            return Register(
                PROTOCOL, sender.job, policy.job_name, sender.node, sender.session, incarnation, there, policy.settings
            )


def _forge_replacement(world: World, rng: random.Random) -> bool:
    """Claim to be a launcher's replacement: with an invented proof, another session's, or an old one overheard."""
    core = world.host.core
    if core is None or not core.state.seats or not world.policy.token:
        return False
    gone = [one for one in world.started if not one.is_alive and one.agent._policy.proof]
    # A proof that was sent and never arrived is still good; CLUSTER_SECRET keeps out those that overhear everything.
    spent = core.state.replacements
    forgotten = [
        one
        for one in gone
        if one.node not in core.state.seats and number_of(one.node) <= spent.get(root_of(one.node), 0)
    ]
    if forgotten and rng.random() < 0.5:
        overheard = rng.choice(forgotten)
        node, session, proof = overheard.node, overheard.session, overheard.agent._policy.proof
    else:
        node, session = successor_of(rng.choice([one for one in core.state.seats if may_be_replaced(one)] or ["0"])), ""
        if node in core.state.seats:  # a known node's seat goes to a process with its name, once its cool-down is over
            return False
        session = f"{node}#forged {len(world.forged)}"
        proofs = [
            rng.randbytes(32),
            proof_of(bytes(32), core.state.job, node, session),
            *(one.agent._policy.proof for one in gone),
        ]
        proof = rng.choice(proofs)
    world.forged.add(session)
    there, policy = process_on("host-9", 9), world.policy
    message = Register(PROTOCOL, "", policy.job_name, node, session, 0, there, policy.settings, proof=proof)
    world.host.forge(session, message)
    return True


def _start_second_scheduler(world: World, rng: random.Random) -> bool:
    """Start another scheduler on the same path: the lock keeps it out, even if the first is only paused.

    If the journal is in an etcd, it stands by instead, and may take over.
    """
    path, process = world.host.path, -rng.randrange(1, 1 << 30)
    if world.host.core is None:
        return False
    if world.host.is_taken_over(rng):
        world.count("scheduler superseded")
    elif path.take_lock(process):
        path.open(process)
    else:
        world.count("second scheduler refused")
    return True


# ---- disks


def _lose_disk(world: World, rng: random.Random) -> bool:
    """A node dies with its checkpoint directory and with what its host kept in memory for others."""
    worker = _some_worker(world, rng)
    if worker is None:
        return False
    worker.die()
    world.checkpoints_of(worker.agent.job, worker.node).lose()
    world.copies.lose(worker.process.host)
    world.operator.start_worker_later(worker.node)
    return True


def _lose_every_disk(world: World, rng: random.Random) -> bool:
    """Every process dies, and the checkpoints with them; the journal stays."""
    world.lose_every_disk()
    return _kill_everything(world, rng)


def _wipe_recovery_path(world: World, rng: random.Random) -> bool:
    """The scheduler dies and its journal is deleted while workers live on, in half of the cases beside new ones."""
    if world.host.core is None or world.host.ended is not None:
        return False
    world.host.die()
    world.wipe_recovery_path()
    world.operator.start_scheduler_later()
    for worker in world.workers:
        if world.mix.naming is not Naming.FRESH and rng.random() < 0.5:
            world.operator.start_worker_later(worker.node, duplicate=True)
    return True


# ---- drains


def _drain(world: World, rng: random.Random) -> bool:
    """Drain a node: a host is taken away, or a smaller world suffices."""
    workers = [one for one in world.workers if not one.is_of_another_job()]
    if not workers:
        return False
    world.driver.drain(rng.choice(workers), rng.choice((0.0, 5.0, 30.0)))
    return True


def _fill_disk(world: World, rng: random.Random) -> bool:
    worker = _some_worker(world, rng)
    if worker is None:
        return False
    world.unwell.fill(worker.process.host, rng.choice((1.0, 4.0, 20.0)))
    return True


# ---- newcomers


def _add_node(world: World, rng: random.Random) -> bool:
    return world.operator.add_node()


FAULTS: dict[str, Callable[[World, random.Random], bool]] = {
    "worker killed": _kill_worker,
    "several killed at once": _kill_several,
    "scheduler killed": _kill_scheduler,
    "everything killed": _kill_everything,
    "scheduler crash-loops": _crash_loop,
    "power lost": _lose_power,
    "second scheduler started": _start_second_scheduler,
    "recovery path wiped": _wipe_recovery_path,
    "worker stopped": _stop_worker,
    "scheduler stopped": _stop_scheduler,
    "connection broken": _flap,
    "partition": _partition,
    "relay lost": _lose_relay,
    "duplicate started": _start_duplicate,
    "stranger started": _start_stranger,
    "message forged": _forge,
    "replacement forged": _forge_replacement,
    "exception raised": _raise_in_worker,
    "worker terminated": _terminate_worker,
    "stop asked for": _ask_to_stop,
    "disk lost": _lose_disk,
    "every disk lost": _lose_every_disk,
    "node added": _add_node,
    "node drained": _drain,
    "joint stop asked for": _ask_to_stop_together,
    "host unwell": _fill_disk,
    "main thread held": _hold_worker,
    "main thread pauses": _pause_worker,
    "collective held": _hold_collective,
}
