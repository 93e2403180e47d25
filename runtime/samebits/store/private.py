"""Open files that decide which processes this user runs and signals; refuse files of other users.

A file in a folder that others can write to may belong to any user. A name is therefore opened without following links,
and the owner and the mode are checked on the open descriptor. Files that others can read are accepted; files that
others can write are refused.
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
    """Refuse a folder whose files cannot be trusted; a missing folder passes.

    Args:
        path: the folder.
        variable: the setting that names the folder, for the fix in the message.

    Raises:
        StoreError: the path is not a folder, belongs to another user, or is writable by others.
    """
    other = f"export {variable}=<a folder of your own>"
    with durable.disk_errors(path, "checking the folder"):
        try:
            link, found = path.lstat(), path.stat()
        except FileNotFoundError:
            if not path.is_symlink():
                return
            raise
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise StoreError(
            f"{path} is a link that belongs to {user(link.st_uid)}, so it is not followed. Fix: remove it, or {other}"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path}: expected a folder. Fix: move it away, or {other}")
    _require_own(path, found, f"run this as that user, or {other}")
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise StoreError(
            f"{path}: other users can write to this folder (mode {stat.S_IMODE(found.st_mode):04o}), so its files "
            f"are not trusted; expected a folder that only {user(os.geteuid())} can write. Fix: check its "
            f"content, then chmod go-w {path}"
        )


def make_folder(path: Path, variable: str = "LOG_DIR") -> None:
    """Create the folder for this user alone if it is missing, and check it."""
    check_folder(path, variable)
    durable.make_directory(path)
    check_folder(path, variable)


def read(path: Path, limit: int) -> bytes | None:
    """Return the first ``limit`` bytes of a file of this user; None if it does not exist.

    Raises:
        StoreError: the file is a link or not a regular file, belongs to another user, or is writable by others.
    """
    descriptor = _open(path, os.O_RDONLY)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_mode & _OTHERS_MAY_WRITE:
            raise StoreError(
                f"{path}: other users can write to this file (mode {stat.S_IMODE(found.st_mode):04o}), so its "
                f"content is not trusted. Fix: check its content, then chmod go-w {path}"
            )
        with durable.disk_errors(path, "reading the file"):
            return file.read(limit)


def open_to_append(path: Path) -> int:
    """Open a file of this user for appending; the caller closes the descriptor.

    A missing file is created with mode 0600.

    Raises:
        StoreError: the file is a link or not a regular file, or belongs to another user.
    """
    descriptor = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert descriptor is not None
    return descriptor


def user(uid: int) -> str:
    """Return a user's name, or ``user 1234`` if it has none."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


def _open(path: Path, flags: int) -> int | None:
    # O_NONBLOCK, because opening a fifo that another user left must not wait.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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
            raise StoreError(f"{path} is a link or a pipe; expected a file. Fix: remove it") from None
    found = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{path}: expected a file. Fix: remove it")
        _require_own(path, found, "remove it, or run this as that user")
    except StoreError:
        os.close(descriptor)
        raise
    return descriptor


def _require_own(path: Path, found: os.stat_result, fix: str) -> None:
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to {user(found.st_uid)}, and this is {user(os.geteuid())}; other users' files are not "
            f"trusted. Fix: {fix}"
        )
