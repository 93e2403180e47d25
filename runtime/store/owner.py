"""The marker that says which job a folder belongs to, so that no job ever reads or writes another one's.

A journal, checkpoint or log folder carries one small file, ``owner.json``, written once. Whether the job is running or
finished is not said here (that is the journal's and the lock's business). The one idea: claiming is creating the file
exclusively, so of two jobs that want an empty folder at the same moment exactly one gets it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.errors import ForeignFolderError, StoreError
from runtime.store import durable

OWNER_FILE = "owner.json"

_MAX_OWNER_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class FolderOwner:
    """The job a folder belongs to: its id, and its name for people."""

    job: str
    job_name: str

    def __str__(self) -> str:
        return f"job {self.job} ({self.job_name})"


def claim_folder(directory: Path, job: str, job_name: str) -> None:
    """Create the folder where it is missing and mark it as the job's; again by the same job changes nothing.

    Raises:
        ForeignFolderError: it is another job's.
    """
    durable.make_directory(directory)
    claimant = FolderOwner(job, job_name)
    if read_owner(directory) is None:
        durable.create_file_atomically(directory / OWNER_FILE, (json.dumps(asdict(claimant)) + "\n").encode())
    owner = read_owner(directory)
    if owner is None or owner.job != claimant.job:
        raise ForeignFolderError(
            f"{directory}: belongs to {owner or 'nobody'}, this is {claimant}; "
            "`bash scripts/run.sh --fresh` moves that folder aside and starts anew, or choose another folder"
        )


def read_owner(directory: Path) -> FolderOwner | None:
    """The job that claimed the folder; none where nobody did, or there is no such folder."""
    path = directory / OWNER_FILE
    with durable.disk_errors(path, "reading the folder's owner"):
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_OWNER_FILE_BYTES + 1)
        except FileNotFoundError:
            return None
    try:
        if len(data) > _MAX_OWNER_FILE_BYTES:
            raise ValueError(f"more than {_MAX_OWNER_FILE_BYTES} bytes")
        fields = json.loads(data)
        if not isinstance(fields, dict) or not all(isinstance(fields.get(key), str) for key in ("job", "job_name")):
            raise ValueError("expected an object with the texts job and job_name")
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{path}: does not say whose folder this is: {error}; `bash scripts/run.sh --fresh` moves the folder aside"
        ) from None
    return FolderOwner(fields["job"], fields["job_name"])
