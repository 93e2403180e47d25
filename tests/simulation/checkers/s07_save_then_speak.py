"""S7: everything a scheduler sends is already on disk. Each kind of message names the record it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    AddressMap,
    Admitted,
    EndJob,
    Finished,
    FromScheduler,
    GenerationStarted,
    Pending,
    RoundOpened,
)
from samebits.core.records import (
    GenerationCommitted,
    JobRebuilt,
    RebuiltSeat,
    SeatGranted,
    SlotGiven,
    SpareAdmitted,
    TermStarted,
)
from tests.simulation.checkers.base import Checker


class SaveThenSpeak(Checker):
    """Compares every message with the journal when it is sent."""

    name = "S7"

    def begin_job(self) -> None:
        self._seats: set[tuple[str, int | None, int]] = set()  # every (session, slot, incarnation) that is on disk
        self._holders: dict[str, tuple[str, int]] = {}  # node → its session and incarnation
        self._generations: dict[int, GenerationCommitted] = {}

    def watch(self) -> None:
        self.world.when_durable[SeatGranted].append(self._seated)
        self.world.when_durable[SpareAdmitted].append(self._seated)
        self.world.when_durable[SlotGiven].append(self._given)
        self.world.when_durable[GenerationCommitted].append(self._committed)
        self.world.when_durable[JobRebuilt].append(self._rebuilt)
        self._terms: set[int] = set()  # of this start of the scheduler, on disk
        self.world.watch_loaded.append(lambda core: self._terms.clear())
        self.world.when_durable[TermStarted].append(lambda record: self._terms.add(record.term))
        for kind in (Admitted, Pending, RoundOpened, GenerationStarted, AddressMap, Finished, EndJob):
            self.world.when_said[kind].append(self._said)

    def _seated(self, record: SeatGranted | RebuiltSeat | SpareAdmitted) -> None:
        slot = None if isinstance(record, SpareAdmitted) else record.slot
        self._holders[record.node] = record.session, record.incarnation
        self._seats.add((record.session, slot, record.incarnation))

    def _given(self, record: SlotGiven) -> None:
        session, incarnation = self._holders[record.node]
        self._seats.add((session, record.slot, incarnation))

    def _committed(self, record: GenerationCommitted) -> None:
        self._generations[record.generation] = record

    def _rebuilt(self, record: JobRebuilt) -> None:
        self._terms.add(record.term)
        for seat in record.seats:
            self._seated(seat)
        self._committed(record.generation)

    def _said(self, session: str, message: FromScheduler) -> None:
        if not self._is_backed(session, message):
            disk = self.world.witness.disk
            self.violated(f"{message} is sent to {session}, and the journal does not hold it: {disk}")

    def _is_backed(self, session: str, message: FromScheduler) -> bool:
        disk = self.world.witness.disk
        match message:
            case Admitted():
                return (
                    (session, message.slot, message.incarnation) in self._seats
                    and (disk.term, disk.job) == (message.term, message.job)
                    and message.finished in (None, disk.final)
                )
            case Pending():  # not the last only if the journal was rebuilt in the same step
                return message.term in self._terms
            case RoundOpened():
                # A member of the last generation knows its place; a worker in an incomplete shard group has none.
                members: Sequence[int] = () if disk.generation is None else disk.generation.slots
                mesh = self.world.mix.sharding
                if mesh is not None and mesh.shrinks is not None:
                    members = range(self.world.policy.max_world_size)
                slots = members if message.place is None else (message.place.slot,)
                return disk.term == message.term and any(
                    (session, slot, message.incarnation) in self._seats for slot in slots
                )
            case GenerationStarted():
                committed = self._generations.get(message.generation)
                return (
                    committed is not None
                    and disk.term == message.term
                    and (committed.round, committed.restore) == (message.round, message.restore)
                )
            case AddressMap():
                return disk.term == message.term and message.generation in self._generations
            case Finished():
                return disk.term == message.term and disk.final == message.point
            case EndJob():
                ended = disk.finished if message.kind is EndKind.FINISHED else bool(disk.interruptions)
                return disk.term == message.term and ended
            case _:
                raise AssertionError(f"{type(message).__name__} is not watched")
