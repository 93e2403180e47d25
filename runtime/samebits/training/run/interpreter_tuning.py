"""What makes this process quick while a generation is left and the next one formed: all ranks wait for the slowest.

Here lives what is switched for that time in the interpreter itself, and switched back; nothing else of a recovery. The
one idea: what can wait for a training step, waits.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

HAND_OVER_S = 0.0005
"""How soon a thread that waits for the interpreter gets it.

Several threads of ours hand work to each other then, and each hand-over may take that long; Python's own 5 ms would be
most of a recovery.
"""


class InterpreterTuning:
    """The interpreter hands over sooner, and collects no garbage: a full collection takes longer than a recovery.

    What the user has set is found again afterwards; a collector that is switched off stays so.
    """

    def __init__(self) -> None:
        self._hand_over_s: float | None = None  # at ease; None while it is so
        self._collects = False

    def begin(self) -> None:
        """From now on, if it is not so already."""
        if self._hand_over_s is None:
            self._hand_over_s, self._collects = sys.getswitchinterval(), gc.isenabled()
            sys.setswitchinterval(HAND_OVER_S)
            gc.disable()

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Inside the block this process waits for others, a spare for days: garbage is collected then."""
        if self._collects:
            gc.enable()
        try:
            yield
        finally:
            gc.disable()

    def end(self) -> None:
        """As it was before, if that is not so already."""
        if self._hand_over_s is not None:
            sys.setswitchinterval(self._hand_over_s)
            self._hand_over_s = None
            if self._collects:
                gc.enable()
