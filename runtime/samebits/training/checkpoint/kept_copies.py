"""Other ranks' points in this host's memory: found, verified, offered when a generation forms, and given back.

Here lives what this process may answer for of what lies on its host; how copies come here is ``service``'s, who is sent
which is the core's choice. The one idea: several processes of a host see the same copies, and each copy is offered by
one of them, the one that has its lock: who keeps it anyway, or else whoever looks first. So every copy is verified
once, and none is forgotten because the process that took it in is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from samebits.core.messages import Copy
from samebits.core.point import Point
from samebits.errors import CheckpointError, LockedError, StoreError
from samebits.service import log
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import Checkpoint, FoundPoint, MemoryRoom

OLD_AFTER = 2  # points that all have saved since a generation began


class KeptCopies:
    """The copies of one job on this host, as far as this process answers for them.

    Args:
        job: whose.
        memory: the folder in memory; ``checkpoints.SHARED_MEMORY`` but in tests.
    """

    def __init__(self, job: str, *, memory: Path = checkpoints.SHARED_MEMORY) -> None:
        self._job, self._memory = job, memory
        self._keeps: frozenset[int] = frozenset()
        self._claimed: dict[int, MemoryRoom] = {}  # to be offered, by slot
        self._found: dict[Copy, FoundPoint] = {}  # verified
        self._rejected: dict[Copy, str] = {}
        self._passed_over: set[str] = set()
        self._generation = 0
        self._saved_by_all: set[Point] = set()  # since that began

    def begin(self, generation: int, keeps: Collection[int]) -> None:
        """A generation has begun with a whole state on every rank: what is kept from now on is kept by its writers."""
        self._keeps = frozenset(keeps)
        self._generation = generation
        self._saved_by_all.clear()
        self.let_go()

    def look(self) -> list[Copy]:
        """The copies this process answers for, verified; each one passed over is named with its reason."""
        self._found.clear()
        for slot in checkpoints.copied_slots(self._memory, self._job):
            if slot in self._keeps or self._claims(slot):
                found, problems = checkpoints.points_in_memory(self._memory, self._job, slot, is_copy=True)
                for problem in problems:
                    self._pass_over(problem)
                for one in found:
                    self._verify(Copy(slot, one.point), one)
        return sorted(self._found, key=lambda copy: (copy.slot, copy.point))

    def _claims(self, slot: int) -> bool:
        if slot not in self._claimed:
            try:
                self._claimed[slot] = MemoryRoom(self._memory, self._job, slot, is_copy=True)
            except LockedError:
                return False  # whoever has it answers for it
            except StoreError as error:
                self._pass_over(str(error))
                return False
        return True

    def _verify(self, copy: Copy, found: FoundPoint) -> None:
        if copy in self._rejected:
            return
        try:
            checkpoints.verify(found)
        except CheckpointError as error:
            self.reject(copy, str(error))
        else:
            self._found[copy] = found

    def _pass_over(self, problem: str) -> None:
        if problem not in self._passed_over:
            self._passed_over.add(problem)
            log.warn(f"passed over a copy of another rank's restore point: {problem}")

    def reject(self, copy: Copy, reason: str) -> None:
        """Never offer this copy again; it stays where it is."""
        self._found.pop(copy, None)
        self._rejected[copy] = reason
        self._pass_over(f"slot {copy.slot}, {copy.point}: {reason}")

    @contextlib.contextmanager
    def rejecting(self, copy: Copy) -> Iterator[None]:
        """Inside the block the copy is used: where it turns out not to be whole it is rejected."""
        try:
            yield
        except CheckpointError as error:
            self.reject(copy, str(error))
            raise

    def read(self, copy: Copy) -> Checkpoint:
        """Read one of the copies, verified."""
        found = self._found.get(copy)
        if found is None:
            raise CheckpointError(f"the copy of slot {copy.slot}, {copy.point}, is gone")
        return checkpoints.read(found)

    def let_go(self) -> None:
        """Nobody loads from here any more: other processes of this host may take new copies in."""
        for room in self._claimed.values():
            room.close()
        self._claimed.clear()
        self._found.clear()

    def saved_by_all(self, point: Point | None) -> None:
        """Every rank holds this point on disk: old copies that nobody keeps up to date any more may go.

        After the second such point of a generation: by then the new keepers have had the time for one of their own.
        """
        if point is None or point.generation < self._generation or point in self._saved_by_all:
            return
        self._saved_by_all.add(point)
        if len(self._saved_by_all) != OLD_AFTER:
            return
        for slot in set(checkpoints.copied_slots(self._memory, self._job)) - self._keeps:
            found, _ = checkpoints.points_in_memory(self._memory, self._job, slot, is_copy=True)
            if all(one.point < point for one in found):
                checkpoints.remove_room(self._memory, self._job, slot, is_copy=True)

    def discard(self) -> None:
        """The job has ended well: nobody will look for copies. What a live process still has it removes itself."""
        self.let_go()
        for slot in checkpoints.copied_slots(self._memory, self._job):
            checkpoints.remove_room(self._memory, self._job, slot, is_copy=True)
