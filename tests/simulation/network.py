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
    is_calm: bool = False
    _opened: int = 0
    _open: dict[int, Connection] = field(default_factory=dict)

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
            self.world.at(arrival, self._arrive_up, connection, message)

    def down(self, connection: Connection, message: FromScheduler) -> None:
        """A scheduler's message."""
        for arrival in self._arrivals(connection.last_down):
            connection.last_down = arrival
            self.world.at(arrival, self._arrive_down, connection, message)

    def _arrivals(self, after: float) -> list[float]:
        """When the message arrives: never, once, or more often."""
        world, mix, rng = self.world, self.mix, self.world.rng
        if self.is_calm:
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

    def _passes(self, connection: Connection) -> bool:
        return connection.is_open or (self.mix.has_stragglers and not self.is_calm)

    def _arrive_up(self, connection: Connection, message: FromWorker) -> None:
        if self._passes(connection):
            self.world.host.receive(connection, message)

    def _arrive_down(self, connection: Connection, message: FromScheduler) -> None:
        if self._passes(connection):
            connection.worker.receive(message)
