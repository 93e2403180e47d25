"""The script's own line in a traceback: what failed, and where a user looks first.

One question about a text, a traceback as Python prints it or the end of a log with one in it. Never here: files, or
what is done about it. The one idea: the deepest frame that is neither Python's, nor an installed package's, nor ours is
where the user's eye belongs; what a DataLoader's worker printed is deeper than what its trainer printed around it.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from samebits.printable import printable

__all__ = ["Failure", "failure_in", "is_of_the_script", "place_in_dump"]

_SHOWN_CHARACTERS = 300
_OURS = str(Path(__file__).parent) + os.sep
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+)(, in .*)?$')
_BEGINNING = re.compile(r"(Original )?Traceback \(most recent call last\):")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
_ASIDE = ("Exception in thread ", "Exception ignored ")  # the process goes on
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_ELSEWHERE = re.compile(
    r"<|.*/lib(64)?/python\d|.*/(site|dist)-packages/"
    r"|.*/torch/(_\w+|autograd|cuda|distributed|multiprocessing|nn|optim|utils)/"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """``error`` as Python names it; ``place`` is ``train.py:88``, empty where no line of the script's own is known."""

    error: str
    place: str = ""

    def __str__(self) -> str:
        return f"failed at {self.place}: {self.error}" if self.place else f"failed: {self.error}"


def failure_in(text: str, folder: Path) -> Failure | None:
    """The last error that the text tells with a traceback; files below ``folder`` are named from there.

    What ended a thread alone, or nothing at all, does not count.
    """
    found: Failure | None = None
    place = ""  # of the report that is read, which may have several tracebacks in it
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
    """Whether this source file is neither Python's, nor an installed package's, nor ours."""
    return not (_ELSEWHERE.match(file) or file.startswith(_OURS))


def place_in_dump(text: str, folder: Path) -> str:
    """``train.py:46 in evaluate``: where the main thread is, by what Python's fault handler wrote of all of them.

    It writes the threads from the youngest to the oldest, each from its innermost frame. Empty where no line of the
    script is known.
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
    """The error's line; where it only announces what follows, that too."""
    text = lines[number]
    if text.endswith(":") and number + 1 < len(lines):
        text = f"{text} {lines[number + 1].strip()}"
    return printable(text, _SHOWN_CHARACTERS)
