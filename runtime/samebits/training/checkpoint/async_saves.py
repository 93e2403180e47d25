"""Saving beside the training: the memory slots of one rank, its writer process, and the one save in hand.

Here lives what makes a copied state durable later, and when that is not possible. Never here: which points are kept,
what is said when a save fails (``rank_checkpoints``), the copying itself (``staging``). The one idea: memory that is
missing or too small is no reason not to save: the caller is told no, once with the reason, and saves as it would have
without.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from samebits.core.point import Point
from samebits.core.values import replace
from samebits.errors import CheckpointError, StoreError
from samebits.service import log
from samebits.service.buddy import Brief, CopyListener
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import (
    FoundPoint,
    Location,
    MemoryRoom,
    Outcome,
    PointHeader,
    Pruned,
    Pruning,
    Tree,
    Writer,
)
from samebits.store.durable import disk_errors
from samebits.training.checkpoint.staging import Staging
from samebits.training.state.snapshot import NamedTensors

HASHED_SOON_S = 10.0
"""How long a process that was started again waits for what its predecessor's writer is hashing."""
_POLL_S = 0.01  # nobody tells of a byte that changes in shared memory


class AsyncSaves:
    """The asynchronous half of a rank's checkpoints.

    Args:
        root: the job's checkpoint folder.
        slot, job, job_name: whose points.
        memory: the folder in memory; ``checkpoints.SHARED_MEMORY`` but in tests.
        listener: where copies of other ranks' points come in; None: none are exchanged.
    """

    def __init__(
        self,
        root: Location,
        slot: int,
        *,
        job: str,
        job_name: str,
        memory: Path = checkpoints.SHARED_MEMORY,
        listener: CopyListener | None = None,
    ) -> None:
        self._listener = listener
        self._brief: Brief | None = None
        self._is_copying = False  # the writer that runs
        self._said_of_copies = False
        self._root, self._job, self._job_name, self._slot, self._memory = root, job, job_name, slot, memory
        self._room: MemoryRoom | None = None
        self._staging: Staging | None = None
        self._writer: Writer | None = None
        self._refused_bytes: int | None = None  # so much there was no memory for
        self._said = False

    @property
    def is_busy(self) -> bool:
        """Whether a save is in hand."""
        return self._writer is not None and self._writer.is_busy

    def prepare(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree) -> None:
        """Have memory for the first saves by the time they come, where there is any; such a point will be saved."""
        with contextlib.suppress(CheckpointError, StoreError):  # the first save says so
            self._opened_room()[1].prepare(header, tensors, tree, layout)

    def begin(
        self,
        header: PointHeader,
        tensors: NamedTensors,
        tree: Tree,
        layout: Tree,
        lock_descriptor: int,
    ) -> bool:
        """Copy the point and hand it to the writer; False, said once with the reason, where that is not possible.

        Args:
            header, tensors, tree, layout: the point.
            lock_descriptor: of the rank's folder; the writer keeps it locked as long as it writes.

        Raises:
            CheckpointError: the state itself cannot be saved.
        """
        needed_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        if self._refused_bytes is not None and needed_bytes >= self._refused_bytes:
            return False
        try:
            with disk_errors(self._memory, "copying aside"):
                staging, writer = self._opened(lock_descriptor)
                self._refused_bytes = needed_bytes
                name, sequence = staging.stage(header, tensors, tree, layout)
                self._refused_bytes = None
                writer.submit(name, sequence, header.point)
        except CheckpointError:
            self._refused_bytes = None
            raise
        except checkpoints.BufferGoneError as error:
            self._refuse(str(error))
            self._refused_bytes = None  # there is memory: the next save opens the room anew
            return False
        except StoreError as error:
            self._refuse(str(error))
            return False
        if self._said:
            log.say("checkpoints are copied aside again: training goes on while they are written")
        self._said = False
        return True

    def _refuse(self, why: str) -> None:
        if self._refused_bytes is not None:
            self.discard()  # one slot of two is no use, and what is in it is on disk
        if not self._said:
            log.warn(
                f"training waits for the disk at every checkpoint, because it cannot be copied aside: {why} "
                "(CheckpointConfig(async_save=False) does so without a word)"
            )
        self._said = True

    def _opened(self, lock_descriptor: int) -> tuple[Staging, Writer]:
        room, staging = self._opened_room()
        if self._writer is not None and self._brief is not None and not self._is_copying:
            self._writer.close()  # the ranks were all on one host before; nothing is in hand here
            self._writer = None
        if self._writer is None:
            self._writer = self._new_writer(room, lock_descriptor)
        return staging, self._writer

    def _opened_room(self) -> tuple[MemoryRoom, Staging]:
        if self._room is None or self._staging is None:
            checkpoints.sweep(self._memory, self._job)
            self._room = MemoryRoom(self._memory, self._job, self._slot)
            self._staging = Staging(self._room)
        return self._room, self._staging

    def _new_writer(self, room: MemoryRoom, lock_descriptor: int) -> Writer:
        self._is_copying = self._listener is not None and self._brief is not None
        if self._listener is None or self._brief is None:
            return Writer(self._root, room, lock_descriptor, job_name=self._job_name)
        inherited = (self._listener.descriptor,)
        command = self._listener.command
        writer = Writer(
            self._root, room, lock_descriptor, job_name=self._job_name, command=command, inherited=inherited
        )
        writer.brief(self._brief.pack())
        return writer

    def exchange(self, brief: Brief | None) -> None:
        """A generation begins: who keeps this rank's copies, and whose come here; None where nobody's do."""
        if brief is None and self._brief is not None:
            brief = replace(self._brief, keeper="", who="", keeps=())
        self._brief = brief
        if self._writer is not None and self._is_copying and brief is not None:
            self._writer.brief(brief.pack())

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks send their copies here and nobody takes them in yet."""
        return self._writer is None and self._brief is not None and bool(self._brief.keeps)

    def take_in(self, lock_descriptor: int) -> None:
        """Take other ranks' copies in, though nothing of this rank's was saved yet; see :meth:`begin`.

        Raises:
            StoreError: that is not possible; the first save says so too.
        """
        self._opened(lock_descriptor)[1].start()

    def hear_of_copies(self) -> None:
        """Say it once when points are not copied to the buddy, and when they are again; costs nothing otherwise."""
        if self._writer is None or not self._is_copying:
            return
        for problem in self._writer.copies():
            if problem and not self._said_of_copies:
                log.warn(
                    f"the newest checkpoint has no copy at this rank's buddy: {problem}; training goes on, and older "
                    "copies stay (CheckpointConfig(buddy_copies=False) does without them)"
                )
            elif not problem and self._said_of_copies:
                log.say("checkpoints are copied to this rank's buddy again")
            self._said_of_copies = bool(problem)

    def outcome(self, *, wait: bool) -> Outcome | None:
        """The end of the save in hand, if it has one or ``wait`` says to wait for it."""
        return None if self._writer is None else self._writer.outcome(wait=wait)

    def prune(self, pruning: Pruning) -> None:
        """Have old points let go beside the training, now that the save that was in hand is durable."""
        if self._writer is not None:
            self._writer.prune(pruning)

    def pruned(self, *, wait: bool) -> list[Pruned]:
        """What went since this was asked last; ``wait`` for what is going. No save is in hand."""
        return [] if self._writer is None else self._writer.pruned(wait=wait)

    def found(self) -> tuple[list[FoundPoint], list[str]]:
        """The points in memory that can be used once verified, and why others cannot be."""
        deadline_s = time.monotonic() + HASHED_SOON_S
        while self._room is None and checkpoints.is_being_hashed(self._memory, self._job, self._slot):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return checkpoints.points_in_memory(self._memory, self._job, self._slot)

    def forget(self, is_unwanted: Callable[[Point], bool]) -> None:
        """Empty the slots that hold such a point, a predecessor's too; no save is in hand."""
        if self._room is not None:
            self._room.forget(is_unwanted)
        elif any(
            is_unwanted(found.point) for found in checkpoints.points_in_memory(self._memory, self._job, self._slot)[0]
        ):
            checkpoints.remove_room(self._memory, self._job, self._slot)

    def close(self) -> None:
        """Let go of slots and writer, once it has written what it has in hand; what is in memory stays."""
        if self._writer is not None:
            self._writer.close()
        if self._staging is not None:
            self._staging.close()
        if self._room is not None:
            self._room.close()
        self._writer = self._staging = self._room = None

    def discard(self) -> None:
        """As :meth:`close`, and give the memory back, also where a predecessor took it."""
        self.close()
        checkpoints.remove_room(self._memory, self._job, self._slot)
