"""The folder in which this process was started.

A script, or Hydra for it, may change to another folder before ``samebits.init()`` and after it; a job's folders stay.
A launcher names the folder; otherwise it is the one that is current when the package is imported.
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


def was_started_in(folder: Path | None) -> None:
    """Take the folder that the launcher named, unless it named none, or that folder was moved or removed since."""
    global _folder
    if folder is not None and folder.is_dir():
        _folder = folder


def starts_here() -> None:
    """Take the current folder for the one of the start, in a process that was forked for a script."""
    global _folder
    _folder = Path.cwd()
