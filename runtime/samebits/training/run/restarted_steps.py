"""Repeat the last steps of a check in new processes, and compare them with the steps of the processes before.

Steps that one process takes twice share whatever the process has kept since its start, such as a value that only the
first step sets. A check therefore ends with a loss of all processes at once: the job recovers from a checkpoint, and
its new processes compare their commits with the digests that the processes before left in LOG_DIR.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from samebits.core.point import Point
from samebits.service import log
from samebits.store import durable, private

SAVED_AT = (6, 16)
"""The commits that a check saves, besides the first after a later epoch; new processes start from the last one."""
_RECORDED = 4
"""Commits after a saved one that are compared."""
_DURABLE_WITHIN_S = 60.0
_LOOK_S = 0.02
_MAX_BYTES = 64 << 20

PassDigests = dict[str, int]


class Restart:
    """The end of all processes of a check, and the commits to compare afterwards.

    Args:
        folder: where a rank leaves its digests for the process that replaces it.
        saved_by_all: returns the newest point that every rank has on disk.
        end: ends this process as a crash would.
    """

    def __init__(
        self,
        folder: Path,
        saved_by_all: Callable[[], Point | None],
        end: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._folder = folder
        self._saved_by_all = saved_by_all
        self._end = end
        self._saved: tuple[int, int] | None = None  # number and step of the last saved commit
        self._records: dict[int, PassDigests] = {}  # by step
        self.expected: dict[int, PassDigests] | None = None  # in a process that has replaced another
        self.had_returned = False  # the training function had returned in the process before

    @property
    def has_records(self) -> bool:
        """Whether there is a saved commit, and one behind it to compare."""
        return bool(self._records)

    def saves(self, commit: int, step: int, *, is_after_epoch: bool) -> bool:
        """Return whether to save this commit, for which the script's own schedule is not asked."""
        if self.expected is not None or not (commit in SAVED_AT or (is_after_epoch and commit > SAVED_AT[-1])):
            return False
        self._saved = commit, step
        self._records.clear()
        return True

    def wants(self, commit: int) -> bool:
        """Return whether this commit is one of the few after a saved one."""
        return self._saved is not None and 0 < commit - self._saved[0] <= _RECORDED

    def is_complete(self, commit: int) -> bool:
        """Return whether all commits that :meth:`wants` returned True for are made."""
        return self._saved is None or commit >= self._saved[0] + _RECORDED

    def record(self, step: int, digests: PassDigests) -> None:
        """Keep a commit's digests for the comparison."""
        if self._saved is not None and step > self._saved[1]:
            self._records[step] = digests

    def await_checkpoint(self) -> bool:
        """Return whether the saved commit is on every rank's disk."""
        assert self._saved is not None
        until_s = time.monotonic() + _DURABLE_WITHIN_S
        while (point := self._saved_by_all()) is None or point.step < self._saved[1]:
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def replace_process(self, rank: int, meet: Callable[[], object], *, has_returned: bool) -> None:
        """Leave the digests for the next process of this rank, and end this one, together with the others.

        Args:
            meet: a collective of all ranks.
            has_returned: whether the training function has returned, so that the next process is to run to its end.
        """
        assert self._saved is not None
        durable.replace_note(self._path(rank), msgspec.msgpack.encode((has_returned, self._records)))
        log.say(f"this process ends itself, so that a new one starts from the checkpoint of step {self._saved[1]}")
        try:
            meet()
        finally:  # also if another rank is gone already: nothing of this process may survive
            self._end()

    def follow(self, rank: int) -> bool:
        """Take the digests that this rank's last process left; return whether there are any."""
        path = self._path(rank)
        data = private.read(path, _MAX_BYTES)
        if data is None:
            return False
        self.had_returned, self.expected = msgspec.msgpack.decode(data, type=tuple[bool, dict[int, PassDigests]])
        path.unlink()  # another loss has nothing to compare
        return True

    def _path(self, rank: int) -> Path:
        return self._folder / f"check_of_rank_{rank}"
