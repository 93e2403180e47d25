"""``samebits clean``: remove what jobs of this folder left behind: checkpoints in memory and folders moved aside.

Only items that were listed with path and size are removed, and only while the job has no process. Files of other users,
jobs and folders are ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.account.job_view import JobView
from samebits.commands.recover import look
from samebits.config import Settings
from samebits.errors import ForeignFolderError, LockedError, StoreError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.processes import process_names, read_pid_files, spoken
from samebits.launcher.recovering import newest_candidate
from samebits.launcher.relay_process import end_relay
from samebits.launcher.spawning import StartLock
from samebits.service.status import stored_view
from samebits.store import checkpoint as checkpoints
from samebits.store import durable
from samebits.store.durable import aside_id
from samebits.store.lock import DirectoryLock
from samebits.store.owner import OWNER_FILE

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Left:
    """An item that may be removed. ``job`` is the owner of memory, and empty for a folder or file."""

    path: Path
    size_bytes: int
    what: str
    job: str = ""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits clean",
        description="Free what this folder's jobs left behind: checkpoints in memory, and folders that were moved "
        "aside. Shows everything with its size and asks first. Nothing is freed while a process of the jobs runs.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be freed")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    options = parser.parse_args(arguments)
    log_dir, kept = job_spec.read_here()
    settings = kept.settings()
    with StartLock(log_dir), _nothing_lives(settings):
        if not options.dry_run:
            end_relay(log_dir)
        left = find(settings)
        for line in shown(left, settings):
            print(line, flush=True)
        if not left or options.dry_run:
            return 0
        if not options.yes and not _agrees():
            print("samebits: nothing was removed")
            return 0
        print(f"samebits: {spoken_size(remove(left))} are free again")
    return 0


def find(settings: Settings) -> list[Left]:
    """Find what this user's jobs of this folder left on this host."""
    moved = list(_moved_aside(settings))
    views = [_view_of(settings.recovery_path), *(_view_of(path) for path in moved if path.is_dir())]
    jobs = dict.fromkeys(view.job for view in views if view is not None)
    left = [one for job in jobs for one in memory_of(job)]
    return left + [Left(path, _size_of(path), "moved aside") for path in moved]


def memory_of(job: str) -> list[Left]:
    """Return the memory that a job's checkpoints take on this host."""
    rooms = checkpoints.rooms_of(checkpoints.SHARED_MEMORY, job)
    return [Left(room.path, room.size_bytes, "checkpoints in memory", job) for room in rooms]


def memory_line(job: str) -> str:
    """Return a sentence about the memory that a job's checkpoints take on this host, or "" if they take none."""
    size_bytes = sum(one.size_bytes for one in memory_of(job))
    if not size_bytes:
        return ""
    return f"its checkpoints take {spoken_size(size_bytes)} of this host's memory ({checkpoints.SHARED_MEMORY})"


def shown(left: Sequence[Left], settings: Settings) -> list[str]:
    """Return a line for each item that may be removed, with what its removal means for the job."""
    if not left:
        return ["samebits: there is nothing to free in this folder"]
    lines = [f"  {spoken_size(one.size_bytes):>10}  {one.path} ({one.what})" for one in left]
    view = _view_of(settings.recovery_path)
    if view is not None and not view.job_finished and any(one.job == view.job for one in left):
        without = _without_memory(view, settings)
        lines += [f"samebits: {view} is unfinished, and {without}"] if without else []
    return lines


def _without_memory(view: JobView, settings: Settings) -> str:
    """Return what a recovery loses without the job's memory, or "" if the memory holds no point."""
    newest = checkpoints.newest_in_memory(checkpoints.SHARED_MEMORY, view.job)
    if newest is None:
        return ""
    recover = job_spec.command_to_continue(settings.log_dir)
    try:
        on_disk = newest_candidate(settings)
    except ForeignFolderError:  # several jobs save there
        on_disk = None
    if on_disk is None or on_disk.job != view.job:
        return f"its memory holds step {newest.step}; without it `{recover}` continues from what is on disk"
    if on_disk.point >= newest:
        return f"`{recover}` continues from step {on_disk.point.step} also without that memory: the step is on disk"
    return (
        f"its memory holds step {newest.step}, which is not on disk; without it `{recover}` continues from step "
        f"{on_disk.point.step}"
    )


