"""S6: a message of a superseded incarnation changes nothing, not even a lease."""

from __future__ import annotations

from dataclasses import replace

from samebits.core.ledger import Liveness
from samebits.core.messages import FromWorker, Register
from samebits.core.ready import Ready
from samebits.core.records import JobRebuilt, SeatGranted, SpareAdmitted
from samebits.core.scheduler import Received
from tests.simulation.checkers.base import Checker


class Fencing(Checker):
    """Compares the scheduler before and after every message that must change nothing."""

    name = "S6"

    def watch(self) -> None:
        self._before_it: tuple[dict[str, Liveness | None], str] | None = None
        self.world.when_event[Received].append(self._before)
        self.world.when_decided[Received].append(self._decided)

    def _is_superseded(self, message: FromWorker) -> bool:
        if isinstance(message, Register):
            holder = self.world.witness.holders.get(message.node)
            return message.incarnation > 0 and (holder is None or holder.session != message.session)
        return True

    def _snapshot(self) -> tuple[dict[str, Liveness | None], str]:
        core = self.world.host.core
        assert core is not None
        presences = {node: core.presence(node) for node in core.state.seats}
        return {node: replace(known) if known else None for node, known in presences.items()}, core.phase()

    def _before(self, event: Received) -> None:
        if self.world.witness.speaker is None and self._is_superseded(event.message):
            self._before_it = self._snapshot()

    def _decided(self, event: Received, ready: Ready) -> None:
        if self._before_it is None:
            return
        before, self._before_it = self._before_it, None
        if any(isinstance(record, JobRebuilt) for record in ready.records):
            return  # it was the last awaited report for rebuilding a lost journal, which S15 checks
        admitted = [record for record in ready.records if isinstance(record, SeatGranted | SpareAdmitted)]
        if admitted and all(self.world.witness.is_late(event, record) for record in admitted):
            return
        if ready.records:
            self.violated(f"{event} of a process without a seat made {ready.records}")
        if before != self._snapshot():
            self.violated(f"{event} of a process without a seat: {before} became {self._snapshot()}")
