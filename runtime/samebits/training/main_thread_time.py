"""Measure how long this process's main thread has waited for data and for collectives.

The two sums only increase, and ``run.step_times`` uses their differences. Waits are timed where they happen, which
takes two clock readings.
"""

from __future__ import annotations

import threading
import time


class MainThreadTime:
    """Total waiting times of the main thread in seconds. Waits of other threads are not counted.

    Attributes:
        data_s: time in ``next()`` of a ``DataLoader``'s iterator.
        communication_s: time until collectives had finished.
        messages: number of waits for other ranks that have ended; it only increases.
    """

    __slots__ = ("_ident", "communication_s", "data_s", "messages")

    def __init__(self) -> None:
        self.data_s = self.communication_s = 0.0
        self.messages = 0
        self._ident = threading.main_thread().ident

    def waited_for_data(self, since_s: float) -> None:
        """Record that the calling thread, waiting since ``since_s``, has received a batch."""
        if threading.get_ident() == self._ident:
            self.data_s += time.perf_counter() - since_s

    def waited_for_others(self, since_s: float) -> None:
        """Record that the calling thread, waiting since ``since_s``, returns from a collective."""
        if threading.get_ident() == self._ident:
            self.communication_s += time.perf_counter() - since_s
            self.messages += 1


main_thread = MainThreadTime()
