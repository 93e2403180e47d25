"""Find the line of the user's program from which a call came, for messages with a file and a line.

This is the innermost line outside torch, the standard library, installed packages and this package. If a library is
between that line and this package, the library is named as well, because the call may not be visible in the user's
file.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

__all__ = [
    "PACKAGE_FOLDER",
    "TORCH_FOLDER",
    "caller_is_torch",
    "calling_frame",
    "calling_place",
    "is_library",
    "place_of",
]

TORCH_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"
PACKAGE_FOLDER = f"{Path(__file__).parents[2]}{os.sep}"
_STDLIB_FOLDER = f"{sysconfig.get_path('stdlib')}{os.sep}"
_MOST_FRAMES = 64
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@functools.cache
def is_library(file: str) -> bool:
    """Return whether this source file belongs to Python, an installed package, torch, or SameBits."""
    if file.startswith(("<frozen ", TORCH_FOLDER, PACKAGE_FOLDER)) or any(part in file for part in _INSTALLED):
        return True
    return file.startswith(_STDLIB_FOLDER)


def calling_place() -> str:
    """Return the calling line: ``train.py:12``, or ``train.py:12 (through accelerate/state.py:290)``.

    This package is never named after ``through``.
    """
    through = ""
    for frame in _outwards(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not is_library(file):
            return f"{Path(file).name}:{frame.f_lineno}{through}"
        if (
            not through
            and not file.startswith((TORCH_FOLDER, PACKAGE_FOLDER))
            and any(part in file for part in _INSTALLED)
        ):
            through = f" (through {'/'.join(Path(file).parts[-2:])}:{frame.f_lineno})"
    return f"no file of the script's own{through}"


def place_of(error: BaseException) -> str:
    """Return the script's innermost line that an error came through, such as ``train.py:12``."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not is_library(file)]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else "the training function"


class _Files(dict[str, bool]):
    """A cache for ``is_library``, which is called for every frame. A dict is faster than ``functools.cache``."""

    def __missing__(self, file: str) -> bool:
        self[file] = found = is_library(file)
        return found


_files = _Files()


def calling_frame(depth: int) -> FrameType | None:
    """Return the script's innermost frame, starting ``depth`` callers up, or None if none is found within the limit.

    Takes about 0.1 µs for each frame of torch that is skipped.
    """
    frame: FrameType | None = sys._getframe(depth)
    left = _MOST_FRAMES
    while frame is not None and left and _files[frame.f_code.co_filename]:
        frame, left = frame.f_back, left - 1
    return frame if left else None


def caller_is_torch() -> bool:
    """Return whether the caller of the calling function is in torch itself."""
    return sys._getframe(2).f_code.co_filename.startswith(TORCH_FOLDER)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
