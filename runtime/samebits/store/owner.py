"""Mark a folder as a job's, so that no other job reads or writes it.

Each journal, checkpoint or log folder has one small file, ``owner.json``, written once. A job claims a folder by
creating this file exclusively, so exactly one of two jobs that claim an empty folder at the same moment succeeds. If
the machine loses power before the claim is durable, an empty file may be left. Such a folder counts as unclaimed,
because nothing is saved in a folder before its claim is durable.

The marker does not show whether the job is running or finished; see the journal and the lock.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from samebits import strict_json
from samebits.core.membership.replacement_proofs import TOKEN_BYTES
from samebits.errors import ForeignFolderError, StoreError
from samebits.spelling import spelled
from samebits.store import durable, private

OWNER_FILE = "owner.json"

MAX_OWNER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class FolderOwner:
    """The job that a folder belongs to: its id and its display name."""

    job: str
    job_name: str

    def __str__(self) -> str:
        return f"job {self.job} ({self.job_name})"


def claim_folder(directory: Path, job: str, job_name: str, *, sync: bool = True) -> None:
    """Create the folder if missing, and mark it as the job's; idempotent for the same job.

    Args:
        directory: the folder of a journal, of one rank's checkpoints, or of logs.
        job: id of the job that claims the folder.
        job_name: the job's display name.
        sync: if false, call :func:`make_claim_durable` before anything is saved there.

    Raises:
        ForeignFolderError: the folder belongs to another job.
    """
    durable.make_directory(directory, sync=sync)
    claimant = FolderOwner(job, job_name)
    path, data = directory / OWNER_FILE, encode_owner(claimant)
    owner = read_owner(directory)
    made = owner is None and durable.create_file_atomically(path, data, sync=sync)
    if owner is None and not made and read_owner(directory) is None:
        durable.write_file_atomically(path, data)
    owner = read_owner(directory)
    if owner is None or owner.job != claimant.job:
        raise ForeignFolderError(
            f"{directory} belongs to {owner or 'no job'}, but this is {claimant}. Fix: "
            f"`{spelled('run', '--fresh')}` moves that folder aside and starts a new job, or choose another folder"
        )
    if sync and not made:
        make_claim_durable(directory)  # its creator may have been killed before syncing it


def make_claim_durable(directory: Path) -> None:
    """Sync the folder and the marker of a claim that was made with ``sync=False``."""
    with durable.disk_errors(directory / OWNER_FILE, "making the claim durable"):
        descriptor = durable.open_regular(directory / OWNER_FILE)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    durable.fsync_dir(directory)
    for folder in (directory, directory.parent):  # the rank's folder and the job's
        durable.sync_entry(folder)


def read_owner(directory: Path) -> FolderOwner | None:
    """Return the job that claimed the folder; None if it is unclaimed or does not exist."""
    path = directory / OWNER_FILE
    with durable.disk_errors(path, "reading the folder's owner"):
        try:
            with os.fdopen(durable.open_regular(path), "rb") as file:
                data = file.read(MAX_OWNER_BYTES + 1)
        except FileNotFoundError:
            return None
    return owner_in(data, str(path), f"`{spelled('run', '--fresh')}` moves the folder aside")


def owner_in(data: bytes, where: str, fix: str) -> FolderOwner | None:
    """Decode the content of an owner file; return the job, or None for an empty file.

    Args:
        data: the content of the owner file.
        where: the file's path or URL, for the error.
        fix: what to do if the file is damaged, for the error.

    Raises:
        StoreError: the content names no job.
    """
    if not data:
        return None
    try:
        return decode_owner(data)
    except ValueError as error:
        raise StoreError(f"{where} names no job as the folder's owner: {error}. Fix: {fix}") from None


def encode_owner(owner: FolderOwner) -> bytes:
    """Return the marker's content."""
    return (json.dumps(asdict(owner)) + "\n").encode()


def decode_owner(data: bytes) -> FolderOwner:
    """Decode a marker's content; raise :class:`ValueError` if it names no job."""
    if len(data) > MAX_OWNER_BYTES:
        raise ValueError(f"more than {MAX_OWNER_BYTES} bytes")
    fields = strict_json.loads(data)
    if not isinstance(fields, dict) or not all(isinstance(fields.get(key), str) for key in ("job", "job_name")):
        raise ValueError("expected an object with the texts job and job_name")
    return FolderOwner(fields["job"], fields["job_name"])


TOKEN_FILE = "launcher.token"


def make_token(log_dir: Path) -> None:
    """Replace the launcher's token with a new one (mode 0600), before the job's scheduler starts.

    Raises:
        StoreError: the token cannot be written.
    """
    private.make_folder(log_dir)
    durable.write_file_atomically(log_dir / TOKEN_FILE, secrets.token_hex(TOKEN_BYTES).encode())


def read_token(log_dir: Path) -> bytes:
    """Return the launcher's token; empty if there is none.

    Raises:
        StoreError: the file does not belong to this user, or does not contain a token.
    """
    path = log_dir / TOKEN_FILE
    private.check_folder(log_dir)
    text = private.read(path, 2 * TOKEN_BYTES + 1)
    if text is None:
        return b""
    try:
        token = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise StoreError(
            f"{path} does not hold a launcher's token. Fix: remove it; replacements then wait for their seats"
        )
    return token
