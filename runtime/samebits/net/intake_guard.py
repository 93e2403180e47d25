"""Close connections that fill this process's memory while its main thread is busy.

ZeroMQ's own thread receives messages even while the main thread waits for a disk, and its queues have no limit here
(see ``net.server``). A thread of this module therefore checks the process's memory. If it grows while no messages are
read, the connections that continue to send are closed; no process of a job has that much unanswered. While the main
thread reads messages, it closes floods itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from samebits.net.gate import bytes_received, shut_down

LOOK_S = 0.2
GROWTH_BYTES = 64 << 20
"""Growth of the process without a drain from which on the connections are compared."""
COMPARE_S = 0.2
FLOOD_BYTES = 2 << 20
"""Bytes of one connection in ``COMPARE_S``."""


class IntakeGuard:
    """Watches the connections of one listening socket.

    Args:
        port: the socket's port, because the main thread may not know the newest connections yet.
        cut: called from this object's thread with the descriptor of a connection that was closed.

    Attributes:
        has_drained: set by the main thread whenever it reads messages.
    """

    def __init__(self, port: int, cut: Callable[[int], object]) -> None:
        self.has_drained = True
        self._port, self._cut = port, cut
        self._is_closed = threading.Event()
        self._memory = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="samebits-intake-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()
        self._thread.join()
        os.close(self._memory)

    def _run(self) -> None:
        before = 0
        while not self._is_closed.wait(LOOK_S):
            if self.has_drained:
                self.has_drained = False
                before = self._resident_bytes()
            elif self._resident_bytes() - before >= GROWTH_BYTES:
                with contextlib.suppress(OSError):  # no descriptor is free now: the next look compares again
                    self._compare()

    def _compare(self) -> None:
        first = {one: bytes_received(one) for one in _descriptors() if self._is_served(one)}
        self._is_closed.wait(COMPARE_S)
        for descriptor, received in first.items():
            later = bytes_received(descriptor)
            if received is not None and later is not None and later - received >= FLOOD_BYTES:
                self._cut(descriptor)
                shut_down(descriptor)

    def _is_served(self, descriptor: int) -> bool:
        try:
            one = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return False  # closed, or no socket
        with one:
            return one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == self._port

    def _resident_bytes(self) -> int:
        return int(os.pread(self._memory, 200, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
