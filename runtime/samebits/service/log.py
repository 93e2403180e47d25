"""Log one line per event, with the time and the process's name."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Sequence

from samebits.printable import printable

LOGGER = logging.getLogger("samebits")
_hushed: set[int] = set()


def set_up(speaker: str) -> None:
    """Log lines ``time samebits <speaker>: text`` to stderr, unless the user has set up the logger."""
    if LOGGER.handlers and not isinstance(LOGGER.handlers[0], _Handler):
        return
    handler = _Handler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s samebits {speaker}: %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOGGER.handlers[:] = [handler]
    LOGGER.propagate = False
    if LOGGER.level != logging.INFO:  # setting the level visits all loggers of the process, and torch has hundreds
        LOGGER.setLevel(logging.INFO)


def hush() -> None:
    """Suppress all lines except warnings from the calling thread."""
    _hushed.add(threading.get_ident())


def say(text: str) -> None:
    """Log an event that the user may want to know."""
    if threading.get_ident() not in _hushed:
        LOGGER.info(printable(text))


def warn(text: str) -> None:
    """Log an event that needs the user's attention."""
    LOGGER.warning(printable(text))


def tell(events: Sequence[tuple[int, str]]) -> None:
    """Log several simultaneous events, with levels such as ``logging.INFO``, one line each."""
    if threading.get_ident() in _hushed:
        events = [event for event in events if event[0] > logging.INFO]
    handler = LOGGER.handlers[0] if len(LOGGER.handlers) == 1 else None
    if isinstance(handler, _Handler) and len(events) > 1:
        handler.write_lines([printable(text) for level, text in events if LOGGER.isEnabledFor(level)])
        return
    for level, text in events:
        LOGGER.log(level, printable(text))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler of :func:`set_up`, which can write thousands of lines at once.

    It can write thousands of lines at once.
    """

    def write_lines(self, texts: Sequence[str]) -> None:
        """Write these lines with the current time. Like ``emit``, this never raises."""
        if not texts:
            return
        record = LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, "", (), None)
        beginning = self.format(record)
        with self.lock or contextlib.nullcontext():
            try:
                self.stream.write("".join([f"{beginning}{text}{self.terminator}" for text in texts]))
                self.flush()
            except Exception:
                self.handleError(record)
