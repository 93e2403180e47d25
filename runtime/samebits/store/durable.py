"""The one place that knows how to be durable: write, fsync, rename, and what a full or failing disk says.

Here live the few primitives every file of this package is written with; never a file format. The one idea: a new file
becomes visible under its name only when its bytes are on disk (temporary file → fsync → rename → fsync of the
directory; see fsync(2), and Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014), so a crash anywhere
leaves the old file or the new one. An :class:`OSError` leaves here as a :class:`StoreError` that names path, reason and
fix, and takes its temporary file along.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from samebits.errors import StoreError

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

BytesLike = bytes | bytearray | memoryview

_FIXES = {
    errno.ENOSPC: "free space on that file system (see `df -h`) or choose another folder; what was saved is unharmed",
    errno.EDQUOT: "free space in your quota (see `quota`) or choose another folder; what was saved is unharmed",
    errno.EROFS: "remount that file system writable, or choose a folder that can be written",
    errno.EACCES: "give this user the right to it (see `ls -ld`), or choose another folder",
    errno.EPERM: "give this user the right to it (see `ls -ld`), or choose another folder",
    errno.EFBIG: "raise the limit of a file's size (see `ulimit -f`), or choose another folder",
    errno.EEXIST: "remove what has that name already, or choose another one",
    errno.EIO: "copy the folder to another disk and use that: the device reports a fault (see `dmesg`)",
    errno.EMFILE: "raise the limit of open files with `ulimit -n`",
    errno.ENFILE: "raise the machine's limit of open files (`sysctl fs.file-max`)",
}
_OTHER_FIX = "see that it exists, is of the kind expected, and that this user may read and write it"

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
    """A descriptor to read a file by, if it is a plain one; raises the bare :class:`OSError` where it is anything else.

    Whoever can write in a folder can leave a fifo there, whose opening waits for a writer that never comes (fifo(7)),
    or a link to a device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a socket (open(2))
            raise OSError(f"it is no plain file ({os.strerror(error.errno)})") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no plain file but a directory, a fifo or a device")
    return descriptor


def require_replaceable(path: Path) -> None:
    """Refuse the name of a device, fifo, socket or directory: a user who names one means to write into it.

    Raises:
        StoreError: it is; root could replace ``/dev/null``.
    """
    with disk_errors(path, "writing the file"):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            raise OSError("it is no plain file but a directory, a fifo, a socket or a device, which is not replaced")


