"""Write files durably, and explain disk errors.

A new file gets its name only after its bytes are on disk: temporary file → fsync → rename → fsync of the directory. See
fsync(2), and Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014. A crash at any point leaves the old
file or the new one.

An :class:`OSError` becomes a :class:`StoreError` that names the path, the reason and the fix. The temporary file is
removed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from samebits.errors import StoreError

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

BytesLike = bytes | bytearray | memoryview

_FIXES = {
    errno.ENOSPC: "free space on that file system (see `df -h`) or choose another folder; saved data is intact",
    errno.EDQUOT: "free space in your quota (see `quota`) or choose another folder; saved data is intact",
    errno.EROFS: "remount that file system writable, or choose a folder that can be written",
    errno.EACCES: "give this user access to it (see `ls -ld`), or choose another folder",
    errno.EPERM: "give this user access to it (see `ls -ld`), or choose another folder",
    errno.EFBIG: "raise the file size limit (see `ulimit -f`), or choose another folder",
    errno.EEXIST: "remove the existing file, or choose another name",
    errno.EIO: "copy the folder to another disk and use that: the device reports a fault (see `dmesg`)",
    errno.EMFILE: "raise the limit of open files with `ulimit -n`",
    errno.ENFILE: "raise the machine's limit of open files (`sysctl fs.file-max`)",
}
_OTHER_FIX = "check that it exists, is of the expected kind, and that this user may read and write it"

_MAY_PASS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOMEM})

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

_temporary_numbers = itertools.count()


@contextlib.contextmanager
def disk_errors(path: Path, doing: str, kind: type[StoreError] = StoreError) -> Iterator[None]:
    """Turn an :class:`OSError` into ``kind``: "<path>: <doing> failed: <reason>. Fix: <fix>"."""
    try:
        yield
    except OSError as error:
        told = kind(f"{path}: {doing} failed: {reason_of(error)}")
        told.may_pass = (error.errno or 0) in _MAY_PASS
        raise told from error


def reason_of(error: OSError) -> str:
    """Return an error's reason with its name, and the fix: ``No space left on device (ENOSPC). Fix: …``."""
    number = error.errno or 0
    reason = f"{os.strerror(number)} ({errno.errorcode[number]})" if number in errno.errorcode else str(error)
    return f"{reason}. Fix: {_FIXES.get(number, _OTHER_FIX)}"


def open_regular(path: Path) -> int:
    """Open a regular file for reading; raise a plain :class:`OSError` for anything else.

    Any user with write access to the folder could leave a link to a device there, or a fifo, and opening a fifo waits
    for a writer (fifo(7)).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a socket (open(2))
            raise OSError(f"it is not a plain file ({os.strerror(error.errno)})") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a plain file but a directory, a fifo or a device")
    return descriptor


def require_replaceable(path: Path) -> None:
    """Refuse to replace a device, fifo, socket or directory.

    A user who names a device wants to write to it, and root could replace ``/dev/null``.

    Raises:
        StoreError: the path is one of these.
    """
    with disk_errors(path, "writing the file"):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            raise OSError("it is not a plain file but a directory, a fifo, a socket or a device, which is not replaced")


def write_all(descriptor: int, data: BytesLike) -> None:
    """Write every byte to the descriptor; raise the plain :class:`OSError`."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def fsync_dir(directory: Path) -> None:
    """Make creations, renames and removals in the directory durable."""
    with disk_errors(directory, "making the directory durable"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network and FUSE file systems have no fsync for directories. Refusing to run would not make their
            # renames more durable.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def sync_entry(path: Path) -> None:
    """Make the entry of ``path`` in its folder durable.

    A folder that this user cannot read is skipped, because this user cannot have created anything in it.
    """
    if os.access(path.parent, os.R_OK):
        fsync_dir(path.parent)


def make_directory(directory: Path, *, sync: bool = True) -> None:
    """Create the directory and its missing parents with mode 0700, durably if ``sync``.

    An existing directory is not changed. With ``sync``, its entry is still made durable, because its creator may have
    been killed between creating and syncing it. Levels are created one after the other, so only the deepest existing
    one can be in that state.
    """
    with disk_errors(directory, "creating the directory"):
        missing = list(itertools.takewhile(lambda path: not path.exists(), (directory, *directory.parents)))
        deepest = missing[-1].parent if missing else directory
        if sync:
            sync_entry(deepest)
        for path in reversed(missing):
            path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            if sync:
                fsync_dir(path.parent)
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def make_missing_directory(directory: Path) -> None:
    """Create the directory durably, but do not wait for the disk if it exists.

    Use this if another caller makes an existing entry durable.
    """
    with disk_errors(directory, "looking for the directory"):
        is_there = directory.is_dir()
    if not is_there:
        make_directory(directory)


def create(path: Path, more_flags: int = 0, *, is_read_too: bool = False) -> int:
    """Create a new file with mode 0600 and return its descriptor.

    An existing name is refused (open(2), O_EXCL): in a folder that others can write to, it may be a link to a file of
    this user. Raises the plain :class:`OSError`.
    """
    access = os.O_RDWR if is_read_too else os.O_WRONLY
    return os.open(path, access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | more_flags, FILE_MODE)


def create_beside(path: Path, tag: str = "") -> tuple[Path, int]:
    """Create a temporary file beside ``path``; return its name and descriptor.

    If the name already exists, perhaps planted there, an unguessable one is used. Raises the plain :class:`OSError`.
    """
    name = f"{_temporary_prefix(path)}{tag}{os.getpid()}-{next(_temporary_numbers)}"
    temporary = path.with_name(name)
    try:
        return temporary, create(temporary)
    except FileExistsError:
        temporary = path.with_name(f"{name}-{secrets.token_hex(8)}")
        return temporary, create(temporary)


def reopen(path: Path, more_flags: int = 0) -> int:
    """Open an existing file for writing, without following links; raise the plain :class:`OSError`."""
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | more_flags)


