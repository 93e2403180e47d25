"""Reading a file that the user names, such as CLUSTER_SECRET_FILE: at once and bounded, or a reason why not.

Links are followed, since a cluster mounts its secrets behind them. A fifo would be waited for until something writes to
it (fifo(7)), and a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["read_named_file"]

_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_named_file(path: Path, most_bytes: int) -> bytes:
    """Return the file's first ``most_bytes + 1`` bytes, so that a longer one can be told.

    Raises:
        OSError: it cannot be read, or is no plain file; ``strerror`` has the reason.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is no plain file but a socket") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is no plain file but {_KINDS.get(stat.S_IFMT(mode), 'of another kind')}")
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most_bytes + 1)
