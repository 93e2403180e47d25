"""How a process of ours speaks to its user: one line an event, with the time and who says it."""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("samebits")


def set_up(speaker: str) -> None:
    """Let this process say ``time samebits <speaker>: text`` on standard error, unless the user set up the logger."""
    if LOGGER.handlers and not isinstance(LOGGER.handlers[0], _Handler):
        return
    handler = _Handler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s samebits {speaker}: %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOGGER.handlers[:] = [handler]
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO)


def say(text: str) -> None:
    """An event the user may want to know."""
    LOGGER.info(text)


def warn(text: str) -> None:
    """An event the user should look at."""
    LOGGER.warning(text)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, so that setting up again replaces it."""
