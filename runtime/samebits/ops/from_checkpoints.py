"""A job of which the journal and every process is gone: what its checkpoints can bring back.

Looking at the ranks' folders, verifying and marking them live here; the journal is ``new_journal``'s. The one idea:
a point counts only where every rank of its world holds it and every byte of it was compared, and where all folders say
the same job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samebits.config import Settings
from samebits.core.point import Point
from samebits.errors import CheckpointError, ForeignFolderError, StoreError
from samebits.service import new_journal
from samebits.store import checkpoint as checkpoints
from samebits.store import durable
from samebits.store.checkpoint import Entry
from samebits.store.owner import OWNER_FILE, FolderOwner, encode_owner, read_owner


@dataclass(frozen=True, slots=True)
class Candidate:
    """The newest point that every rank holds, as far as its manifests say.

    Attributes:
        job: whose it is.
        point, world_size: which one, and how many ranks hold it.
        top: the greatest generation of any point that was found.
        entries: that point, by rank.
        folders: of all ranks that saved anything.
    """

    job: str
    point: Point
    world_size: int
    top: int
    entries: tuple[Entry, ...]
    folders: tuple[Path, ...]


def find(settings: Settings) -> Candidate | None:
    """The newest point on disk that every rank holds; None where there is none.

    Raises:
        ForeignFolderError: several jobs have saved there.
        StoreError: a folder cannot be read, or the checkpoints are not on a disk.
    """
    path = settings.checkpoint_path
    if isinstance(path, str):
        return None
    entries = [entry for root in checkpoints.folders_with_points(path) for entry in checkpoints.survey(root)]
    return _newest(entries)


def verified(settings: Settings, say: Callable[[str], object]) -> Candidate | None:
    """As :func:`find`, but every byte of the point was compared; where one differs, the next point is taken."""
    path = settings.checkpoint_path
    if isinstance(path, str):
        raise StoreError(
            f"CHECKPOINT_PATH={path}: a job can be begun again from checkpoints on a disk only. Fix: copy that folder "
            "to a disk and export CHECKPOINT_PATH=<it>"
        )
    entries = [entry for root in checkpoints.folders_with_points(path) for entry in checkpoints.survey(root)]
    while (candidate := _newest(entries)) is not None:
        damaged = [entry for entry in candidate.entries if not _is_whole(entry, say)]
        if not damaged:
            return candidate
        entries = [entry for entry in entries if entry not in damaged]
    return None


def begin(settings: Settings, candidate: Candidate) -> None:
    """A new journal that goes on from there; folders whose marker was lost are marked again.

    Raises:
        StoreError: there is a journal, or the disk refuses.
    """
    owner = FolderOwner(candidate.job, settings.job_name)
    for folder in candidate.folders:
        if _owner_of(folder) is None:  # every manifest in it says the same job
            durable.write_file_atomically(folder / OWNER_FILE, encode_owner(owner))
    new_journal.begin_from(settings, candidate.job, candidate.point, candidate.top)


def _newest(entries: list[Entry]) -> Candidate | None:
    whole = [entry for entry in entries if entry.header is not None]
    folders = tuple(sorted({entry.path.parent for entry in entries}))
    jobs = {entry.header.job for entry in whole if entry.header is not None}
    jobs |= {owner for folder in folders if (owner := _owner_of(folder)) is not None}
    if len(jobs) > 1:
        raise ForeignFolderError(
            f"{folders[0].parent}: its folders belong to several jobs ({', '.join(sorted(jobs))}), and one of them "
            "cannot be told from the others. Fix: move those of the other jobs away"
        )
    best: tuple[Point, int, Path] | None = None
    for root in sorted({folder.parent for folder in folders}):
        newest = checkpoints.newest_common_point([entry for entry in whole if entry.path.parent.parent == root])
        if newest is not None and (best is None or newest > best[:2]):
            best = (*newest, root)
    if best is None:
        return None
    point, world_size, root = best
    held = tuple(
        entry
        for entry in whole
        if entry.header is not None
        and (entry.header.point, entry.header.world_size) == (point, world_size)
        and entry.path.parent.parent == root
    )
    top = max(entry.point.generation for entry in entries if entry.point is not None)
    return Candidate(jobs.pop(), point, world_size, top, held, folders)


def _is_whole(entry: Entry, say: Callable[[str], object]) -> bool:
    try:
        checkpoints.verify(checkpoints.point_in(entry.path))
    except CheckpointError as error:
        say(f"not used: {error}")
        return False
    return True


def _owner_of(folder: Path) -> str | None:
    """The job its marker names; None where it names none, or is damaged."""
    try:
        owner = read_owner(folder)
    except StoreError:
        return None
    return None if owner is None else owner.job
