"""How a process of ours speaks to its user: one line an event, with the time and who says it."""

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
    """Let this process say ``time samebits <speaker>: text`` on standard error, unless the user set up the logger."""
    if LOGGER.handlers and not isinstance(LOGGER.handlers[0], _Handler):
        return
    handler = _Handler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s samebits {speaker}: %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOGGER.handlers[:] = [handler]
    LOGGER.propagate = False
    if LOGGER.level != logging.INFO:  # setting it looks at every logger of the process, and torch has hundreds
        LOGGER.setLevel(logging.INFO)


def hush() -> None:
    """From now on only warnings of the calling thread are heard."""
    _hushed.add(threading.get_ident())


def say(text: str) -> None:
    """An event the user may want to know."""
    if threading.get_ident() not in _hushed:
        LOGGER.info(printable(text))


def warn(text: str) -> None:
    """An event the user should look at."""
    LOGGER.warning(printable(text))


def tell(events: Sequence[tuple[int, str]]) -> None:
    """Several events of one moment, with their levels (``logging.INFO``, …): still one line each."""
    if threading.get_ident() in _hushed:
        events = [event for event in events if event[0] > logging.INFO]
    handler = LOGGER.handlers[0] if len(LOGGER.handlers) == 1 else None
    if isinstance(handler, _Handler) and len(events) > 1:
        handler.write_lines([printable(text) for level, text in events if LOGGER.isEnabledFor(level)])
        return
    for level, text in events:
        LOGGER.log(level, printable(text))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, so that setting up again replaces it, and thousands of lines are one write."""

    def write_lines(self, texts: Sequence[str]) -> None:
        """As ``emit`` does, with the time of the first; nor does a process end where nothing can be written."""
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
