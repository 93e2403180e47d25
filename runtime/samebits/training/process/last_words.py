"""What an uncaught exception says: of the process that it ends, and of a thread that it ends alone.

Here lives the sentence, and the hook into threads. Never here: what follows from it. The one idea: an exception ends a
process only in the main thread; anywhere else the process goes on without that thread, which is told and no more,
though what hangs a moment later may hang because of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from traceback import format_exception
from types import TracebackType

from samebits.core.messages import MAX_ODDITY_CHARS, OF_A_THREAD
from samebits.printable import printable
from samebits.start_folder import start_folder
from samebits.tracebacks import failure_in

MOST_CHARS = 2000


def last_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> str:
    """``failed at train.py:88: KeyError: 'x'``."""
    failure = failure_in("".join(format_exception(kind, error, traceback)), start_folder())
    return str(failure or f"failed: {named(error)}")[:MOST_CHARS]


def named(error: BaseException) -> str:
    """``KeyError: 'x'``."""
    return f"{type(error).__name__}: {error}"


def watch_threads(tell: Callable[[str], None]) -> None:
    """From now on ``tell`` hears, in one printable line, of every thread that an exception ends; all else stays."""
    before = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        before(ended)
        error = ended.exc_value
        if isinstance(error, SystemExit) or error is None:
            return
        name = ended.thread.name if ended.thread is not None else "unknown"
        text = f"{OF_A_THREAD}{name} {last_words(ended.exc_type, error, ended.exc_traceback)}"
        tell(printable(text, MAX_ODDITY_CHARS))

    threading.excepthook = hook