def make_new_directory_beside(path: Path) -> Path:
    """Create a temporary directory beside ``path``, with mode 0700; raise the plain :class:`OSError`."""
    temporary = path.with_name(f"{_temporary_prefix(path)}{os.getpid()}-{secrets.token_hex(8)}")
    temporary.mkdir(mode=DIRECTORY_MODE)
    return temporary


def write_file(path: Path, data: BytesLike, *, sync: bool = True) -> None:
    """Write and fsync a new file, but not its directory; raise the plain :class:`OSError`."""
    _fill(create(path), data, sync=sync)


def _fill(descriptor: int, data: BytesLike, *, sync: bool) -> None:
    try:
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_temporary(path: Path, data: BytesLike, *, sync: bool = True, tag: str = "") -> Path:
    """Write ``data`` durably to a new file beside ``path``, for :func:`publish`.

    Nothing is left behind on failure.

    Args:
        path: the file's final name.
        data: the file's content.
        sync: whether to fsync the file.
        tag: part of the temporary name, for folders in which a process with the same pid on another host may write.
    """
    with disk_errors(path, f"writing {len(data)} bytes"):
        temporary, descriptor = create_beside(path, tag)
        with removed_on_failure(temporary):
            _fill(descriptor, data, sync=sync)
    return temporary


def publish(temporary: Path, path: Path) -> None:
    """Rename a temporary file or directory into place, durably.

    After a failure, either name may be the durable one.
    """
    with disk_errors(path, "renaming the new file into place"):
        temporary.rename(path)
    fsync_dir(path.parent)


def write_file_atomically(path: Path, data: BytesLike) -> None:
    """Replace ``path`` with a file of ``data``; a crash leaves the old file or the new one."""
    temporary = write_temporary(path, data)
    with disk_errors(path, "writing the file"), removed_on_failure(temporary):
        publish(temporary, path)


def replace_note(path: Path, data: BytesLike) -> None:
    """Replace ``path`` with ``data`` atomically, but without a sync.

    Use this for files that are not needed after a reboot.
    """
    temporary = write_temporary(path, data, sync=False)
    with disk_errors(path, "writing the note"), removed_on_failure(temporary):
        temporary.rename(path)


def create_file_atomically(path: Path, data: BytesLike, *, sync: bool = True) -> bool:
    """Create ``path`` with ``data``; return False if it exists.

    Of several simultaneous callers, exactly one succeeds. On a file system without hard links, the last one wins
    instead, so callers must read the file back there.
    """
    temporary = write_temporary(path, data, sync=sync)
    with disk_errors(path, "creating the file"):
        with removed_on_failure(temporary):
            is_new = _link_or_rename(temporary, path)
        temporary.unlink(missing_ok=True)
    if sync and is_new:
        fsync_dir(path.parent)
    return is_new


@contextlib.contextmanager
def new_file(path: Path, *, replace: bool) -> Iterator[int]:
    """Yield a descriptor of a new file, which is published durably if the block succeeds.

    If the block fails, the file is removed.

    Args:
        path: the file's final name.
        replace: whether to replace an existing file; if false, an existing file raises a :class:`StoreError`.
    """
    if replace:
        require_replaceable(path)
    with disk_errors(path, "writing the file"):
        temporary, descriptor = create_beside(path)
        with removed_on_failure(temporary):
            try:
                yield descriptor
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if replace:
                temporary.rename(path)
            elif _link_or_rename(temporary, path):
                temporary.unlink(missing_ok=True)
            else:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    fsync_dir(path.parent)


def _link_or_rename(temporary: Path, path: Path) -> bool:
    """Give a temporary file its final name; return False if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if path.exists():
            return False
        temporary.rename(path)
    return True


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}.tmp-"


@contextlib.contextmanager
def removed_on_failure(temporary: Path) -> Iterator[None]:
    """Remove a temporary file if the block fails for any reason."""
    try:
        yield
    except BaseException:
        # A device that failed once is often read-only afterwards. Report the first failure, and leave a file that
        # cannot be removed.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


ASIDE_SUFFIX = ".aside"


def short_id(job: str) -> str:
    """Return the part of a job's id that is used in folder names."""
    return job.partition("-")[0] or "unknown"


def aside_path(path: Path, job: str, number: int) -> Path:
    """Return a name such as ``recovery.1a2b3c4d.aside``, or ``recovery.1a2b3c4d.2.aside`` for the second."""
    counted = f".{number}" if number > 1 else ""
    return path.with_name(f"{path.name}.{short_id(job)}{counted}{ASIDE_SUFFIX}")


def aside_id(name: str, folder: str) -> str | None:
    """Return the short id in the name of a folder that was moved aside, or None for other names."""
    if not (name.startswith(f"{folder}.") and name.endswith(ASIDE_SUFFIX)):
        return None
    return name.removeprefix(f"{folder}.").removesuffix(ASIDE_SUFFIX).partition(".")[0]


def move_aside(path: Path, job: str) -> Path | None:
    """Rename this job's file or folder; return its new path, or None if it does not exist.

    Raises:
        StoreError: the disk reports an error.
    """
    if not os.path.lexists(path):
        return None
    for number in itertools.count(1):
        aside = aside_path(path, job, number)
        if not os.path.lexists(aside):
            break
    publish(path, aside)
    return aside
