"""The process that drains nodes: it asks through the scheduler until they are gone, and keeps them away for a while.

This models ``samebits drain``, a discovery script that no longer names a host, and a smaller requested size. A node
that is kept away is not restarted before it is readmitted, which is at the latest when the faults have stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

ASKS_EVERY_S = 2.0
LATE_S = 200.0  # a paused scheduler hears this late


class Driver:
    """The driver of one run.

    Attributes:
        asks: the nodes that are to leave, and since when.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.asks: dict[str, float] = {}
        self._away: dict[str, float] = {}  # node → until when it is kept away
        self._asked_until: dict[str, float] = {}

    def drain(self, worker: Worker, away_s: float) -> None:
        """Drain the worker's node, and keep it away for so long once it is gone."""
        if worker.node not in self.asks:
            self.asks[worker.node] = self._world.now
            self._ask(worker, away_s)

    def wants_gone(self, node: str) -> bool:
        """Return whether it asks this node to leave, or did when the last messages were sent."""
        return node in self.asks or self._world.now < self._asked_until.get(node, 0.0)

    def keeps_away(self, node: str) -> bool:
        """Return whether the node may not be started now."""
        return node in self.asks or self._away.get(node, 0.0) > self._world.now

    def calm_down(self) -> None:
        """No node is to leave any more."""
        self.asks.clear()
        self._away.clear()

    def _ask(self, worker: Worker, away_s: float) -> None:
        world = self._world
        if worker.node not in self.asks:
            return
        if not worker.is_alive:
            del self.asks[worker.node]
            self._away[worker.node] = world.now + away_s
            return
        self._asked_until[worker.node] = world.now + LATE_S
        world.host.drain((worker.node,))
        world.after(ASKS_EVERY_S, self._ask, worker, away_s)
