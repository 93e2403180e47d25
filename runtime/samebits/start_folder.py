"""The folder in which this process was started, taken when the package is imported.

A script, or Hydra for it, may change to another folder before ``samebits.init()`` and after it; a job's folders stay.
"""

from __future__ import annotations

from pathlib import Path

try:
    _folder = Path.cwd()
except FileNotFoundError:  # it was removed under this process: relative paths cannot be used either
    _folder = Path()


def start_folder() -> Path:
    """Return the folder in which this process was started."""
    return _folder


def starts_here() -> None:
    """Take the current folder for the one of the start, in a process that was forked for a script."""
    global _folder
    _folder = Path.cwd()
