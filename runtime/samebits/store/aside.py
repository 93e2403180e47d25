"""Folders that make way for a new job: renamed beside themselves under the old job's id, never deleted.

Only the names and the renaming live here. The one idea: ``recovery`` becomes ``recovery.1a2b3c4d.aside``, which tells
whose it was, and no folder is ever overwritten.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from samebits.store import durable

ASIDE_SUFFIX = ".aside"


def short_id(job: str) -> str:
    """The part of a job's id that names a folder."""
    return job.partition("-")[0] or "unknown"


def aside_path(path: Path, job: str, number: int) -> Path:
    """``recovery`` → ``recovery.1a2b3c4d.aside``; from the second on with a number: ``recovery.1a2b3c4d.2.aside``."""
    counted = f".{number}" if number > 1 else ""
    return path.with_name(f"{path.name}.{short_id(job)}{counted}{ASIDE_SUFFIX}")


def aside_id(name: str, folder: str) -> str | None:
    """The short id in the name of a folder that was moved aside; none in any other name."""
    if not (name.startswith(f"{folder}.") and name.endswith(ASIDE_SUFFIX)):
        return None
    return name.removeprefix(f"{folder}.").removesuffix(ASIDE_SUFFIX).partition(".")[0]


def move_aside(path: Path, job: str) -> Path | None:
    """Rename the file or folder of this job; its new path, or None where there is none.

    Raises:
        StoreError: the disk refuses.
    """
    if not os.path.lexists(path):
        return None
    for number in itertools.count(1):
        aside = aside_path(path, job, number)
        if not os.path.lexists(aside):
            break
    durable.publish(path, aside)
    return aside
