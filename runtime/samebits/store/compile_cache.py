"""The folder of what torch.compile has made, one below it for each version that may not take another's.

::

    <COMPILE_CACHE_PATH>/<version>/    what inductor and triton put there, by names of their own

Here live the folder's name, its bound and who may have written it. Never here: what is in it, which torch alone reads;
an entry that is torn or damaged it makes anew. The one idea: compiled code is run, so a folder is believed only where
it is this user's own; and it is a cache, so what is old goes first and nothing is ever waited for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from samebits.store import private

VARIABLE = "COMPILE_CACHE_PATH"
MOST_BYTES = 8 * 2**30
"""Of all versions together."""

KEPT_FOR_S = 24 * 3600.0
"""What was written or read since then stays in any case: another process may be about to load it."""


def folder_of(root: Path, version: Iterable[str]) -> Path:
    """The folder for what this version compiles, made where it is missing.

    Args:
        root: COMPILE_CACHE_PATH.
        version: all that compiled code depends on and does not name by itself: the first is shown in the name.

    Raises:
        StoreError: one of the two is another user's, or one that others may write, or cannot be made.
    """
    facts = list(version)
    digest = xxhash.xxh3_64_hexdigest("\0".join(facts).encode())
    private.make_folder(root, VARIABLE)
    folder = root / f"{facts[0]}-{digest}"
    private.make_folder(folder, VARIABLE)
    return folder


def prune(root: Path, now_s: float, most_bytes: int = MOST_BYTES) -> int:
    """Remove what was not used for longest until no more than ``most_bytes`` are left; how many bytes went.

    What cannot be removed stays. ``now_s`` is in seconds since the epoch.
    """
    files = sorted(_files(root))
    excess = sum(size for _, size, _ in files) - most_bytes
    removed = 0
    for used_s, size, path in files:
        if removed >= excess or used_s > now_s - KEPT_FOR_S:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            removed += size
    return removed


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                found = path.lstat()
                yield max(found.st_mtime, found.st_atime), found.st_size, path
