"""Memory that one process holds and others of its user on the same host can open: found by its name.

Only the finding lives here. The one idea: such memory has no name in any folder, so nothing is left behind by kill -9,
and only who may look into the process can reach it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def find(pid: int, name: str, flags: int = os.O_RDONLY) -> int | None:
    """A descriptor of the memory (memfd_create(2)) that the process calls ``name``; None where it has none for us."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            return None
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # a descriptor that is closed meanwhile
                if str(entry.readlink()).startswith(f"/memfd:{name} "):
                    return os.open(entry, flags | os.O_CLOEXEC)
    except OSError:
        return None
    return None
