"""Tune the Python interpreter between two generations, when all ranks wait for the slowest.

Only work that can wait until training runs again is postponed.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

HAND_OVER_S = 0.0005
"""Switch interval during a recovery.

Several of our threads hand work to each other then, and each hand-over may take one interval. With Python's default of
5 ms, hand-overs would take most of a recovery.
"""


class InterpreterTuning:
    """Shortens the thread switch interval and disables garbage collection, which can take longer than a recovery.

    The user's settings are restored afterwards; garbage collection stays off if the user disabled it.
    """

    def __init__(self) -> None:
        self._hand_over_s: float | None = None  # the user's interval while tuning; None otherwise
        self._collects = False

    def begin(self) -> None:
        """Begin tuning. Further calls do nothing."""
        if self._hand_over_s is None:
            self._hand_over_s, self._collects = sys.getswitchinterval(), gc.isenabled()
            sys.setswitchinterval(HAND_OVER_S)
            gc.disable()

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Context manager that allows garbage collection while this process waits for others.

        A spare may wait for days.
        """
        if self._collects:
            gc.enable()
        try:
            yield
        finally:
            gc.disable()

    def end(self) -> None:
        """End tuning. Further calls do nothing."""
        if self._hand_over_s is not None:
            sys.setswitchinterval(self._hand_over_s)
            self._hand_over_s = None
            if self._collects:
                gc.enable()
