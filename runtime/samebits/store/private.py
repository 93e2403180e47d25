"""Folders and files that decide what this user runs and signals: only what is this user's own is believed.

Opening and checking live here; what is in the files is their readers'. The one idea: a file in a folder that others may
write may be anybody's, so a name is opened without following a link, and owner and mode are asked of the descriptor.
What this user's folders hold that others may read does no harm; what others may write is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from pathlib import Path

from samebits.errors import StoreError
from samebits.store import durable

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_folder(path: Path, variable: str = "LOG_DIR") -> None:
    """Whether files in this folder may be believed; a folder that is not there is nobody's, and passes.

    ``variable`` names another one.

    Raises:
        StoreError: it is no folder, another user's, or one that others may write.
    """
    other = f"export {variable}=<a folder of your own>"
    with durable.disk_errors(path, "looking at the folder"):
        try:
            link, found = path.lstat(), path.stat()
        except FileNotFoundError:
            if not path.is_symlink():
                return
            raise
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise StoreError(f"{path}: a link of {user(link.st_uid)}, which is not followed. Fix: remove it, or {other}")
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path}: expected a folder. Fix: move it away, or {other}")
    _require_own(path, found, f"call this as that user, or {other}")
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise StoreError(
            f"{path}: others may write in it (mode {stat.S_IMODE(found.st_mode):04o}), so what lies there may be "
            f"anybody's; expected a folder that only {user(os.geteuid())} writes. Fix: look at what is in it, then "
            f"chmod go-w {path}"
        )


def make_folder(path: Path, variable: str = "LOG_DIR") -> None:
    """Create the folder, this user's alone, where it is missing; then :func:`check_folder`."""
    check_folder(path, variable)
    durable.make_directory(path)
    check_folder(path, variable)


def read(path: Path, limit: int) -> bytes | None:
    """The first ``limit`` bytes of a file of this user's; None where there is none.

    Raises:
        StoreError: it is a link, no file, another user's, or one that others may write.
    """
    descriptor = _open(path, os.O_RDONLY)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_mode & _OTHERS_MAY_WRITE:
            raise StoreError(
                f"{path}: others may write it (mode {stat.S_IMODE(found.st_mode):04o}), so it may say anything. "
                f"Fix: look at what is in it, then chmod go-w {path}"
            )
        with durable.disk_errors(path, "reading the file"):
            return file.read(limit)


def open_to_append(path: Path) -> int:
    """A descriptor that appends to a file of this user's, made (0600) where it is missing; the caller closes it.

    Raises:
        StoreError: it is a link, no file, or another user's.
    """
    descriptor = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert descriptor is not None
    return descriptor


def user(uid: int) -> str:
    """A user's name, for people."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


def _open(path: Path, flags: int) -> int | None:
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # whoever opens a pipe that somebody left does not wait
    with durable.disk_errors(path, "opening the file"):
        try:
            descriptor = os.open(path, flags, durable.FILE_MODE)
        except FileNotFoundError:
            if flags & os.O_CREAT:
                raise
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise StoreError(f"{path}: a link or a pipe, expected a file. Fix: remove it") from None
    found = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{path}: expected a file. Fix: remove it")
        _require_own(path, found, "remove it, or call this as that user")
    except StoreError:
        os.close(descriptor)
        raise
    return descriptor


def _require_own(path: Path, found: os.stat_result, fix: str) -> None:
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"{path}: belongs to {user(found.st_uid)}, and this is {user(os.geteuid())}: what another user left is not "
            f"believed. Fix: {fix}"
        )
