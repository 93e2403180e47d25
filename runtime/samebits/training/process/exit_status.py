"""With which status this process's program ends, asked when it has ended.

Here lives what can be known of that while Python runs what was registered with ``atexit``. Never here: uncaught errors,
or what the scheduler is told. The one idea: Python tells nobody of a SystemExit that reaches the top, and forgets it
before it asks anybody else; but the frame of the script itself can be kept, and it shows whether the script returned.
"""

from __future__ import annotations

import dis
import sys
import threading
from _sitebuiltins import Quitter
from collections.abc import Callable, Iterator
from traceback import format_exception
from types import FrameType, TracebackType
from typing import Any, NoReturn

from samebits.core.reports import MAX_ANOMALY_CHARS, OF_A_THREAD
from samebits.printable import printable
from samebits.start_folder import start_folder
from samebits.tracebacks import failure_in

__all__ = ["ExitStatus"]

_RETURNS = ("RETURN_VALUE", "RETURN_CONST")


class ExitStatus:
    """Of this process's program.

    Known where the script came to its end, and after ``sys.exit``, ``exit``, ``quit`` and an exit that was noted; not
    after a ``raise SystemExit``. Exits of other threads end only those, and are nothing here.
    """

    def __init__(self) -> None:
        self._script: FrameType | None = None
        self._noted: int | None = None

    def install(self) -> None:
        """From now on every exit is noted."""
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
        """The program is about to end with this ``SystemExit.code``, unless somebody catches that."""
        if threading.current_thread() is threading.main_thread():
            self._noted = code if isinstance(code, int) else 0 if code is None else 1  # as Python has it

    def find(self) -> int | None:
        """The status, None where nobody can know it; only once the program has ended, and not by an error."""
        script = self._script
        if script is None or script in _outwards(sys._getframe()):  # somebody calls by hand what atexit has
            return self._noted or 0
        if dis.opname[script.f_code.co_code[script.f_lasti]] in _RETURNS:
            return 0  # whatever was noted was caught
        return self._noted


def _frame_of_script() -> FrameType | None:
    """The outermost frame that runs ``__main__`` itself; none where Python is embedded."""
    names = vars(sys.modules["__main__"])
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [one for one in _outwards(frame) if one.f_globals is names and one.f_code.co_name == "<module>"]
    return frames[-1] if frames else None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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
        tell(printable(text, MAX_ANOMALY_CHARS))

    threading.excepthook = hook
