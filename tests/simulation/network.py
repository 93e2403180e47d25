"""Connections between workers and the scheduler: what may be lost, late, doubled or overtaken, and who notices a close.

A connection joins one process to one life of the scheduler. Each message draws its own fate; on an ordered network
nothing overtakes, as in TCP. What is in flight when a connection closes is lost, or, with stragglers, may still come
after the close was noticed (ZeroMQ's pipes do that). Partitions belong here, once they are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.core.messages import FromScheduler, FromWorker

if TYPE_CHECKING:
    from tests.simulation.faults import Mix
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

FASTEST_S, USUAL_S = 0.0002, 0.02


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of one process to one scheduler start."""

    number: int
    worker: Worker
    life: int  # of the scheduler
    is_open: bool = True
    last_up: float = 0.0  # when the last message to the scheduler arrives
    last_down: float = 0.0


@dataclass(slots=True, eq=False)
class Network:
    """Carries messages according to the run's mix; perfect once the faults have stopped."""

    world: World
    mix: Mix
    calm_at: float | None = None  # since when it is perfect
    _opened: int = 0
    _open: dict[int, Connection] = field(default_factory=dict)

    def calm_down(self) -> None:
        """From here on everything arrives, at once; what is stuck since before is lost."""
        self.calm_at = self.world.now
        for connection in self._open.values():
            connection.last_up = connection.last_down = 0.0

    def connect(self, worker: Worker) -> Connection | None:
        """A new connection, or None where nobody listens."""
        host = self.world.host
        if host.core is None:
            return None
        self._opened += 1
        connection = Connection(self._opened, worker, host.life)
        self._open[self._opened] = connection
        return connection

    def close(self, connection: Connection, *, unnoticed: bool = False) -> None:
        """Both ends get to know, unless nobody is left to tell them (``unnoticed``: a host or a link is gone)."""
        if not connection.is_open:
            return
        connection.is_open = False
        del self._open[connection.number]
        if not unnoticed:
            self.world.after(self.world.rng.uniform(0.001, 0.015), self.world.host.connection_closed, connection)
        self.world.after(self.world.rng.uniform(0.001, 0.015), connection.worker.connection_closed, connection)

    def scheduler_died(self) -> None:
        """Every connection breaks."""
        for connection in list(self._open.values()):
            self.close(connection)

    def up(self, connection: Connection, message: FromWorker) -> None:
        """A worker's message."""
        for arrival in self._arrivals(connection.last_up):
            connection.last_up = arrival
            self.world.at(arrival, self._arrive_up, connection, message, self.world.now)

    def down(self, connection: Connection, message: FromScheduler) -> None:
        """A scheduler's message."""
        for arrival in self._arrivals(connection.last_down):
            connection.last_down = arrival
            self.world.at(arrival, self._arrive_down, connection, message, self.world.now)

    def _arrivals(self, after: float) -> list[float]:
        """When the message arrives: never, once, or more often."""
        world, mix, rng = self.world, self.mix, self.world.rng
        if self.calm_at is not None:
            return [max(after, world.now + FASTEST_S)]
        if mix.p_drop and rng.random() < mix.p_drop:
            world.count("message dropped")
            return []
        copies = 1
        if mix.p_duplicate and rng.random() < mix.p_duplicate:
            world.count("message duplicated")
            copies = 2
        arrivals = []
        for _ in range(copies):
            delay = rng.uniform(FASTEST_S, USUAL_S)
            if mix.p_slow and rng.random() < mix.p_slow:
                world.count("message delayed")
                delay = rng.uniform(0.0, mix.slow_s)
            arrival = world.now + delay
            arrivals.append(max(after, arrival) if mix.is_ordered else arrival)
        return arrivals

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
