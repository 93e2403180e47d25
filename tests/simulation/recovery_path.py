"""RECOVERY_PATH in the simulation: the real journal over the simulated disk or etcd, and the lock beside it.

The lock is modelled (as the kernel's: it ends with its holder); the journal is ``samebits.store.journal`` itself. If
the journal is in an etcd (``quorum``), the folder's file is a copy that any start may find missing or outdated. The
module remembers which bytes the journal must hold, so that the remains of a crash can be compared with what is
permitted: everything whose append returned, and all or nothing of the append in progress.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache

from samebits.core.records import SCHEMA, Record, TrainingFinished
from samebits.errors import JournalDamagedError, ProtocolError
from samebits.store.journal import Journal
from tests.simulation.disk import Disk
from tests.simulation.quorum import Quorum, QuorumFaults, small_chunks
from tests.simulation.trace import Violation

unpack = lru_cache(maxsize=4096)(SCHEMA.unpack)  # a pure function of bytes, and every start reads the same ones


class RecoveryPath:
    """The folder, or the etcd, that outlives schedulers."""

    def __init__(
        self,
        rng: random.Random,
        compact_bytes: int,
        faults: QuorumFaults | None = None,
        quorum_rng: random.Random | None = None,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.disk = Disk(rng)
        self.quorum = None if faults is None else Quorum(faults, self.disk, quorum_rng or rng, count)
        self.lock_holder: int | None = None  # the process's number
        self.writer: int | None = None  # the process whose calls reach the disk now
        self.torn_tails = 0
        self.compactions = 0
        self._rng = rng
        self._compact_bytes = compact_bytes
        self._journal: Journal | None = None
        self._sure: list[bytes] = []  # appends that returned, or the last snapshot and later ones
        self._is_finished = False  # the durable records show it
        self._perhaps: list[bytes] = []  # of an append that did not return
        self._perhaps_instead: list[bytes] | None = None  # a snapshot that did not return

    @property
    def size_bytes(self) -> int:
        """Return the journal's size, or 0 if no process has it open."""
        return self._journal.size_bytes if self._journal is not None else 0

    @property
    def most_bytes(self) -> int:
        """Return the size at which the shell compacts."""
        assert self._journal is not None
        return max(self._compact_bytes, 4 * self._journal.compacted_bytes)

    def is_finished(self) -> bool:
        """Return whether the end of training is durable."""
        return self._is_finished

    # ---- the lock

    def take_lock(self, process: int) -> bool:
        """Return whether this process may write from now on."""
        if self.lock_holder is None:
            self.lock_holder = process
        return self.lock_holder == process

    def process_died(self, process: int) -> None:
        """The kernel releases its lock."""
        if self.lock_holder == process:
            self.lock_holder = None
        if self.writer == process:
            self._journal = None

    def supersede(self, records: Sequence[Record], *, has_folder: bool) -> None:
        """A scheduler that stood by takes over an etcd's journal while the present one is still alive.

        Args:
            records: what the present one writes when it resumes.
            has_folder: the new one finds a copy of the journal, possibly an outdated one.
        """
        assert self.quorum is not None and self._journal is not None
        payloads = [SCHEMA.pack(record) for record in records] or self._sure[-1:]
        self.quorum.supersede(self._journal, payloads)
        if not has_folder:
            self.disk.wipe()

    # ---- the journal

    def open(self, process: int) -> tuple[list[Record], list[Record]]:
        """Read as at a scheduler start: all records, and those that the dead one did not know to be durable."""
        self.writer = process
        try:
            with self._mounted():
                if self.quorum is None:
                    self._journal, payloads = Journal.open(self.disk.folder)  # type: ignore[arg-type]
                else:
                    self._journal, payloads = self.quorum.open(self.disk.folder)
        except JournalDamagedError as error:
            raise Violation("S4", f"a crash left a journal that cannot be read: {error}") from None
        self.torn_tails += self._journal.torn_tail is not None
        survived = self._survived(payloads)
        self._sure, self._perhaps, self._perhaps_instead = list(payloads), [], None
        records = [unpack(payload) for payload in payloads]
        self._is_finished = _finishes(records)
        return records, [unpack(payload) for payload in survived]

    def _survived(self, payloads: Sequence[bytes]) -> Sequence[bytes]:
        if payloads in (self._sure, self._perhaps_instead):
            return []
        if payloads == self._sure + self._perhaps:
            return self._perhaps
        read, sure, perhaps = ([_shown(one) for one in some] for some in (payloads, self._sure, self._perhaps))
        raise Violation("S4", f"the journal holds {read}; written were {sure} and perhaps {perhaps}")

    def append(self, process: int, records: Sequence[Record]) -> None:
        """Return when the records are durable; otherwise the process is dead, or the disk has refused."""
        assert self._journal is not None
        self.writer = process
        self._perhaps = [SCHEMA.pack(record) for record in records]
        with self._mounted():
            self._journal.append(self._perhaps)
        self._sure += self._perhaps
        self._perhaps = []
        self._is_finished |= _finishes(records)

    def is_large(self) -> bool:
        """Return whether it is time to compact by the shell's rule."""
        return self.size_bytes > self.most_bytes

    def compact(self, snapshot: Sequence[Record]) -> None:
        """Replace the journal by a snapshot of the state."""
        assert self._journal is not None
        self._perhaps_instead = [SCHEMA.pack(record) for record in snapshot]
        with self._mounted():
            self._journal.compact(self._perhaps_instead)
        self._sure, self._perhaps_instead = self._perhaps_instead, None
        self._is_finished = _finishes(snapshot)
        self.compactions += 1

    def wipe(self) -> None:
        """Delete the folder, or the job's keys, while no scheduler runs."""
        self.disk.wipe()
        if self.quorum is not None:
            self.quorum.wipe()
        self._sure, self._perhaps, self._perhaps_instead = [], [], None
        self._is_finished = False

    def _mounted(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self.disk.mounted())
        if self.quorum is not None:
            stack.enter_context(small_chunks())
        return stack


def _finishes(records: Sequence[Record]) -> bool:
    return any(isinstance(record, TrainingFinished) for record in records)


def _shown(payload: bytes) -> str:
    try:
        return str(unpack(payload))
    except ProtocolError as error:
        return f"{payload!r} ({error})"
