"""Copy a job's event log to etcd, so that ``history`` survives the scheduler's host.

::

  <prefix>/events/<number>   lines of the event log, in order

Like the log itself, the copy is not needed for recovery. A thread writes it, so no decision waits for it, and lines
that etcd refuses are lost with one warning.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from samebits.errors import StoreError
from samebits.store.etcd.etcd_journal import EVENTS
from samebits.store.etcd.gateway import Equals, EtcdGateway, PutKey, Remove

MOST_BYTES: Final = 4 << 20
"""Limit of the copy's size, equal to that of all parts in the folder; older lines are removed."""

_PUT_BYTES: Final = 256 << 10
_CLOSES_WITHIN_S: Final = 2.0


def copied_lines(gateway: EtcdGateway) -> list[str]:
    """Return the lines in etcd, oldest first; empty if there are none.

    Raises:
        StoreError: etcd does not answer, or refuses the request.
    """
    return [line for _, lines in _stored(gateway) for line in lines]


class EventCopier:
    """Appends lines to the copy, in its own thread.

    Args:
        gateway: a client of etcd, used by this object only.
        lines: all lines of the folder's log; those after the copy's last line are appended first.
        on_failure: called once, in the thread, with a sentence, when lines are lost.
    """

    def __init__(self, gateway: EtcdGateway, lines: Sequence[str], on_failure: Callable[[str], object]) -> None:
        self._gateway = gateway
        self._on_failure = on_failure
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(list(lines),), name="samebits-events", daemon=True)
        self._thread.start()

    def put(self, lines: Sequence[str]) -> None:
        """Queue these lines to be appended, and return at once."""
        for line in lines:
            self._waiting.put(line)

    def close(self) -> None:
        """Write the queued lines, for a limited time, and end the thread."""
        self._waiting.put(None)
        self._thread.join(_CLOSES_WITHIN_S)

    def _run(self, lines: list[str]) -> None:
        try:
            with contextlib.closing(self._gateway):
                self._copy(lines)
        except StoreError as error:
            self._on_failure(f"{error}. The job continues; its events are in RECOVERY_PATH's folder only")

    def _copy(self, lines: list[str]) -> None:
        stored = _stored(self._gateway)
        sizes = deque((number, sum(map(len, lines_there))) for number, lines_there in stored)
        last = next((there[-1] for _, there in reversed(stored) if there), None)
        if last in lines:
            lines = lines[len(lines) - lines[::-1].index(last) :]
        number = sizes[-1][0] + 1 if sizes else 0
        is_over = False
        while not is_over:
            if not lines:
                first = self._waiting.get()
                is_over, lines = first is None, [] if first is None else [first]
            while not is_over and sum(map(len, lines)) < _PUT_BYTES:
                try:
                    line = self._waiting.get_nowait()
                except queue.Empty:
                    break
                is_over, lines = line is None, lines if line is None else [*lines, line]
            if lines:
                self._write(number, lines)
                sizes.append((number, sum(map(len, lines))))
                number, lines = number + 1, []
                self._remove_oldest(sizes)

    def _write(self, number: int, lines: Sequence[str]) -> None:
        key, value = _key(self._gateway, number), "".join(f"{line}\n" for line in lines).encode()
        if (
            not self._gateway.change([Equals(key, None)], [PutKey(key, value)])
            and self._gateway.get(key).value != value
        ):
            raise StoreError(f"{self._gateway.place}: another scheduler writes this job's events")

    def _remove_oldest(self, sizes: deque[tuple[int, int]]) -> None:
        total = sum(size for _, size in sizes)
        if total <= MOST_BYTES:
            return
        while total > MOST_BYTES * 3 // 4:
            total -= sizes.popleft()[1]
        self._gateway.change([], [Remove(_key(self._gateway, 0), _key(self._gateway, sizes[0][0]))])


def _stored(gateway: EtcdGateway) -> list[tuple[int, list[str]]]:
    found = []
    for pair in gateway.under(_prefix(gateway)):
        number = pair.key.removeprefix(_prefix(gateway))
        if number.isdigit():
            found.append((int(number), pair.value.decode(errors="replace").splitlines()))
    return found


def _key(gateway: EtcdGateway, number: int) -> str:
    return f"{_prefix(gateway)}{number:012d}"


def _prefix(gateway: EtcdGateway) -> str:
    return f"{gateway.place.prefix}/{EVENTS}/"
