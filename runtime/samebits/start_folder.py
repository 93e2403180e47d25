"""The folder in which this process was started.

A script, or Hydra for it, may change to another folder before or after ``samebits.init()``; a job's folders must not
change with it. A launcher sets the start folder; otherwise it is the current folder when the package is imported.
"""

from __future__ import annotations

from pathlib import Path

try:
    _folder = Path.cwd()
except FileNotFoundError:  # the folder was removed; relative paths cannot work then either
    _folder = Path()


def start_folder() -> Path:
    """Return the folder in which this process was started."""
    return _folder


def was_started_in(folder: Path | None) -> None:
    """Set the start folder that the launcher named, unless it named none or the folder no longer exists."""
    global _folder
    if folder is not None and folder.is_dir():
        _folder = folder


def starts_here() -> None:
    """Make the current folder the start folder, in a process that was forked for a script."""
    global _folder
    _folder = Path.cwd()
