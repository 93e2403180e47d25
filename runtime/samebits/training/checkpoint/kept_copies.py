"""Find, verify and offer the copies of other ranks' points in this host's memory.

All processes of a host see the same copies. Each copy is offered by the process that holds its lock: the process that
updates it or, if there is none, the first that looks for copies. Every copy is therefore verified once, and stays
available after the process that received it has died.
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
from samebits.store.checkpoint import FoundPoint, LoadedPoint, MemoryRoom
from samebits.store.checkpoint.memory_room import RoomKind

OLD_AFTER = 2  # points that all ranks must save in a generation before unused copies are removed


class KeptCopies:
    """The copies on this host that this process offers to other ranks.

    Args:
        job: the job's id.
        memory: the folder in memory; other than ``checkpoints.SHARED_MEMORY`` only in tests.
    """

    def __init__(self, job: str, *, memory: Path = checkpoints.SHARED_MEMORY) -> None:
        self._job, self._memory = job, memory
        self._keeps: frozenset[int] = frozenset()
        self._claimed: dict[int, MemoryRoom] = {}  # by slot
        self._found: dict[Copy, FoundPoint] = {}  # verified
        self._rejected: dict[Copy, str] = {}
        self._passed_over: set[str] = set()
        self._generation = 0
        self._saved_by_all: set[Point] = set()  # since this generation began

    def begin(self, generation: int, keeps: Collection[int]) -> None:
        """Begin a generation in which copies of these slots are stored.

        The copies that were claimed for the last recovery are released.
        """
        self._keeps = frozenset(keeps)
        self._generation = generation
        self._saved_by_all.clear()
        self.let_go()

    def look(self) -> list[Copy]:
        """Verify the copies that this process can offer, and return them.

        Each skipped copy is logged with the reason.
        """
        self._found.clear()
        for slot in checkpoints.copied_slots(self._memory, self._job):
            if slot in self._keeps or self._claims(slot):
                found, problems = checkpoints.points_in_memory(self._memory, self._job, slot, kind=RoomKind.COPIED)
                for problem in problems:
                    self._pass_over(problem)
                for one in found:
                    self._verify(Copy(slot, one.point), one)
        return sorted(self._found, key=lambda copy: (copy.slot, copy.point))

    def _claims(self, slot: int) -> bool:
        if slot not in self._claimed:
            try:
                self._claimed[slot] = MemoryRoom(self._memory, self._job, slot, kind=RoomKind.COPIED)
            except LockedError:
                return False  # the process that holds the lock offers it
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
            log.warn(f"ignored a copy of another rank's restore point: {problem}")

    def reject(self, copy: Copy, reason: str) -> None:
        """Never offer this copy again. Its file is not removed."""
        self._found.pop(copy, None)
        self._rejected[copy] = reason
        self._pass_over(f"slot {copy.slot}, {copy.point}: {reason}")

    @contextlib.contextmanager
    def rejecting(self, copy: Copy) -> Iterator[None]:
        """Context manager that rejects the copy if it is found to be damaged in the ``with`` block."""
        try:
            yield
        except CheckpointError as error:
            self.reject(copy, str(error))
            raise

    def read(self, copy: Copy) -> LoadedPoint:
        """Read a copy and verify it."""
        found = self._found.get(copy)
        if found is None:
            raise CheckpointError(f"the copy of slot {copy.slot}, {copy.point}, is gone")
        return checkpoints.read(found)

    def let_go(self) -> None:
        """Release the claimed copies, so that other processes on this host can receive new ones."""
        for room in self._claimed.values():
            room.close()
        self._claimed.clear()
        self._found.clear()

    def saved_by_all(self, point: Point | None) -> None:
        """Remove outdated copies that no process updates, now that every rank has this point on disk.

        Only the second such point of a generation has this effect: by then, the new buddies have had time to receive a
        copy.
        """
        if point is None or point.generation < self._generation or point in self._saved_by_all:
            return
        self._saved_by_all.add(point)
        if len(self._saved_by_all) != OLD_AFTER:
            return
        for slot in set(checkpoints.copied_slots(self._memory, self._job)) - self._keeps:
            found, _ = checkpoints.points_in_memory(self._memory, self._job, slot, kind=RoomKind.COPIED)
            if all(one.point < point for one in found):
                checkpoints.remove_room(self._memory, self._job, slot, kind=RoomKind.COPIED)

    def discard(self) -> None:
        """Remove all copies after the job has finished, except copies that another live process holds."""
        self.let_go()
        for slot in checkpoints.copied_slots(self._memory, self._job):
            checkpoints.remove_room(self._memory, self._job, slot, kind=RoomKind.COPIED)
