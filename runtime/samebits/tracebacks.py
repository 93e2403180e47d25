"""Find the script's own line in a traceback.

The text is a traceback as Python prints it, or the end of a log that contains one. The relevant frame is the deepest
one that is not in Python, an installed package or this package. If a DataLoader's worker failed, its printed traceback
is deeper than its trainer's.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from samebits.printable import IN_LOGS, printable

_SHOWN_CHARACTERS = 300
_OURS = str(Path(__file__).parent) + os.sep
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+)(, in .*)?$')
_BEGINNING = re.compile(r"(Original )?Traceback \(most recent call last\):")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
_ASIDE = ("Exception in thread ", "Exception ignored ")  # the process continues
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_ELSEWHERE = re.compile(
    r"<|.*/lib(64)?/python\d|.*/(site|dist)-packages/"
    r"|.*/torch/(_\w+|autograd|cuda|distributed|multiprocessing|nn|optim|utils)/"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as Python names it, and its place, such as ``train.py:88``; "" if no line of the script is known."""

    error: str
    place: str = ""

    def __str__(self) -> str:
        return f"failed at {self.place}: {self.error}" if self.place else f"failed: {self.error}"


def failure_in(text: str, folder: Path) -> Failure | None:
    """Return the last error in the text that has a traceback; files below ``folder`` are shown relative to it.

    Errors that ended only a thread, or that were handled, do not count.
    """
    found: Failure | None = None
    place = ""  # of the current report, which may consist of several tracebacks
    is_inside = is_linked = is_aside = False
    lines = text.splitlines()
    for number, line in enumerate(lines):
        beginning, frame = _BEGINNING.match(line), _FRAME.match(line)
        if beginning or (frame and not is_inside):
            is_part = is_linked or bool(beginning and beginning[1])
            place = place if is_part else ""
            is_aside = is_aside if is_part else number > 0 and lines[number - 1].startswith(_ASIDE)
            is_inside, is_linked = True, False
        if frame:
            place = _shown(frame[1], frame[2], folder) or place
        elif is_inside and not beginning and _ERROR.fullmatch(line):
            found, is_inside = found if is_aside else Failure(_whole(lines, number), place), False
        elif line.startswith(_LINKS):
            is_linked = True
    return found


@functools.cache
def is_of_the_script(file: str) -> bool:
    """Return whether this source file is not in Python, an installed package or this package."""
    return not (_ELSEWHERE.match(file) or file.startswith(_OURS))


def place_in_dump(text: str, folder: Path) -> str:
    """Return the main thread's place, ``train.py:46 in evaluate``, from a dump of Python's fault handler.

    The dump lists threads from the youngest to the oldest, each from its innermost frame. "" if no line of the script
    is known.
    """
    main = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]
    for frame in re.finditer(r'^  File "([^"]+)", line (\d+) in (.*)$', main, re.MULTILINE):
        if place := _shown(frame[1], frame[2], folder):
            return f"{place} in {printable(frame[3], _SHOWN_CHARACTERS)}"
    return ""


def _shown(file: str, line: str, folder: Path) -> str:
    if not is_of_the_script(file):
        return ""
    path = Path(file)
    return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{line}"


def _whole(lines: list[str], number: int) -> str:
    """Return the error's line, with the next line if the first only announces it."""
    text = lines[number]
    if text.endswith(":") and number + 1 < len(lines):
        text = f"{text} {lines[number + 1].strip()}"
    return printable(text, _SHOWN_CHARACTERS, IN_LOGS)
