"""The addresses at which the scheduler may be, and which of them is tried now.

Here live the order and the file that may name them; connections do not. The one idea: a file is read in a thread of its
own, for a file system that hangs must not hold up who keeps a seat, and what cannot be read changes nothing: the
addresses of before stay, and the cause is said once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from samebits.named_file import read_named_file
from samebits.scheduler_hosts import (
    NotHostsError,
    SchedulerAddress,
    addresses_in,
    addresses_of_file,
    file_in,
    names_one,
)

MAX_FILE_BYTES = 64 << 10
MOST_SHOWN = 4
SAID_AT_ONCE = 8  # notices of one search; of later ones each that is twice as far off as the one before


def read_file(path: Path, port: int) -> tuple[SchedulerAddress, ...]:
    """The addresses that the file of SCHED_HOST names.

    Raises:
        NotHostsError: it cannot be read, is no plain file, too large, half written, or names no host; with the cause.
    """
    try:
        content = read_named_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise NotHostsError(f"it cannot be read ({error.strerror})") from None
    if len(content) > MAX_FILE_BYTES:
        raise NotHostsError(f"it has more than {MAX_FILE_BYTES} bytes")
    return addresses_of_file(content.decode(errors="replace"), port)


def addresses_now(host: str, port: int) -> tuple[SchedulerAddress, ...]:
    """The addresses that SCHED_HOST names at this moment.

    Args:
        host: SCHED_HOST.
        port: SCHED_PORT.

    Raises:
        NotHostsError: it names a file that is of no use; the whole sentence, with what to do.
    """
    file = file_in(host)
    if file is None:
        return addresses_in(host, port)
    try:
        return read_file(file, port)
    except NotHostsError as error:
        raise NotHostsError(file_problem(file, error)) from None


def file_problem(path: Path, error: NotHostsError) -> str:
    """What is said of a file that is of no use."""
    return f"{path}, which SCHED_HOST names, is of no use: {error}. Fix: write one host a line, each line with its end"


class AddressBook:
    """The addresses of SCHED_HOST in turn. Not thread-safe.

    Args:
        host: SCHED_HOST.
        port: SCHED_PORT.
        wake: called from another thread when there is something to ``take``.

    Attributes:
        has_choice: whether there may be another one than the present.
    """

    def __init__(self, host: str, port: int, wake: Callable[[], None] = lambda: None) -> None:
        self.has_choice = not names_one(host)
        self._turns = 0
        self._file, self._port, self._wake = file_in(host), port, wake
        self._index = 0
        self._reader: threading.Thread | None = None
        self._read: tuple[SchedulerAddress, ...] | NotHostsError | None = None
        self._said = ""
        self._changes = self._notices = 0  # since an address was the right one
        self._refusals: dict[SchedulerAddress, str] = {}
        self._all = addresses_in(host, port)
        if self._file is not None:
            with contextlib.suppress(NotHostsError):  # said by whoever takes what is read next
                self._all = read_file(self._file, port)

    @property
    def present(self) -> SchedulerAddress | None:
        """The one that is tried, or used, now; None while a file has named none yet."""
        return self._all[self._index] if self._all else None

    @property
    def every(self) -> tuple[SchedulerAddress, ...]:
        """All that are known, in their order."""
        return self._all

    def slowness(self, most: int) -> int:
        """How many times as long as at first the present one is tried: twice that for each turn in vain, up to most."""
        return min(1 << min(self._turns, 16), most)

    def stays(self) -> None:
        """The present one was the right one."""
        self._turns = self._changes = self._notices = 0

    def refuses(self, why: str) -> str:
        """The present one will not have this process; what all of them have said, once each did when last tried."""
        if self.present is not None:
            self._refusals[self.present] = why
        if not self._refusals.keys() >= set(self._all):
            return ""
        said = [f"{address}: {self._refusals[address]}" for address in self._all]
        more = f"; and {len(said) - MOST_SHOWN} more" if len(said) > MOST_SHOWN else ""
        return "; ".join(said[:MOST_SHOWN]) + more

    def turn(self) -> None:
        """Go on to the next one, after the last to the first."""
        self._index += 1
        if self._index >= len(self._all):
            self._index = 0
            self._turns += 1
        if self.present is not None:
            self._refusals.pop(self.present, None)

    def look(self) -> None:
        """Have the file read again, where there is one and nobody is at it; ``wake`` is called after that."""
        if self._file is None or (self._reader is not None and self._reader.is_alive()):
            return
        self._reader = threading.Thread(
            target=self._read_and_wake, args=(self._file,), name="samebits-addresses", daemon=True
        )
        self._reader.start()

    def take(self) -> tuple[bool, str]:
        """Whether the file has other addresses now, and what is to be said; the present one stays if it is in it."""
        read, self._read = self._read, None
        if read is None or self._file is None:
            return False, ""
        if isinstance(read, NotHostsError):
            keeps = "the addresses it named before are kept" if self._all else "it is read again"
            text = f"{file_problem(self._file, read)}; meanwhile {keeps}"
            is_new, self._said = text != self._said, text
            return False, self._noticed(text) if is_new else ""
        self._said = ""
        if read == self._all:
            return False, ""
        is_first, present = not self._all, self.present
        self._refusals.clear()
        self._all, self._index = read, read.index(present) if present in read else 0
        self._changes += 1
        if self._changes == 1:  # else a file that changes at each read would keep the search at its fastest
            self._turns = 0
        return True, "" if is_first else self._noticed(f"{self._file} names {', '.join(map(str, read))} now")

    def _noticed(self, text: str) -> str:
        """Return the text if it is to be said; of a file that changes all the time ever fewer notices are."""
        self._notices += 1
        is_said = self._notices <= SAID_AT_ONCE or self._notices.bit_count() == 1
        return text if is_said else ""

    def _read_and_wake(self, path: Path) -> None:
        self._read_file(path)
        self._wake()

    def _read_file(self, path: Path) -> None:
        try:
            self._read = read_file(path, self._port)
        except NotHostsError as error:
            self._read = error
