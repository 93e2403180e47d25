"""Read the job's journal as records, or write a new one for a job that lost its journal.

A new journal is one atomic group of records and never replaces an existing journal. The caller has found and verified
the restore point in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from samebits.config import Settings, etcd_access, fixed_settings
from samebits.core import records
from samebits.core.membership.rebuild import from_points
from samebits.core.point import Point
from samebits.core.records import Record
from samebits.core.state import JobState
from samebits.errors import JournalDamagedError, LockedError, ProtocolError, StoreError
from samebits.service import clock
from samebits.spelling import spelled
from samebits.store import journal_format
from samebits.store.etcd.etcd_journal import EtcdClaim, remove_job
from samebits.store.etcd.gateway import COMMAND_PATIENCE_S, EtcdGateway
from samebits.store.etcd.serving import serving
from samebits.store.journal import JOURNAL_FILE, Journal, read_journal, refresh_copies
from samebits.store.lock import DirectoryLock, LockHolder
from samebits.store.term_claim import TermClaim
from samebits.store.text_log import refresh_copy

LOOK_PATIENCE_S = 1.0
"""Seconds for a command that only reports whether the etcd answers."""


def gateway_of(
    settings: Settings, on_wait: Callable[[str], object], patience_s: float = COMMAND_PATIENCE_S
) -> EtcdGateway | None:
    """Return a client of the etcd cluster that holds the job's journal.

    Args:
        settings: the job's settings.
        on_wait: called with a sentence while etcd does not answer.
        patience_s: how long etcd may take to answer.

    Returns:
        None if the journal is in a folder, or the job has no journal.

    Raises:
        SettingsError: the files for TLS cannot be used.
    """
    place = settings.journal_place
    if place is None or not settings.enable_recovery:
        return None
    return EtcdGateway(place, etcd_access(), on_wait, patience_s)


def refresh(settings: Settings, on_wait: Callable[[str], object]) -> None:
    """Update RECOVERY_PATH's copy of a journal in etcd, unless a scheduler here is writing it.

    Args:
        settings: the job's settings, with absolute folders.
        on_wait: called with a sentence while etcd does not answer.

    Raises:
        JournalDamagedError: the data in etcd is not a journal.
        StoreError: etcd or the disk reports an error.
    """
    gateway = gateway_of(settings, on_wait)
    if gateway is None:
        return
    lock = DirectoryLock(settings.recovery_path, "a reader")
    try:
        lock.acquire()
    except LockedError:
        return
    try:
        refresh_folder(settings.recovery_path, gateway)
    finally:
        lock.release()
        gateway.close()


def outage(settings: Settings) -> str:
    """Return a sentence if the job's journal is in etcd and etcd does not answer now, otherwise ""."""
    gateway = gateway_of(settings, lambda _: None, LOOK_PATIENCE_S)
    if gateway is None:
        return ""
    with contextlib.closing(gateway):
        try:
            serving(gateway)
        except StoreError as error:
            return str(error)
    return ""


def served_by(settings: Settings, on_wait: Callable[[str], object]) -> str:
    """Describe the live scheduler of a job whose journal is in etcd, or return "" if there is none.

    Raises:
        StoreError: etcd does not answer, or refuses the request.
    """
    gateway = gateway_of(settings, on_wait)
    if gateway is None:
        return ""
    with contextlib.closing(gateway):
        found = serving(gateway)
    return "" if found.is_gone else str(found.holder)


def refresh_folder(recovery_path: Path, gateway: EtcdGateway) -> None:
    """Copy the journals and events in etcd to the folder; the caller holds the folder's lock.

    Raises:
        JournalDamagedError: the data in etcd is not a journal.
        StoreError: etcd or the disk reports an error.
    """
    refresh_copies(recovery_path, gateway)
    refresh_copy(recovery_path, gateway)


def clear(settings: Settings, role: str, on_wait: Callable[[str], object]) -> None:
    """Remove a job from etcd, after the folder with its copy was moved aside.

    If a scheduler of that job is still alive, it is superseded first, so that it writes nothing more.

    Raises:
        StoreError: etcd does not answer, or refuses the request.
    """
    gateway = gateway_of(settings, on_wait)
    if gateway is not None:
        remove_job(EtcdClaim.take(gateway, LockHolder.this_process(role).note()))
        gateway.close()


def history_of(recovery_path: Path, payloads: Sequence[bytes]) -> list[Record]:
    """Decode the journal's records, in the order in which they were written.

    Raises:
        JournalDamagedError: this version does not recognize a record.
    """
    unpack = records.SCHEMA.unpack
    try:
        return [unpack(payload, journal_format.MAX_BODY_BYTES) for payload in payloads]
    except ProtocolError as error:
        raise JournalDamagedError(
            f"{recovery_path / JOURNAL_FILE}: this version does not recognize a record ({error}): run the version "
            f"that wrote it, or `{spelled('run', '--fresh')}` moves the folder aside and starts a new job"
        ) from None


def written_term(recovery_path: Path) -> int:
    """Return the last term in the folder's journal; 0 if there is none.

    Raises:
        JournalDamagedError: the journal cannot be read.
    """
    return _state_in(recovery_path).term


def has_finished(recovery_path: Path) -> bool:
    """Return whether the job in the folder's journal is finished. Raises the same errors as :func:`written_term`."""
    return _state_in(recovery_path).finished


def _state_in(recovery_path: Path) -> JobState:
    found = read_journal(recovery_path)
    return JobState.replay(history_of(recovery_path, [] if found is None else found.payloads))


def begin_from(settings: Settings, job: str, point: Point, top: int) -> None:
    """Write a new journal of ``job``, for a scheduler that continues from ``point``.

    Args:
        settings: the job's settings.
        job: the job's id, as stated in its points.
        point: the restore point, which every rank holds and which was verified.
        top: the highest generation of any point found.

    Raises:
        LockedError: a scheduler is writing there.
        StoreError: a journal exists, or the disk reports an error.
    """
    path = settings.recovery_path
    with DirectoryLock(path, "samebits recover"):
        gateway = gateway_of(settings, lambda _: None)
        journal, payloads = Journal.open(path, TermClaim.take(path, "samebits recover", gateway=gateway))
        with journal:
            if payloads:
                raise StoreError(f"{path}: a journal exists. Fix: run `samebits recover` without --from-checkpoints")
            begun = from_points(
                job, settings.job_name, fixed_settings(settings), clock.boot_id(), clock.now_s(), point, top
            )
            journal.append([records.SCHEMA.pack(record) for record in begun])
