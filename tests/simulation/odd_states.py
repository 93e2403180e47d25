"""Ranks with a different state: a few bytes that stand for weights, moments and positions.

Every state is ``EQUAL`` until, in some runs, one rank's becomes different: the script does not average, or a sampler
was moved. A different state is saved, sent to members that lack it, and restored like any other. When the run is calm
no state is different any more: the script was corrected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.core.point import Point

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

EQUAL = b"equal"


class OddStates:
    """Makes a rank different, and remembers the content of each point of each node."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.random_of("odd states")
        self._of: dict[tuple[str, str, Point], bytes] = {}
        if world.mix.has_odd_rank:
            world.after(self._chance.uniform(0.0, world.mix.chaos_s), self._happen)

    def of(self, job: str, node: str, point: Point) -> bytes:
        """Return the content of a point that this node has committed."""
        return self._of.get((job, node, point), EQUAL)

    def committed(self, worker: Worker, point: Point) -> None:
        """The worker's state is this point."""
        if worker.bits != EQUAL:
            self._of[worker.agent.job, worker.node, point] = worker.bits

    def restored_by(self, worker: Worker, generation: int, source: int, point: Point | None) -> bytes:
        """Return the state of a worker that takes the point from this rank."""
        committed = self._world.witness.line.of(generation)
        if point is None or committed is None:  # or its job's journal was lost meanwhile
            return EQUAL
        return self.of(worker.agent.job, committed.members[source][0], point)

    def calm_down(self) -> None:
        """No state differs from now on; a process whose state does ends, since its reports are final."""
        self._of.clear()
        for worker in [one for one in self._world.workers if one.bits != EQUAL]:
            worker.die()

    def _happen(self) -> None:
        world = self._world
        training = [one for one in world.workers if one.is_training and not one.is_of_another_job()]
        if world.is_calm or not training:
            return
        worker = self._chance.choice(training)
        worker.bits = f"odd since {worker} {world.now:.3f}".encode()
        world.note("fault", worker, "becomes odd")
        world.count("rank becomes odd")
