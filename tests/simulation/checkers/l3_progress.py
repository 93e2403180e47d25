"""L3: once faults stop, the restore point advances."""

from __future__ import annotations

from samebits.core.point import Point
from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.deadlines import advanced_s, people
from tests.simulation.group import Group


class Progress(Checker):
    """Checks the members' disks a bounded time after the first step of a generation without faults."""

    name = "L3"

    def watch(self) -> None:
        self._watched: set[tuple[str, int]] = set()
        self.world.watch_trained.append(self._trained)

    def _trained(self, group: Group) -> None:
        if any(member.is_asked for member in group.members.values()):
            return  # it leaves at its next commit, and may have been held until the faults stopped
        key = (group.job, group.generation)
        if self.world.is_calm and group.job == self.world.witness.job and key not in self._watched:
            self._watched.add(key)
            self.world.after(advanced_s(self.world), self._must_have_advanced, group)

    def _must_have_advanced(self, group: Group) -> None:
        witness = self.world.witness
        if group.job != witness.job or witness.line.of(group.generation) is not witness.line.committed[-1]:
            return
        committed = witness.line.committed[-1]
        start = committed.restore or Point(0, 0)
        if start.step >= self.world.mix.target_step:
            return
        for node, _ in committed.members:
            newest = max(self.world.checkpoints_of(group.job, node).held(), default=Point(0, 0))
            if newest <= start:
                self.violated(f"{node} has {newest}, the generation started from {start}: {people(self.world)}")
