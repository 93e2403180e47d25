"""S16: queues, history and journal stay within stated bounds.

The bounds: waiting processes, at most one entry for each that asked; deadlines, one for every message that a seat can
send within a lease (entries of one seat merge when no message came between them) and one for every grant and close
since they were last judged; an open round, one entry per seat; records of seats, one per node that was ever seated; the
journal, the size at which the shell compacts; the folder, one journal and as many torn ends as are kept; an etcd, one
journal.
"""

from __future__ import annotations

from samebits.core.messages import Admitted, GenerationStarted, RoundOpened
from samebits.core.ready import Ready
from samebits.core.records import JobRebuilt, SeatGranted, SeatResumed, SpareAdmitted
from samebits.core.scheduler import MAX_FENCED, Closed, SchedulerCore, SchedulerEvent, Tick
from samebits.core.state import KEPT_CUTS, KEPT_INTERRUPTIONS
from samebits.store.journal import MAX_TORN_FILES, PLACE_FILE
from tests.simulation.checkers.base import Checker

DEADLINES_A_SEAT = 24  # a heartbeat a second for five seconds, plus duplicates, echoes and joins


class Bounds(Checker):
    """Measures what the core and the folder hold, whenever deadlines were judged or a start has read the journal."""

    name = "S16"

    def begin_job(self) -> None:
        self._nodes: set[str] = set()  # ever seated
        self._pushed = 0

    def watch(self) -> None:
        self.world.watch_loaded.append(self._loaded)
        self.world.when_event[Closed].append(self._closed)
        self.world.when_decided[Tick].append(self._judged)
        self.world.watch_decided.append(self._decided)
        for kind in (Admitted, RoundOpened, GenerationStarted):
            self.world.when_said[kind].append(self._said)

    def _loaded(self, core: SchedulerCore) -> None:
        self._pushed = 0
        path = self.world.host.path
        names = [name for name in path.disk.names() if name != PLACE_FILE]
        torn = [name for name in names if name.startswith("journal.torn-")]
        if len(torn) > MAX_TORN_FILES or len(names) > len(torn) + 1:
            self.violated(f"after a start the folder holds {names}")
        if path.quorum is not None and path.quorum.journals() > 1:
            self.violated(f"after a start the etcd holds {path.quorum.journals()} journals")

    def _closed(self, event: Closed) -> None:
        self._pushed += 1

    def _judged(self, event: Tick, ready: Ready) -> None:
        self._count(ready)
        self._measure()
        self._pushed = 0

    def _decided(self, event: SchedulerEvent | None, ready: Ready) -> None:
        if not isinstance(event, Tick):
            self._count(ready)

    def _count(self, ready: Ready) -> None:
        for record in ready.records:
            if isinstance(record, SeatGranted | SpareAdmitted):
                self._nodes.add(record.node)
            elif isinstance(record, JobRebuilt):
                self._nodes.update(seat.node for seat in record.seats)
                self._pushed += len(record.seats)
            self._pushed += isinstance(record, SeatGranted | SpareAdmitted | SeatResumed)

    def _measure(self) -> None:
        core = self.world.host.core
        assert core is not None
        state, world_size = core.state, self.world.policy.max_world_size
        sizes = _sizes(core)
        asked = len(self.world.started) + self.world.happened["message forged"]
        most = {
            "pending": asked,
            "refused": asked,
            "deadlines": DEADLINES_A_SEAT * len(state.seats) + self._pushed,
            "joined": world_size,
            "blobs": world_size,
            "done": world_size,
            "fenced": MAX_FENCED,
            "seats": len(self._nodes),
            "slots": world_size,
            "absent": world_size,
            "spares": len(self._nodes),
            "coming": world_size,
            "interruptions": KEPT_INTERRUPTIONS,
            "line": KEPT_CUTS,
        }
        for what, size in sizes.items():
            if size > most[what]:
                self.violated(f"{what}: {size}, at most {most[what]} are expected")

    def _said(self, session: str, message: object) -> None:
        path = self.world.host.path
        if path.size_bytes > path.most_bytes:
            self.violated(f"the journal has {path.size_bytes} bytes, it should be compacted at {path.most_bytes}")


def _sizes(core: SchedulerCore) -> dict[str, int]:
    """Return the size of everything in the core that grows."""
    state, round_ = core.state, core._rendezvous.round
    return {
        "pending": len(core._admission.pending),
        "refused": len(core._admission.refused),
        "deadlines": len(core._leases._deadlines),
        "joined": len(round_.joined) if round_ is not None else 0,
        "blobs": len(core._rendezvous._blobs),
        "done": len(core._done),
        "fenced": len(core._fenced),
        "seats": len(state.seats),
        "slots": len(state.by_slot),
        "absent": len(core._ledger.absent),
        "spares": len(state.spares),
        "coming": len(core._world.coming),
        "interruptions": len(state.interruptions),
        "line": len(state.generation.line) if state.generation else 0,
    }
