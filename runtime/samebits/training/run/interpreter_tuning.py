"""Tune the interpreter while a generation is left and the next one formed, since all ranks wait for the slowest.

Only what can wait until training runs again is postponed.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

HAND_OVER_S = 0.0005
"""Switch interval during a recovery.

Several of our threads hand work to each other then, and each hand-over may take that long. With Python's own 5 ms,
hand-overs would be most of a recovery.
"""


class InterpreterTuning:
    """Shortens the switch interval and disables garbage collection: a full collection takes longer than a recovery.

    The user's settings are restored afterwards; a collector that the user disabled stays so.
    """

    def __init__(self) -> None:
        self._hand_over_s: float | None = None  # the user's interval; None while it is in effect
        self._collects = False

    def begin(self) -> None:
        """Begin tuning, if it has not begun."""
        if self._hand_over_s is None:
            self._hand_over_s, self._collects = sys.getswitchinterval(), gc.isenabled()
            sys.setswitchinterval(HAND_OVER_S)
            gc.disable()

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Collect garbage while this process waits for others, which may take days in a spare."""
        if self._collects:
            gc.enable()
        try:
            yield
        finally:
            gc.disable()

    def end(self) -> None:
        """End tuning, if it has not ended."""
        if self._hand_over_s is not None:
            sys.setswitchinterval(self._hand_over_s)
            self._hand_over_s = None
            if self._collects:
                gc.enable()
