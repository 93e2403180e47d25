"""Copies in hosts' memory: of points saved on others, which are sent and arrive, and of a shard's own last commits.

A copy is on its way for a while, and lost if either end dies meanwhile; a keeper has the last two that arrived. In half
of the runs there are none, and their random numbers are separate, so that runs without them are unchanged.

In half of the runs with a sharded state, every rank leaves its last two commits of a fixed interval in its own host's
memory. They outlive its process, and are lost with the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.core.messages import Copy, KeptCommit
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
        self._on_their_way: set[tuple[str, Point]] = set()  # by sender
        self._kept: dict[tuple[str, str], dict[int, list[Point]]] = {}  # by job and host, then by slot
        chance = world.random_of("commits in memory")
        self._every = chance.choice((0, chance.randint(1, 3)))
        self._commits: dict[tuple[str, str], dict[int, list[Point]]] = {}  # likewise, of the slot's own rank

    def send(self, worker: Worker, point: Point) -> None:
        """Send a copy of a point that this worker has saved to its buddy."""
        started = worker.agent._started
        if not self._are_sent or started is None or started.buddy is None or started.generation != worker.generation:
            return
        keeper = self._member(worker.agent.job, started.generation, started.buddy)
        if keeper is not None:
            self._on_their_way.add((worker.session, point))
            takes_s = self._rng.uniform(0.001, self._takes_s)
            self._world.after(takes_s, self._arrive, worker, keeper, started.slot, point)

    def is_sent(self, worker: Worker, point: Point) -> bool:
        """Return whether a copy of this worker's point is on its way."""
        return (worker.session, point) in self._on_their_way

    def _member(self, job: str, generation: int, rank: int) -> Worker | None:
        for other in self._world.workers:
            if (other.agent.job, other.generation, other.rank) == (job, generation, rank):
                return other
        return None

    def _arrive(self, worker: Worker, keeper: Worker, slot: int, point: Point) -> None:
        self._on_their_way.discard((worker.session, point))
        if not worker.is_alive or not keeper.is_alive:
            return
        self._world.note("copied", keeper, slot, point)
        kept = self._kept.setdefault((keeper.agent.job, keeper.process.host), {})
        others = [one for one in kept.get(slot, []) if one != point and not is_abandoned(one, point)]
        kept[slot] = [*others, point][-KEPT:]
        worker.handed_over(point)

    def kept_on(self, job: str, host: str) -> tuple[Copy, ...]:
        """Return what a process there finds."""
        kept = self._kept.get((job, host), {})
        return tuple(Copy(slot, point) for slot in sorted(kept) for point in kept[slot])

    def keep(self, worker: Worker, point: Point, *, begins: bool = False) -> None:
        """Keep the point that this worker has committed, or at which its generation begins."""
        mix = self._world.mix
        is_due = point.step and (begins or (self._every and point.step // mix.commit_every % self._every == 0))
        if mix.sharding is None or not self._every or not is_due:
            return
        of_slots = self._commits.setdefault((worker.agent.job, worker.process.host), {})
        others = [one for one in of_slots.get(worker.slot, []) if one != point and not is_abandoned(one, point)]
        of_slots[worker.slot] = [*others, point][-KEPT:]

    def commits_of(self, job: str, host: str, slot: int | None) -> tuple[KeptCommit, ...]:
        """Return what a process of this slot finds there."""
        found = self._commits.get((job, host), {}).get(-1 if slot is None else slot, [])
        return tuple(KeptCommit(point, 0) for point in found)

    def lose(self, host: str) -> None:
        """The host's memory is gone."""
        for kept in (self._kept, self._commits):
            for job, name in list(kept):
                if name == host:
                    del kept[job, name]
