"""A model of what a disk would hold after a power failure, beside the files' visible content.

Only fsync makes content durable (fsync(2)): a file's bytes, a folder's names. Anything else may be lost, possibly in
part, so several kinds of loss are tried. Each has occurred on some file system (Pillai et al., "All File Systems Are
Not Created Equal", OSDI 2014).
"""

from __future__ import annotations

import base64
import os
import stat
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

NO_BYTES = ""

_link = os.link  # the originals, before anything is interposed: the model's own calls are not the writer's


class Loss(Enum):
    """Which unsynced content is lost with the power."""

    EVERYTHING = "names and bytes"
    BYTES = "bytes, not names"  # delayed allocation: a file renamed without fsync is empty
    NAMES = "names, not bytes"
    HALF = "half of the bytes, no name"
    ZEROED = "bytes, which read as zeros, no name"


@dataclass(slots=True)
class PageCache:
    """What is durable below a folder, by inode; base64, so that it can be sent as JSON.

    ``holds`` is a folder beside it with a link to every file that ever existed, so that no inode is reused.
    """

    root: Path
    holds: Path
    names: dict[int, dict[str, int]] = field(default_factory=dict)  # folder → its durable entries
    bytes_of: dict[int, str] = field(default_factory=dict)  # file → its durable bytes

    @classmethod
    def all_durable(cls, root: Path, holds: Path) -> PageCache:
        """Treat everything that exists now as durable."""
        cache = cls(root, holds)
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            cache.sync_folder(folder)
            for path in folder.iterdir():
                if path.is_file():
                    cache.born(path)
                    cache.sync_file(path)
        return cache

    @classmethod
    def from_plain(cls, root: Path, holds: Path, plain: dict[str, Any]) -> PageCache:
        names = {int(folder): dict(entries) for folder, entries in plain["names"].items()}
        return cls(root, holds, names, {int(file): data for file, data in plain["bytes_of"].items()})

    def to_plain(self) -> dict[str, Any]:
        return {"names": self.names, "bytes_of": self.bytes_of}

    def born(self, path: Path) -> None:
        """Note a file or folder at this path, possibly a new one."""
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = {}
        elif found.st_ino not in self.bytes_of:
            self.names.pop(found.st_ino, None)  # a removed folder cannot be held by a link
            self.bytes_of[found.st_ino] = NO_BYTES
            _link(path, self.holds / str(found.st_ino))

    def sync_file(self, path: Path) -> None:
        self.bytes_of[path.stat().st_ino] = base64.b64encode(path.read_bytes()).decode("ascii")

    def sync_folder(self, path: Path) -> None:
        with os.scandir(path) as entries:
            self.names[path.stat().st_ino] = {entry.name: entry.inode() for entry in entries}

    def lose(self, loss: Loss, target: Path) -> None:
        """Create in ``target``, which must not exist, what a machine finds after this loss."""
        kept_names = loss is Loss.BYTES
        now = {int(path.name): path.read_bytes() for path in self.holds.iterdir()}
        pending = [(self.root.stat().st_ino, self.root if kept_names else None, target)]
        while pending:
            inode, real, made = pending.pop()
            made.mkdir()
            names = self.names.get(inode, {})
            if real is not None:
                names = {path.name: path.stat().st_ino for path in real.iterdir()}
            for name, child in names.items():
                if (real is not None and (real / name).is_dir()) or (real is None and child in self.names):
                    pending.append((child, None if real is None else real / name, made / name))
                else:
                    (made / name).write_bytes(self._left_of(child, now, loss))

    def _left_of(self, inode: int, now: dict[int, bytes], loss: Loss) -> bytes:
        durable, current = base64.b64decode(self.bytes_of[inode]), now[inode]
        if loss in (Loss.EVERYTHING, Loss.BYTES) or not current.startswith(durable):
            return current if loss is Loss.NAMES else durable
        unsynced = current[len(durable) :]
        if loss is Loss.HALF:
            return durable + unsynced[: len(unsynced) // 2]
        return current if loss is Loss.NAMES else durable + bytes(len(unsynced))
