"""Connections between workers and the scheduler: loss, delay, duplicates, reordering, and noticing a close.

A connection joins one process to one start of the scheduler. Each message draws its own fate; on an ordered network
nothing overtakes, as in TCP. Messages in flight when a connection closes are lost, or, with stragglers, may still
arrive after the close was noticed (ZeroMQ's pipes do that). A partition cuts nodes off from the scheduler, both ways or
one: what is sent into it waits, as in TCP, until it heals or the connection ends, which either side may notice long
before the other, or never.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from samebits.core.messages import FromScheduler, FromWorker

if TYPE_CHECKING:
    from tests.simulation.mix import Mix
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

FASTEST_S, USUAL_S = 0.0002, 0.02
NEVER = -1.0


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of one process to one scheduler start."""

    number: int
    worker: Worker
    life: int  # of the scheduler
    opened_at: float
    is_open: bool = True
    last_up: float = 0.0  # when the last message to the scheduler arrives
    last_down: float = 0.0


@dataclass(slots=True, eq=False)
class Network:
    """Carries messages according to the run's mix; perfect once the faults have stopped."""

    world: World
    mix: Mix
    calm_at: float | None = None  # since when it is perfect
    _up_from: dict[str, float] = field(default_factory=dict)  # node → when what it sends arrives again
    _down_from: dict[str, float] = field(default_factory=dict)
    _opened: int = 0
    _open: dict[int, Connection] = field(default_factory=dict)

    def calm_down(self) -> None:
        """From now on everything arrives at once; older messages that are stuck are lost."""
        self.calm_at = self.world.now
        self._up_from.clear()
        self._down_from.clear()
        for connection in self._open.values():
            connection.last_up = connection.last_down = 0.0

    def connect(self, worker: Worker) -> Connection | None:
        """Return a new connection, or None without a listener."""
        host, now = self.world.host, self.world.now
        if host.core is None or max(self._healed(worker.node)) > now:
            return None
        self._opened += 1
        connection = Connection(self._opened, worker, host.life, now)
        self._open[self._opened] = connection
        return connection

    def close(self, connection: Connection, *, unnoticed: bool = False) -> None:
        """Notify both ends, unless no one is left to notify them (``unnoticed``: a host or a link is gone)."""
        if not connection.is_open:
            return
        connection.is_open = False
        del self._open[connection.number]
        if not unnoticed:
            latest_s = self.world.rng.choice((0.015, 0.015, 0.015, 1.0))  # the worker may be back by then
            self.world.after(self.world.rng.uniform(0.001, latest_s), self.world.host.connection_closed, connection)
        self.world.after(self.world.rng.uniform(0.001, 0.015), connection.worker.connection_closed, connection)

    def lose_relay(self, host: str, rng: random.Random) -> int:
        """End the connections of a host's workers together, without notifying the scheduler; return their number.

        Each worker notices at its own time, because a relay may be stopped rather than dead.
        """
        ended = [one for one in self._open.values() if one.worker.process.host == host]
        for connection in ended:
            connection.is_open = False
            del self._open[connection.number]
            latest_s = self.world.policy.node_timeout_s / 2
            self.world.after(rng.uniform(0.001, latest_s), connection.worker.connection_closed, connection)
        return len(ended)

    def cut_off(self, nodes: frozenset[str], lasts_s: float, *, up: bool, down: bool, rng: random.Random) -> None:
        """Delay these nodes' messages, or the scheduler's to them, until the partition has healed."""
        heals_at, timeout_s = self.world.now + lasts_s, self.world.policy.node_timeout_s
        for node in sorted(nodes):
            if up:
                self._up_from[node] = max(heals_at, self._up_from.get(node, NEVER))
            if down:
                self._down_from[node] = max(heals_at, self._down_from.get(node, NEVER))
        for connection in list(self._open.values()):
            # ZeroMQ's heartbeats detect it, each on its side
            if connection.worker.node in nodes and rng.random() < 0.8:
                self.world.after(timeout_s * rng.uniform(0.5, 1.5), self._times_out, connection, rng.random() < 0.5)

    def _times_out(self, connection: Connection, scheduler_first: bool) -> None:
        if connection.is_open and self.calm_at is None and max(self._healed(connection.worker.node)) > self.world.now:
            connection.is_open = False
            del self._open[connection.number]
            sooner, later = 0.01, self.world.rng.choice((0.02, 1.0, 6.0))
            at_scheduler, at_worker = (sooner, later) if scheduler_first else (later, sooner)
            self.world.after(at_scheduler, self.world.host.connection_closed, connection)
            self.world.after(at_worker, connection.worker.connection_closed, connection)

    def _healed(self, node: str) -> tuple[float, float]:
        return self._up_from.get(node, NEVER), self._down_from.get(node, NEVER)

    def scheduler_died(self) -> None:
        """Every connection breaks."""
        for connection in list(self._open.values()):
            self.close(connection)

    def up(self, connection: Connection, message: FromWorker) -> None:
        """A worker's message."""
        world, healed = self.world, self._up_from.get(connection.worker.node, NEVER)
        for arrival in self._arrivals(connection.last_up, healed):
            connection.last_up = arrival
            world.at(arrival, self._arrive_up, connection, message, world.now)

    def down(self, connection: Connection, message: FromScheduler) -> None:
        """A scheduler's message."""
        world, healed = self.world, self._down_from.get(connection.worker.node, NEVER)
        for arrival in self._arrivals(connection.last_down, healed):
            connection.last_down = arrival
            world.at(arrival, self._arrive_down, connection, message, world.now)

    def _arrivals(self, after: float, healed: float) -> tuple[float, ...]:
        """Return when the message arrives: never, once, or several times."""
        world = self.world
        if self.calm_at is not None:
            return (max(after, world.now + FASTEST_S),)
        mix, rng = self.mix, world.rng
        if mix.p_drop and rng.random() < mix.p_drop:
            world.count("message dropped")
            return ()
        if mix.p_duplicate and rng.random() < mix.p_duplicate:
            world.count("message duplicated")
            return (self._arrival(after, healed), self._arrival(after, healed))
        return (self._arrival(after, healed),)

    def _arrival(self, after: float, healed: float) -> float:
        world, mix, rng = self.world, self.mix, self.world.rng
        delay = rng.uniform(FASTEST_S, USUAL_S)
        if mix.p_slow and rng.random() < mix.p_slow:
            world.count("message delayed")
            delay = rng.uniform(0.0, mix.slow_s)
        arrival = max(world.now, healed) + delay
        return max(after, arrival) if mix.is_ordered else arrival

    def _passes(self, connection: Connection, sent_at: float) -> bool:
        if self.calm_at is None:
            return connection.is_open or self.mix.has_stragglers
        is_stuck = sent_at < self.calm_at and self.world.now > self.calm_at + USUAL_S
        return connection.is_open and not is_stuck

    def _arrive_up(self, connection: Connection, message: FromWorker, sent_at: float) -> None:
        if self._passes(connection, sent_at):
            self.world.host.receive(connection, message)

    def _arrive_down(self, connection: Connection, message: FromScheduler, sent_at: float) -> None:
        if self._passes(connection, sent_at):
            connection.worker.receive(message)
