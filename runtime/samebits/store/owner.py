"""The marker that says which job a folder belongs to, so that no job ever reads or writes another one's.

A journal, checkpoint or log folder carries one small file, ``owner.json``, written once. Whether the job is running or
finished is not said here (that is the journal's and the lock's business). The one idea: claiming is creating the file
exclusively, so of two jobs that want an empty folder at the same moment exactly one gets it. An empty file is what a
machine leaves that went off before a claim was durable: nobody's, because nothing is saved before that.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from samebits import strict_json
from samebits.core.membership.replacements import TOKEN_BYTES
from samebits.errors import ForeignFolderError, StoreError
from samebits.spelling import spelled
from samebits.store import durable, private

OWNER_FILE = "owner.json"

MAX_OWNER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class FolderOwner:
    """The job a folder belongs to: its id, and its name for people."""

    job: str
    job_name: str

    def __str__(self) -> str:
        return f"job {self.job} ({self.job_name})"


def claim_folder(directory: Path, job: str, job_name: str, *, sync: bool = True) -> None:
    """Create the folder where it is missing and mark it as the job's; again by the same job changes nothing.

    Args:
        directory: of a journal, of one rank's checkpoints, of logs.
        job, job_name: whose it becomes.
        sync: False leaves it to :func:`make_claim_durable`, which must then come before anything is saved there.

    Raises:
        ForeignFolderError: it is another job's.
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
            f"{directory}: belongs to {owner or 'nobody'}, this is {claimant}; "
            f"`{spelled('run', '--fresh')}` moves that folder aside and starts anew, or choose another folder"
        )
    if sync and not made:
        make_claim_durable(directory)  # whoever made it may have been killed before it was


def make_claim_durable(directory: Path) -> None:
    """What :func:`claim_folder` did with ``sync=False`` outlives the machine's power: the folder, and whose it is."""
    with durable.disk_errors(directory / OWNER_FILE, "making the claim durable"):
        descriptor = durable.open_regular(directory / OWNER_FILE)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    durable.fsync_dir(directory)
    for folder in (directory, directory.parent):  # a rank's, and the job's
        durable.sync_entry(folder)


def read_owner(directory: Path) -> FolderOwner | None:
    """The job that claimed the folder; none where nobody did, or there is no such folder."""
    path = directory / OWNER_FILE
    with durable.disk_errors(path, "reading the folder's owner"):
        try:
            with os.fdopen(durable.open_regular(path), "rb") as file:
                data = file.read(MAX_OWNER_BYTES + 1)
        except FileNotFoundError:
            return None
    return owner_in(data, str(path), f"`{spelled('run', '--fresh')}` moves the folder aside")


def owner_in(data: bytes, where: str, fix: str) -> FolderOwner | None:
    """The job that these bytes name; none where there are none.

    Args:
        data: what the owner file holds.
        where: its place, for the error.
        fix: what to do where it is damaged.

    Raises:
        StoreError: they name nobody.
    """
    if not data:
        return None
    try:
        return decode_owner(data)
    except ValueError as error:
        raise StoreError(f"{where}: does not say whose folder this is: {error}; {fix}") from None


def encode_owner(owner: FolderOwner) -> bytes:
    """The marker's content."""
    return (json.dumps(asdict(owner)) + "\n").encode()


def decode_owner(data: bytes) -> FolderOwner:
    """The job that a marker's content names; :class:`ValueError` where it names none."""
    if len(data) > MAX_OWNER_BYTES:
        raise ValueError(f"more than {MAX_OWNER_BYTES} bytes")
    fields = strict_json.loads(data)
    if not isinstance(fields, dict) or not all(isinstance(fields.get(key), str) for key in ("job", "job_name")):
        raise ValueError("expected an object with the texts job and job_name")
    return FolderOwner(fields["job"], fields["job_name"])


TOKEN_FILE = "launcher.token"


def make_token(log_dir: Path) -> None:
    """A new token, of this user alone (0600), in place of any older one: before the job's scheduler begins.

    Raises:
        StoreError: it cannot be written there.
    """
    private.make_folder(log_dir)
    durable.write_file_atomically(log_dir / TOKEN_FILE, secrets.token_hex(TOKEN_BYTES).encode())


def read_token(log_dir: Path) -> bytes:
    """The token; empty where no launcher has left one.

    Raises:
        StoreError: the file is none of this user's own, or holds something else.
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
        raise StoreError(f"{path}: not a launcher's token. Fix: remove it; replacements then wait for their seats")
    return token
