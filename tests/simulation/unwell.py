"""How full the hosts' disks are, and what the processes on them report by the real ``HealthWatch``.

A host is healthy (readings far below the limit, with occasional spikes) until a fault fills its disk for a while. The
random numbers are separate, and a world without this fault has no readings at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.core.agent.agent_events import Observed
from samebits.core.reports import HealthReport, Sign
from samebits.core.watch.health_limits import HealthReading, HealthWatch, Limit

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

LIMIT, CALM_SHARE = 0.9, 0.05
LOOKS_EVERY_S = 1.0
P_SPIKE = 0.05
KIND = "host unwell"


class Unwell:
    """The hosts of one run.

    The true state is kept beside each process's watch: two readings in a row make its host unhealthy, or healthy again.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.random_of("readings")
        self._full: dict[str, int] = {}  # host → how many faults fill its disk
        self._looks: dict[str, tuple[float, float]] = {}  # the last two readings of each session
        self._unwell: set[str] = set()  # sessions

    def begin(self, worker: Worker) -> None:
        """The process takes readings from now on."""
        if KIND in self._world.mix.rates_hz:
            self._look(worker, HealthWatch({Sign.DISK: Limit(LIMIT, drains=True)}))

    def fill(self, host: str, lasts_s: float) -> None:
        """The host's disk is full for so long."""
        self._full[host] = self._full.get(host, 0) + 1
        self._world.after(lasts_s, self._make_room, host)

    def is_unwell(self, session: str) -> bool:
        """Return whether two readings in a row have shown a full disk, and no two since have not."""
        return session in self._unwell

    def calm_down(self) -> None:
        """No disk is full."""
        self._full.clear()

    def _make_room(self, host: str) -> None:
        if self._full.get(host):
            self._full[host] -= 1

    def _share(self, host: str) -> float:
        if self._full.get(host):
            return self._chance.uniform(LIMIT, 0.99)
        return 0.97 if self._chance.random() < P_SPIKE else self._chance.uniform(0.2, 0.8)

    def _look(self, worker: Worker, watch: HealthWatch) -> None:
        if not worker.is_alive:
            return
        self._world.after(LOOKS_EVERY_S, self._look, worker, watch)
        if worker.is_paused:
            return
        share = self._share(worker.process.host)
        looks = self._looks[worker.session] = (self._looks.get(worker.session, (0.0, 0.0))[1], share)
        if min(looks) >= LIMIT:
            self._unwell.add(worker.session)
        elif max(looks) < LIMIT - CALM_SHARE:
            self._unwell.discard(worker.session)
        if watch.look([HealthReading(Sign.DISK, "/ckpt", share)]) or watch.ailments:
            worker.says(Observed(HealthReport(watch.ailments)))
