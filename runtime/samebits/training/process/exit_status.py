"""Find out, in ``atexit``, with which status this process's program has ended.

Python calls no hook for a SystemExit that reaches the top level, and discards it before ``atexit`` functions run. The
script's own frame is therefore stored; it shows whether the script has returned.
"""

from __future__ import annotations

import dis
import re
import sys
import threading
from _sitebuiltins import Quitter
from collections.abc import Callable, Iterator
from traceback import format_exception
from types import FrameType, TracebackType
from typing import Any, NoReturn

from samebits.core.reports import MAX_ANOMALY_CHARS, OF_A_THREAD
from samebits.printable import IN_LOGS, printable, shortened
from samebits.start_folder import start_folder
from samebits.tracebacks import failure_in

_RETURNS = ("RETURN_VALUE", "RETURN_CONST")


class ExitStatus:
    """The exit status of this process's program.

    The status is known if the script ran to its end, and after ``sys.exit``, ``exit``, ``quit`` and a recorded exit,
    but not after a ``raise SystemExit``. An exit in another thread ends only that thread and is ignored.
    """

    def __init__(self) -> None:
        self._script: FrameType | None = None
        self._noted: int | None = None

    def install(self) -> None:
        """Record every exit from now on."""
        self._script = _frame_of_script()
        quitters: Any = Quitter  # the class of exit and quit
        exit_, quit_ = sys.exit, quitters.__call__

        def noted_exit(status: Any = None, /) -> NoReturn:
            self.note(status)
            exit_(status)

        def noted_quit(quitter: Quitter, code: Any = None) -> None:
            self.note(code)
            quit_(quitter, code)

        sys.exit = noted_exit
        quitters.__call__ = noted_quit
        names = vars(sys.modules["__main__"])
        for name in [name for name, value in names.items() if value is exit_]:
            names[name] = noted_exit  # from sys import exit

    def note(self, code: object) -> None:
        """Record that the program is about to end with this ``SystemExit.code``, unless the exit is caught."""
        if threading.current_thread() is threading.main_thread():
            self._noted = code if isinstance(code, int) else 0 if code is None else 1  # as Python does

    def find(self) -> int | None:
        """Return the status, or None if it is unknown. Call this only after the program has ended without an error."""
        script = self._script
        if script is None or script in _outwards(sys._getframe()):  # atexit functions were called directly
            return self._noted or 0
        if dis.opname[script.f_code.co_code[script.f_lasti]] in _RETURNS:
            return 0  # the recorded exit was caught
        return self._noted


def _frame_of_script() -> FrameType | None:
    """Return the outermost frame that runs ``__main__`` itself, or None if Python is embedded."""
    names = vars(sys.modules["__main__"])
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [one for one in _outwards(frame) if one.f_globals is names and one.f_code.co_name == "<module>"]
    return frames[-1] if frames else None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


MOST_CHARS = 2000
_BEGINS_WITH_PLACE = re.compile(r"\S+:\d+: ")


def last_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> str:
    """Return a description such as ``failed at train.py:88: KeyError: 'x'``."""
    failure = failure_in("".join(format_exception(kind, error, traceback)), start_folder())
    return shortened(str(failure or f"failed: {named(error)}"), MOST_CHARS, IN_LOGS)


def own_words(error: BaseException, place: str) -> str:
    """Return a SameBits error as one line that begins with a line of the script, such as ``train.py:88``."""
    text = " ".join(str(error).split())
    return (text if _BEGINS_WITH_PLACE.match(text) else f"{place}: {text}")[:MOST_CHARS]


def named(error: BaseException) -> str:
    """Return a description such as ``KeyError: 'x'``."""
    return f"{type(error).__name__}: {error}"


def watch_threads(tell: Callable[[str], None]) -> None:
    """Call ``tell`` with one line for every thread that ends with an exception."""
    before = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        before(ended)
        error = ended.exc_value
        if isinstance(error, SystemExit) or error is None:
            return
        name = ended.thread.name if ended.thread is not None else "unknown"
        text = f"{OF_A_THREAD}{name} {last_words(ended.exc_type, error, ended.exc_traceback)}"
        tell(printable(text, MAX_ANOMALY_CHARS))

    threading.excepthook = hook
