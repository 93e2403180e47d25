"""Manage the possible addresses of the scheduler, and the one in use.

SCHED_HOST may name a file of addresses. It is read in a separate thread, because a file system that hangs must not
block the connection that keeps a worker's seat. If the file cannot be read, the previous addresses are kept, and the
cause is reported once.
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
SAID_AT_ONCE = 8  # notices logged per search; after these, only the 16th, 32nd and so on


def read_file(path: Path, port: int) -> tuple[SchedulerAddress, ...]:
    """Return the addresses in the file that SCHED_HOST names.

    Raises:
        NotHostsError: the file cannot be read, is not a plain file, is too large or incomplete, or names no host.
    """
    try:
        content = read_named_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise NotHostsError(f"it cannot be read ({error.strerror})") from None
    if len(content) > MAX_FILE_BYTES:
        raise NotHostsError(f"it has more than {MAX_FILE_BYTES} bytes")
    return addresses_of_file(content.decode(errors="replace"), port)


def addresses_now(host: str, port: int) -> tuple[SchedulerAddress, ...]:
    """Return the addresses that SCHED_HOST names now.

    Args:
        host: SCHED_HOST.
        port: SCHED_PORT.

    Raises:
        NotHostsError: SCHED_HOST names an unusable file; the message is a complete sentence with the fix.
    """
    file = file_in(host)
    if file is None:
        return addresses_in(host, port)
    try:
        return read_file(file, port)
    except NotHostsError as error:
        raise NotHostsError(file_problem(file, error)) from None


def file_problem(path: Path, error: NotHostsError) -> str:
    """Return the message about an unusable file of addresses."""
    return (
        f"{path}, which SCHED_HOST names, cannot be used: {error}. Fix: write one host on each line, and end each line"
    )


class AddressBook:
    """The addresses of SCHED_HOST, which are tried in turn, the relay's first. Not thread-safe.

    Args:
        host: SCHED_HOST.
        port: SCHED_PORT.
        wake: called from another thread when :meth:`take` has something to do.
        relay: this host's relay; None if there is none.

    Attributes:
        has_choice: whether there may be other addresses than the current one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        wake: Callable[[], None] = lambda: None,
        relay: SchedulerAddress | None = None,
    ) -> None:
        self.has_choice = relay is not None or not names_one(host)
        self._relay = () if relay is None else (relay,)
        self._turns = 0
        self._file, self._port, self._wake = file_in(host), port, wake
        self._index = 0
        self._reader: threading.Thread | None = None
        self._read: tuple[SchedulerAddress, ...] | NotHostsError | None = None
        self._said = ""
        self._changes = self._notices = 0  # since an address last proved right
        self._refusals: dict[SchedulerAddress, str] = {}
        self._all = self._relay + addresses_in(host, port)
        if self._file is not None:
            with contextlib.suppress(NotHostsError):  # reported by the next take()
                self._all = self._relay + read_file(self._file, port)

    @property
    def present(self) -> SchedulerAddress | None:
        """Return the address that is being tried or used, or None until a file has named one."""
        return self._all[self._index] if self._all else None

    @property
    def is_at_relay(self) -> bool:
        """Return whether the current address is the relay's."""
        return bool(self._relay) and self._index == 0

    @property
    def every(self) -> tuple[SchedulerAddress, ...]:
        """Return all known addresses, in order."""
        return self._all

    def slowness(self, most: int) -> int:
        """Return the factor by which the time limit for an address is extended.

        It doubles with each round in which all addresses failed, up to ``most``.
        """
        return min(1 << min(self._turns, 16), most)

    def stays(self) -> None:
        """Record that the scheduler at the current address is the right one."""
        self._turns = self._changes = self._notices = 0

    def refuses(self, why: str) -> str:
        """Record that the scheduler at the current address refused this process.

        Returns:
            The refusals of all addresses, once each has refused at its last try; otherwise "".
        """
        if self.present is not None:
            self._refusals[self.present] = why
        if not self._refusals.keys() >= set(self._all):
            return ""
        said = [f"{address}: {self._refusals[address]}" for address in self._all]
        more = f"; and {len(said) - MOST_SHOWN} more" if len(said) > MOST_SHOWN else ""
        return "; ".join(said[:MOST_SHOWN]) + more

    def turn(self) -> None:
        """Advance to the next address. The first one follows the last."""
        self._index += 1
        if self._index >= len(self._all):
            self._index = 0
            self._turns += 1
        if self.present is not None:
            self._refusals.pop(self.present, None)

    def look(self) -> None:
        """Start reading the file, if there is one and no read is in progress.

        ``wake`` is called when the file has been read.
        """
        if self._file is None or (self._reader is not None and self._reader.is_alive()):
            return
        self._reader = threading.Thread(
            target=self._read_and_wake, args=(self._file,), name="samebits-addresses", daemon=True
        )
        self._reader.start()

    def take(self) -> tuple[bool, str]:
        """Apply the addresses that were read last.

        Return whether they are new, and a message to log or "". The current address is kept if it is still listed.
        """
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
        if self._changes == 1:  # otherwise a file that changes at every read would keep the search at full speed
            self._turns = 0
        return True, "" if is_first else self._noticed(f"{self._file} names {', '.join(map(str, read))} now")

    def _noticed(self, text: str) -> str:
        """Return the text if it should be logged, otherwise "".

        Messages about a file that keeps changing become rarer.
        """
        self._notices += 1
        is_said = self._notices <= SAID_AT_ONCE or self._notices.bit_count() == 1
        return text if is_said else ""

    def _read_and_wake(self, path: Path) -> None:
        self._read_file(path)
        self._wake()

    def _read_file(self, path: Path) -> None:
        try:
            self._read = self._relay + read_file(path, self._port)
        except NotHostsError as error:
            self._read = error
