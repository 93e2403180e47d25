"""What this process's main thread has waited for so far: the loader's batches, and collectives.

Here live two sums that only rise. Never here: who reads the differences (``run.step_times``). The one idea: where a
thread waits is known where it waits, for two readings of a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["MainThreadTime", "main_thread"]


class MainThreadTime:
    """Seconds; other threads' waits are not counted.

    Attributes:
        data_s: in ``next()`` of a ``DataLoader``'s iterator.
        communication_s: until collectives were over.
    """

    __slots__ = ("_ident", "communication_s", "data_s")

    def __init__(self) -> None:
        self.data_s = self.communication_s = 0.0
        self._ident = threading.main_thread().ident

    def waited_for_data(self, since_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """The calling thread has a batch."""
        if threading.get_ident() == self._ident:
            self.data_s += clock() - since_s

    def waited_for_others(self, since_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """The calling thread comes out of a collective."""
        if threading.get_ident() == self._ident:
            self.communication_s += clock() - since_s


main_thread = MainThreadTime()
