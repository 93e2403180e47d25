"""Builds of the store that are broken on purpose, each in one promise that the crash points check."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from samebits.store import durable, journal, owner, step_log
from samebits.store.checkpoint import folder
from samebits.store.lock import HOLDER_FILE, DirectoryLock
from samebits.store.term_claim import TermClaim


@dataclass(frozen=True, slots=True)
class Mutant:
    """``broken`` replaces ``name`` of ``where``; the fault catches it in the scenario."""

    where: Any
    name: str
    broken: Any
    scenario: str
    fault: str


class _OsThatNeverSyncs:
    """The module ``os`` with an fsync that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        pass


def _unsynced(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args, **{**kwargs, "sync": False})


def _write_in_place(path: Path, data: bytes) -> None:
    with durable.disk_errors(path, "writing"):
        path.unlink(missing_ok=True)
        durable.write_file(path, data)


def _write_what_fits(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, data)


def _write_once(descriptor: int, data: bytes) -> None:
    os.write(descriptor, data)


def _make_directory_trustingly(directory: Path, *, sync: bool = True) -> None:
    with durable.disk_errors(directory, "creating the directory"):
        missing = list(itertools.takewhile(lambda path: not path.exists(), (directory, *directory.parents)))
        for path in reversed(missing):
            path.mkdir()
            durable.fsync_dir(path.parent)


def _release_after_the_note(lock: DirectoryLock) -> None:
    with durable.disk_errors(lock.directory / HOLDER_FILE, "removing the lock's note"):
        (lock.directory / HOLDER_FILE).unlink(missing_ok=True)
    lock._lock.release()


_create = TermClaim._create


def _remove_then_create(claim: TermClaim, note: bytes) -> None:
    for path in claim._directory.glob("term.*"):
        path.unlink()
    _create(claim, note)


@contextmanager
def _remove_and_complain(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _bare_errors(path: Path, doing: str, kind: type = OSError) -> Iterator[None]:
    yield


MUTANTS = {
    "reports an append that is not synced": Mutant(
        journal, "os", _OsThatNeverSyncs(), "journal appended", "killed after"
    ),
    "takes a step that is not synced": Mutant(step_log, "os", _OsThatNeverSyncs(), "steps logged", "killed after"),
    "never syncs a folder": Mutant(durable, "fsync_dir", lambda directory: None, "claim", "killed after"),
    "renames before the bytes are synced": Mutant(
        durable, "write_temporary", _unsynced(durable.write_temporary), "file replaced", "killed after"
    ),
    "saves a point whose manifest is not synced": Mutant(
        durable, "write_file", _unsynced(durable.write_file), "points saved", "killed after"
    ),
    "takes the old claim away before it has its own": Mutant(
        TermClaim, "_create", _remove_then_create, "journal under a claim", "killed before"
    ),
    "writes in place": Mutant(durable, "write_file_atomically", _write_in_place, "file replaced", "killed within"),
    "writes in place, and the disk is full": Mutant(
        durable, "write_file_atomically", _write_in_place, "start kept", "ENOSPC"
    ),
    "passes over a failed write": Mutant(durable, "write_all", _write_what_fits, "journal appended", "ENOSPC"),
    "takes a short write for a whole one": Mutant(
        durable, "write_all", _write_once, "journal appended", "short writes"
    ),
    "cuts a torn end that it has not kept": Mutant(
        journal, "_keep_aside", lambda path, tail: path, "journal with a torn end", "killed after"
    ),
    "takes a folder that is there for a durable one": Mutant(
        durable, "make_directory", _make_directory_trustingly, "journal created", "killed before"
    ),
    "takes a claim that is there for a durable one": Mutant(
        owner, "make_claim_durable", lambda directory: None, "claim", "killed before"
    ),
    "keeps the lock when its note cannot be removed": Mutant(
        DirectoryLock, "release", _release_after_the_note, "lock", "EIO"
    ),
    "deletes a damaged point": Mutant(folder, "move_damaged_aside", shutil.rmtree, "point saved again", "killed after"),
    "tells the last failure, not the first": Mutant(
        durable, "removed_on_failure", _remove_and_complain, "file replaced", "remounted"
    ),
    "has no fix": Mutant(durable, "_FIXES", {}, "journal compacted", "ENOSPC"),
    "lets the bare error through": Mutant(durable, "disk_errors", _bare_errors, "claim", "EIO"),
}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Run the block with the mutant in place, or unchanged without one."""
    if name is None:
        yield
        return
    mutant = MUTANTS[name]
    with patch.object(mutant.where, mutant.name, mutant.broken):
        yield
