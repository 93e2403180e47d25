"""Read a file that the user names, such as CLUSTER_SECRET_FILE, without blocking and up to a maximum size.

Links are followed, since clusters mount secrets behind links. A fifo would block until something writes to it
(fifo(7)), and a device may never end, so only regular files are read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_named_file(path: Path, most_bytes: int) -> bytes:
    """Return the file's first ``most_bytes + 1`` bytes, so that a longer file can be detected.

    Raises:
        OSError: the file cannot be read, or is not a regular file; ``strerror`` has the reason.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is not a plain file but a socket") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is not a plain file but {_KINDS.get(stat.S_IFMT(mode), 'of unknown kind')}")
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most_bytes + 1)
