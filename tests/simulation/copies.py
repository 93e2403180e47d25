"""Copies that hosts keep in memory of points saved on others: what is sent, arrives, and is lost with a host.

A copy is on its way for a while, and lost if either end dies meanwhile; a keeper has the last two that arrived. In half
of the runs there are none, and their random numbers are separate, so that runs without them are unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.core.messages import Copy
from samebits.core.point import Point
from samebits.store.checkpoint import is_abandoned

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

KEPT = 2


class Copies:
    """The copies of every job on every host."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.random_of("copies")
        self._are_sent = self._rng.random() < 0.5
        self._takes_s = self._rng.choice((0.01, 0.3, 5.0))
        self._kept: dict[tuple[str, str], dict[int, list[Point]]] = {}  # by job and host, then by slot

    def send(self, worker: Worker, point: Point) -> None:
        """This worker has saved the point: a copy is sent to its buddy."""
        started = worker.agent._started
        if not self._are_sent or started is None or started.buddy is None or started.generation != worker.generation:
            return
        keeper = self._member(worker.agent.job, started.generation, started.buddy)
        if keeper is not None:
            takes_s = self._rng.uniform(0.001, self._takes_s)
            self._world.after(takes_s, self._arrive, worker, keeper, started.slot, point)

    def _member(self, job: str, generation: int, rank: int) -> Worker | None:
        for other in self._world.workers:
            if (other.agent.job, other.generation, other.rank) == (job, generation, rank):
                return other
        return None

    def _arrive(self, worker: Worker, keeper: Worker, slot: int, point: Point) -> None:
        if not worker.is_alive or not keeper.is_alive:
            return
        self._world.note("copied", keeper, slot, point)
        kept = self._kept.setdefault((keeper.agent.job, keeper.process.host), {})
        others = [one for one in kept.get(slot, []) if one != point and not is_abandoned(one, point)]
        kept[slot] = [*others, point][-KEPT:]

    def kept_on(self, job: str, host: str) -> tuple[Copy, ...]:
        """Return what a process there finds."""
        kept = self._kept.get((job, host), {})
        return tuple(Copy(slot, point) for slot in sorted(kept) for point in kept[slot])

    def lose(self, host: str) -> None:
        """The host's memory is gone."""
        for job, name in list(self._kept):
            if name == host:
                del self._kept[job, name]