def remove(left: Sequence[Left]) -> int:
    """Remove these items; return the number of bytes freed.

    Raises:
        StoreError: an item cannot be removed.
    """
    freed = 0
    for job in dict.fromkeys(one.job for one in left if one.job):
        gone = set(checkpoints.free_rooms(checkpoints.SHARED_MEMORY, job))
        freed += sum(one.size_bytes for one in left if one.path in gone)
    for one in left:
        if one.job:
            continue
        with durable.disk_errors(one.path, "removing what was moved aside"):
            if one.path.is_dir():
                shutil.rmtree(one.path)
            else:
                one.path.unlink()
        freed += one.size_bytes
    return freed


def spoken_size(size_bytes: int) -> str:
    """Format a size such as ``1.5 GiB``."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} B"


@contextlib.contextmanager
def _nothing_lives(settings: Settings) -> Iterator[None]:
    """Context manager that holds the job's lock, so that no process of the job starts in the meantime.

    Raises:
        LockedError: a process of the job runs.
    """
    started = read_pid_files(settings.log_dir, process_names(job_spec.nodes_of(settings.log_dir, settings)))
    running = [f"{spoken(name)} ({identity})" for name, identity in started.items() if identity.is_alive()]
    remains = look(settings)
    if remains.scheduler_serves:
        running.append(f"its scheduler on SCHED_PORT={settings.sched_port}")
    view = _view_of(settings.recovery_path)
    rooms = checkpoints.rooms_of(checkpoints.SHARED_MEMORY, view.job) if view is not None else []
    running += [f"the process that holds {room.path}" for room in rooms if room.is_locked]
    if running:
        raise LockedError(
            f"the job in this folder is still running: {', '.join(running[:6])}; nothing was removed. Fix: run "
            "`samebits stop` first"
        )
    if not settings.recovery_path.exists():
        yield
        return
    with DirectoryLock(settings.recovery_path, "samebits clean"):
        yield


def _moved_aside(settings: Settings) -> Iterator[Path]:
    """Yield the folders that run.sh moved aside for jobs of this folder, if this user owns them."""
    named = [settings.recovery_path, settings.log_dir / job_spec.START_FILE, settings.log_dir / OWNER_FILE]
    if isinstance(settings.checkpoint_path, Path):
        named.append(settings.checkpoint_path)
    for path in named:
        with durable.disk_errors(path.parent, "looking for what was moved aside"):
            entries = sorted(path.parent.iterdir()) if path.parent.exists() else []
        for entry in entries:
            if aside_id(entry.name, path.name) is None:
                continue
            found = entry.lstat()
            if found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
                yield entry


def _view_of(recovery_path: Path) -> JobView | None:
    """Return the job in this folder, or None if no job is readable."""
    try:
        return stored_view(recovery_path)
    except StoreError:
        return None


def _size_of(path: Path) -> int:
    """Return the disk space of a file or a folder's tree, in bytes (stat(2): blocks of 512 bytes)."""
    with durable.disk_errors(path, "measuring what was moved aside"):
        below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        return sum(one.lstat().st_blocks * 512 for one in (path, *below))


def _agrees() -> bool:
    """Ask the user whether to remove everything listed, and return the answer.

    Raises:
        UsageError: there is no terminal to ask on.
    """
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to confirm on, so nothing was removed. Fix: samebits clean --yes")
    return input("samebits: remove all of this? [y/N] ").strip().lower() in ("y", "yes")
