"""The books of S8, S9 and S10: the points brought into each round, and those the job has kept.

The line is walked back through the generations as they were committed; the records' own ``line`` is not used.
"""

from __future__ import annotations

from samebits.core.messages import Holdings, Join, RoundId
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted, JobRebuilt


class Line:
    """One job's generations, and what their members held when they were formed."""

    def __init__(self) -> None:
        self.begin_job()

    def begin_job(self) -> None:
        """Nothing is committed."""
        self.committed: list[GenerationCommitted] = []  # durably, in order
        self.last: GenerationCommitted | None = None  # decided; another record may share its group commit
        self._made_anew: GenerationCommitted | None = None  # the last one, as known to a rebuilt job
        self._oldest = 0  # of the generations whose points a rebuilt job still recognises as its own
        self._brought: dict[tuple[RoundId, str, int], Holdings] = {}

    def rebuilt(self, record: JobRebuilt, committed: list[GenerationCommitted]) -> None:
        """An earlier job restarts; ``committed`` is what its lost journal held."""
        self.committed = [one for one in committed if one.generation <= record.generation.generation]
        self.last = self._made_anew = record.generation
        known = [cut.generation for cut in record.generation.line if not cut.is_a_loss]
        self._oldest = min((record.generation.generation, *known))

    def loaded(self) -> None:
        """A new start of the scheduler knows what is durable."""
        self.last, anew = self.committed[-1] if self.committed else None, self._made_anew
        if anew is not None and (self.last is None or self.last.generation <= anew.generation):
            self.last = anew

    def decided(self, record: GenerationCommitted) -> None:
        """A generation is decided; it may yet be lost with its group commit."""
        self.last = record

    @property
    def members(self) -> dict[str, int]:
        """Return the members of the last decided generation, and their incarnations."""
        return {} if self.last is None else dict(self.last.members)

    def of(self, generation: int) -> GenerationCommitted | None:
        """Return the durable record of this generation."""
        return next((one for one in reversed(self.committed) if one.generation == generation), None)

    def brought(self, join: Join) -> None:
        """A member has joined; reports on a round that has made a generation are too late to count."""
        if self.last is not None and join.round <= self.last.round:
            return
        self._brought[join.round, join.sender.node, join.sender.incarnation] = join.holdings

    def join_of(self, round_: RoundId, node: str, incarnation: int) -> Holdings | None:
        """Return what this member brought into this round."""
        return self._brought.get((round_, node, incarnation))

    def joins_of(self, record: GenerationCommitted) -> list[Holdings | None]:
        """Return what each rank brought."""
        return [self.join_of(record.round, node, incarnation) for node, incarnation in record.members]

    def kept(self) -> dict[int, int | None]:
        """Return generation → its last kept step (None: all), of the line that the newest generation continues."""
        kept: dict[int, int | None] = {}
        last_step: int | None = None
        generation = self.committed[-1].generation if self.committed else 0
        while generation > 0:
            kept[generation] = last_step
            if generation == self._oldest:
                break
            committed = self.of(generation)
            start = None if committed is None else committed.restore
            if start is None:
                break
            generation, last_step = start.generation, start.step
        return kept


def is_kept(point: Point, kept: dict[int, int | None]) -> bool:
    """Return whether the point is on that line."""
    if point.generation not in kept:
        return False
    last_step = kept[point.generation]
    return last_step is None or point.step <= last_step
