"""Workers that were started and have not called ``samebits.init()``: when that is worth a word.

A script may import for minutes, from a slow disk or on a busy machine. As long as a process reads files, as an import
does, it is not named; a script that reads data and trains without a job is named after ``LONGEST_S``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samebits.store.process_identity import ProcessIdentity

PATIENCE_S = 15.0  # from a process's start to its samebits.init(), at least
LOOK_S = 5.0
LONGEST_S = 120.0
LEAST_READ_BYTES = 32 << 10  # within LOOK_S: a handful of compiled modules


def bytes_read(identity: ProcessIdentity) -> int | None:
    """Return how many bytes the process has read so far, cached ones included, or None if that cannot be seen."""
    try:
        found = re.search(r"^rchar: (\d+)$", Path(f"/proc/{identity.pid}/io").read_text(), re.MULTILINE)
    except OSError:  # it is gone, or another user's
        return None
    return int(found[1]) if found and identity.is_alive() else None


@dataclass(slots=True)
class _Watched:
    identity: ProcessIdentity
    began_at: float
    look_at: float
    read: int | None = None


class Silence:
    """Processes that were not named yet.

    Args:
        read: as :func:`bytes_read`.
    """

    def __init__(self, read: Callable[[ProcessIdentity], int | None] = bytes_read) -> None:
        self._read = read
        self._watched: dict[str, _Watched] = {}

    def began(self, name: str, identity: ProcessIdentity, now: float) -> None:
        """Watch the process that was found under this name."""
        self._watched[name] = _Watched(identity, now, now + PATIENCE_S - LOOK_S)

    def wake_at(self) -> float | None:
        """Return when ``due`` has something to do."""
        return min((one.look_at for one in self._watched.values()), default=None)

    def due(self, now: float) -> dict[str, tuple[ProcessIdentity, float]]:
        """Return, once, the processes that no longer seem to import, each with the seconds since it was found."""
        if not any(one.look_at <= now for one in self._watched.values()):
            return {}
        found = {}
        for name, one in list(self._watched.items()):
            if one.look_at > now + 1.0:  # those that are due a moment later are named together with the others
                continue
            before, one.read = one.read, self._read(one.identity)
            is_first = now - one.began_at < PATIENCE_S - LOOK_S / 2
            reads = before is not None and one.read is not None and one.read - before >= LEAST_READ_BYTES
            if (is_first or reads) and now - one.began_at < LONGEST_S:
                one.look_at = now + LOOK_S
            else:
                found[name] = one.identity, now - one.began_at
                del self._watched[name]
        return found