def write_all(descriptor: int, data: BytesLike) -> None:
    """``os.write`` until every byte is taken; raises the bare :class:`OSError`."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def fsync_dir(directory: Path) -> None:
    """Make the directory's entries durable: creations, renames and removals in it."""
    with disk_errors(directory, "making the directory durable"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network and FUSE file systems know no fsync of a directory; there a rename is durable by itself or
            # not at all, and refusing to run would not change which.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def sync_entry(path: Path) -> None:
    """Make the entry of ``path`` in its folder durable. In a folder that it cannot read this user made nothing."""
    if os.access(path.parent, os.R_OK):
        fsync_dir(path.parent)


def make_directory(directory: Path, *, sync: bool = True) -> None:
    """Create the directory and its missing parents, 0700 and durable (``sync``); an existing one is left as it is.

    With ``sync`` an existing one's entry is made durable too: whoever made it may have been killed, or have failed,
    between making it and syncing it, and since one level follows the other only the deepest can be in that state.
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
    """As :func:`make_directory`, but nobody waits for a disk where it is there: another one answers for its entry."""
    with disk_errors(directory, "looking for the directory"):
        is_there = directory.is_dir()
    if not is_there:
        make_directory(directory)


def create(path: Path, more_flags: int = 0, *, is_read_too: bool = False) -> int:
    """Create a file that was not there, 0600, and return its descriptor; raises the bare :class:`OSError`.

    A name that is taken is refused, whatever has it: in a folder that others may write it can be a link to a file of
    this user's (open(2), O_EXCL).
    """
    access = os.O_RDWR if is_read_too else os.O_WRONLY
    return os.open(path, access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | more_flags, FILE_MODE)


def create_beside(path: Path, tag: str = "") -> tuple[Path, int]:
    """Create a temporary file of ``path``; return its name and descriptor. Raises the bare :class:`OSError`.

    A name that another process has taken, or planted, is passed over for one that nobody can guess.
    """
    name = f"{_temporary_prefix(path)}{tag}{os.getpid()}-{next(_temporary_numbers)}"
    temporary = path.with_name(name)
    try:
        return temporary, create(temporary)
    except FileExistsError:
        temporary = path.with_name(f"{name}-{secrets.token_hex(8)}")
        return temporary, create(temporary)


def reopen(path: Path, more_flags: int = 0) -> int:
    """Return a descriptor to write a file that is there; no link is followed. Raises the bare :class:`OSError`."""
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | more_flags)


def make_new_directory_beside(path: Path) -> Path:
    """Make a temporary directory of ``path``, 0700, that was not there; raises the bare :class:`OSError`."""
    temporary = path.with_name(f"{_temporary_prefix(path)}{os.getpid()}-{secrets.token_hex(8)}")
    temporary.mkdir(mode=DIRECTORY_MODE)
    return temporary


def write_file(path: Path, data: BytesLike, *, sync: bool = True) -> None:
    """Write and fsync a new file, but not its directory's entry of it; raises the bare :class:`OSError`."""
    _fill(create(path), data, sync=sync)


def _fill(descriptor: int, data: BytesLike, *, sync: bool) -> None:
    try:
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_temporary(path: Path, data: BytesLike, *, sync: bool = True, tag: str = "") -> Path:
    """Write ``data``, durably, to a new file beside ``path``, for :func:`publish`; nothing is left if that fails.

    ``tag`` is part of its name where a process of another host, whose pid may be the same, may write there as well.
    """
    with disk_errors(path, f"writing {len(data)} bytes"):
        temporary, descriptor = create_beside(path, tag)
        with removed_on_failure(temporary):
            _fill(descriptor, data, sync=sync)
    return temporary


def publish(temporary: Path, path: Path) -> None:
    """Give a temporary file or directory its name, durably. After a failure either name may be the durable one."""
    with disk_errors(path, "renaming what was written into place"):
        temporary.rename(path)
    fsync_dir(path.parent)


def write_file_atomically(path: Path, data: BytesLike) -> None:
    """Replace ``path`` by a file of exactly ``data``: a crash at any moment leaves the old file or the new one."""
    temporary = write_temporary(path, data)
    with disk_errors(path, "writing the file"), removed_on_failure(temporary):
        publish(temporary, path)


def replace_note(path: Path, data: BytesLike) -> None:
    """Replace ``path`` by ``data``, whole, where nothing depends on it once the machine was off: without any sync."""
    temporary = write_temporary(path, data, sync=False)
    with disk_errors(path, "writing the note"), removed_on_failure(temporary):
        temporary.rename(path)


def create_file_atomically(path: Path, data: BytesLike, *, sync: bool = True) -> bool:
    """Create ``path`` with ``data`` unless it exists: false if it does. Of many callers at once exactly one succeeds.

    Where the file system has no hard links the last of several simultaneous callers wins instead: read it back.
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
    """The descriptor of a file that gets its name, durably, when the block ends well, and is gone where it does not.

    Args:
        path: its name.
        replace: what has that name already goes; else that is a :class:`StoreError`, and it stays.
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
    """Give a temporary file its name unless that is taken; false if it is."""
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


def temporaries_of(path: Path) -> Iterable[Path]:
    """Temporary files of ``path`` that a killed writer left; whoever holds the folder's lock may remove them."""
    prefix = _temporary_prefix(path)
    return [entry for entry in path.parent.iterdir() if entry.name.startswith(prefix)]


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}.tmp-"


@contextlib.contextmanager
def removed_on_failure(temporary: Path) -> Iterator[None]:
    """Remove a temporary file if the block fails, whatever the failure is."""
    try:
        yield
    except BaseException:
        # A device that failed once is often read-only from then on: the first failure is the one to tell, and what
        # cannot be removed is in nobody's way.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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
    publish(path, aside)
    return aside
