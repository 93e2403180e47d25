"""The points of one rank in an object store, which has no rename, fsync or locks.

::

  <url>/<slot>/owner.json                                                     the job that the folder belongs to
  <url>/<slot>/step_0000000120_gen_000003.0001-5f3a….data.safetensors         one attempt to save the point: its data,
  <url>/<slot>/step_0000000120_gen_000003.0001-5f3a….manifest.msgpack         and, last, its manifest

The file formats are the local ones, byte for byte; the lock stays on the host. Both names of an attempt contain the
attempt's unique part. So a stale or partial upload is never combined with another attempt's manifest, and no complete
object is overwritten. A point exists if its manifest exists and its data has the right size.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from samebits.core.point import Point
from samebits.errors import CheckpointError, ForeignFolderError, StoreError
from samebits.store.checkpoint import pruning, reading
from samebits.store.checkpoint.folder import DATA_FILE, MANIFEST_FILE, parse_point_name, point_name
from samebits.store.checkpoint.object_store import PATIENCE_S, ObjectStore
from samebits.store.checkpoint.point_format import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    PointHeader,
    TensorPart,
    bytes_of,
    cut,
    decode_manifest,
    encode_header,
    encode_manifest,
    hash_of,
    in_file_order,
)
from samebits.store.checkpoint.pruning import Pruned, Pruning
from samebits.store.checkpoint.reading import LoadedPoint
from samebits.store.checkpoint.tree import Tree
from samebits.store.durable import BytesLike
from samebits.store.owner import MAX_OWNER_BYTES, OWNER_FILE, FolderOwner, decode_owner, encode_owner, owner_in

LEFTOVER_AGE_S = 24 * 3600.0
"""Minimum age, by the server's clock, at which the data of an unfinished upload is removed."""

LOOKED_AT = 16  # slots; a few are enough, since all slots of a checkpoint folder belong to one job

_BATCH_BYTES = 64 * 1024 * 1024

_log = logging.getLogger(__name__)


class RemotePointStore:
    """The points of one slot below a URL; a ``PointStore``.

    Args:
        url: the job's checkpoint folder.
        slot: the points' slot.
        job: id of their job.
        job_name: the job's display name.
        patience_s: how long temporary failures are retried.
        leftover_age_s: see ``LEFTOVER_AGE_S``.
    """

    def __init__(
        self,
        url: str,
        slot: int,
        *,
        job: str,
        job_name: str,
        patience_s: float = PATIENCE_S,
        leftover_age_s: float = LEFTOVER_AGE_S,
    ) -> None:
        self._store = ObjectStore(url, patience_s=patience_s)
        self._slot = slot
        self._owner = FolderOwner(job, job_name)
        self._session = secrets.token_hex(8)
        self._leftover_age_s = leftover_age_s
        self._is_claimed = False
        self._manifests: dict[str, Manifest] = {}  # by object name; no name is written twice
        self._whole: set[str] = set()  # data that this process wrote, or read and verified

    def __str__(self) -> str:
        return self._store.where(str(self._slot))

    def claim(self) -> None:
        """Claim the folder for this job unless it is claimed already.

        Raises:
            ForeignFolderError: the folder belongs to another job.
        """
        if self._is_claimed:
            return
        owner = self._read_owner()
        if owner is None:
            name, data = self._name(OWNER_FILE), encode_owner(self._owner)
            self._store.create(name, data)
            owner = self._read_owner()
            if owner is None:  # an empty object is no claim: some servers show a file before its content
                self._store.upload(name, [memoryview(data)])
                owner = self._read_owner()
                if owner is None:
                    lost = f"{self._store.where(name)}: the server accepted it but does not return it"
                    raise StoreError(
                        f"{lost}. Fix: check that CHECKPOINT_PATH and AWS_ENDPOINT_URL name an object store"
                    )
        self._require_own(owner)
        self._is_claimed = True  # permanently: the object is never written again

    def scan(self) -> list[RemotePoint]:
        """Return the points, newest first, each as its newest valid attempt.

        Unfinished uploads are left out.

        Raises:
            ForeignFolderError: the folder belongs to another job.
            StoreError: the store does not answer, or refuses the request.
        """
        sizes = self._sizes()
        if OWNER_FILE not in sizes:
            sizes = self._listed_again(sizes)
        if OWNER_FILE in sizes and not self._is_claimed:
            self._require_own(self._read_owner())
            self._is_claimed = True
        self._manifests = {name: manifest for name, manifest in self._manifests.items() if name in sizes}
        points: dict[Point, RemotePoint] = {}
        for attempt in sorted(attempts_in(sizes, MANIFEST_SUFFIX), reverse=True):
            known = points.get(attempt.point)
            if known is None or not known.is_usable:
                found = self._inspect(attempt, sizes)
                points[attempt.point] = found if known is None or found.is_usable else known
        return list(points.values())

    def _listed_again(self, sizes: dict[str, int]) -> dict[str, int]:
        """List the folder again if its marker is readable but missing from the listing.

        The marker is written before every point.

        Raises:
            StoreError: the second listing lacks it as well, so the server's listings are wrong.
        """
        name = self._name(OWNER_FILE)
        if self._store.read(name, 1) is None:
            return sizes
        sizes = self._sizes()  # an earlier process's writer may have just created it
        if OWNER_FILE not in sizes:
            raise StoreError(
                f"{self._store.where(name)} can be read, but the server lists no such object: its listings are wrong. "
                "Fix: check what the endpoint (for s3: AWS_ENDPOINT_URL) and any proxy return; saved data is intact"
            )
        return sizes

    def find(self, point: Point) -> RemotePoint | None:
        """Return this point as :meth:`scan` lists it, or None."""
        return next((found for found in self.scan() if found.point == point), None)

    def verify(self, found: RemotePoint) -> None:
        """Read all of the point's data and compare every hash.

        Raises:
            CheckpointError: names the object and the chunk.
        """
        manifest = found.require_manifest()
        name = self._name(found.attempt.data_name)
        for _ in self._chunks(name, manifest):
            pass
        reading.decode_tensor_header(
            lambda start, end: self._range(name, start, end), manifest, self._store.where(name)
        )
        self._whole.add(found.attempt.data_name)

    def read(
        self, found: RemotePoint, targets: Mapping[str, TensorPart] | None = None, *, threads: int = 1
    ) -> LoadedPoint:
        """Return the point's contents, verified while they are read.

        ``targets`` are not used: the network takes longer than a copy anyway.

        Raises:
            CheckpointError: names the object and the chunk.
        """
        manifest = found.require_manifest()
        buffer = reading.new_buffer(manifest.data_bytes)
        for start, chunk in self._chunks(self._name(found.attempt.data_name), manifest):
            buffer[start : start + len(chunk)] = chunk
        self._whole.add(found.attempt.data_name)
        return reading.checkpoint_of(manifest, buffer, self._store.where(self._name(found.attempt.data_name)))

    def write(
        self,
        header: PointHeader,
        tensors: Iterable[TensorPart],
        tree: Tree,
        layout: Tree,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Save one point: first its data, then its manifest.

        A point that is already saved and intact is not changed. The arguments are those of ``write_point``.

        Raises:
            CheckpointError: the state cannot be saved faithfully; the message names the value.
            ForeignFolderError: the folder belongs to another job.
            StoreError: the store refuses, or a newer generation already saves here. Earlier points are unaffected.
        """
        parts = in_file_order(tensors)
        views = [memoryview(encode_header(parts)), *map(bytes_of, parts)]
        chunks = tuple(map(hash_of, cut(views, chunk_bytes)))
        manifest = encode_manifest(Manifest(header, layout, tree, sum(map(len, views)), chunk_bytes, chunks))
        self.write_prepared(header, lambda: manifest, views)

    def write_prepared(
        self, header: PointHeader, manifest: Callable[[], BytesLike], data: Sequence[memoryview]
    ) -> None:
        """Save a point whose two files are already in memory, byte for byte.

        Otherwise the same as :meth:`write`.

        Args:
            header: identifies the point.
            manifest: returns the bytes of the manifest file with all digests; called once the data is uploaded.
            data: the data file, in pieces that must not change meanwhile.
        """
        data_bytes = sum(map(len, data))
        self.claim()
        sizes = self._sizes()
        if self._is_saved(header.point, sizes):
            return
        self._require_newest(header.point, sizes)
        numbers = [known.number for known in attempts_in(sizes) if known.point == header.point]
        number = max(numbers, default=0) + 1
        attempt = Attempt(header.point, number, f"{number:04d}-{self._session}")
        self._store.upload(self._name(attempt.data_name), data)
        sizes = self._sizes()
        arrived_bytes = sizes.get(attempt.data_name, 0)
        if arrived_bytes != data_bytes:
            raise StoreError(
                f"{self._store.where(self._name(attempt.data_name))}: {arrived_bytes} bytes arrived, {data_bytes} were "
                "sent, so the point does not count; the next save tries again"
            )
        self._require_newest(header.point, sizes)
        self._store.upload(self._name(attempt.manifest_name), [memoryview(manifest())])
        self._whole.add(attempt.data_name)
        self._sweep(attempt, sizes)

    def prune(self, asked: Pruning) -> Pruned:
        """Delete points that are not needed now that ``asked.newest`` is saved.

        Manifests are deleted first, then data. The policy is that of ``pruning.prune``, except that points to delete
        are not verified first, which would take too much network traffic.
        """
        fitting = [found for found in self.scan() if found.is_usable]
        abandoned = {found.point for found in fitting if pruning.is_abandoned(found.point, asked.newest)}
        own = {found.point for found in fitting if found.attempt.data_name in self._whole}
        check = pruning.Check(self.verify, own.union(asked.verified), asked.damaged)
        not_counted = pruning.damaged_among_newest(fitting, abandoned, check.is_whole)
        whole = [found.point for found in fitting if found.point not in not_counted]
        doomed = pruning.points_to_delete(whole, asked.retention, [asked.newest], abandoned)
        if doomed:
            attempts = [attempt for attempt in attempts_in(self._sizes()) if attempt.point in doomed]
            for attempt in attempts:
                self._store.remove(self._name(attempt.manifest_name))
            for attempt in attempts:
                self._store.remove(self._name(attempt.data_name))
        return Pruned([point for point in whole if point in doomed], check.found_damaged)

    # ---- ownership

    def _read_owner(self) -> FolderOwner | None:
        name = self._name(OWNER_FILE)
        data = self._store.read(name, MAX_OWNER_BYTES + 1)
        return owner_in(data or b"", self._store.where(name), "choose another CHECKPOINT_PATH")

    def _require_own(self, owner: FolderOwner | None) -> None:
        if owner is not None and owner.job == self._owner.job:
            return
        raise ForeignFolderError(
            f"{self} belongs to {owner or 'no job'}, but this is {self._owner}. Fix: choose another CHECKPOINT_PATH, "
            "or "
            "delete that folder if it is not needed"
        )

    def _require_newest(self, point: Point, names: Collection[str]) -> None:
        """Raise :class:`StoreError` if a newer generation already has a point among the names."""
        newest = max((one.point.generation for one in attempts_in(names, MANIFEST_SUFFIX)), default=0)
        if newest > point.generation:
            raise StoreError(
                f"{self}: generation {newest} already saves here, so this process of generation {point.generation} was "
                "replaced and saves nothing more. Fix: end it"
            )

    # ---- one attempt

    def _name(self, name: str) -> str:
        return f"{self._slot}/{name}"

    def _sizes(self) -> dict[str, int]:
        return self._store.sizes(str(self._slot))

    def _inspect(self, attempt: Attempt, sizes: dict[str, int]) -> RemotePoint:
        where = self._store.where(self._name(attempt.data_name))
        try:
            manifest = self._manifests.get(attempt.manifest_name)
            if manifest is None:
                manifest = self._read_manifest(attempt)
            found_bytes = sizes.get(attempt.data_name)
            if found_bytes is None:
                raise CheckpointError("is missing, though its manifest is there")
            if found_bytes != manifest.data_bytes:
                raise CheckpointError(f"has {found_bytes} bytes, {manifest.data_bytes} were saved")
        except CheckpointError as error:
            return RemotePoint(where, attempt, None, f"{where}: {error}")
        self._manifests[attempt.manifest_name] = manifest
        return RemotePoint(where, attempt, manifest, None)

    def _read_manifest(self, attempt: Attempt) -> Manifest:
        data = self._store.read(self._name(attempt.manifest_name), MAX_MANIFEST_BYTES + 1)
        if data is None:
            raise CheckpointError("its manifest was deleted while it was read")
        header = (manifest := decode_manifest(data)).header
        if header.job != self._owner.job:
            raise CheckpointError(f"was saved by job {header.job}, but this is job {self._owner.job}")
        if header.point != attempt.point:
            raise CheckpointError(f"its manifest is that of {header.point}")
        if header.slot != self._slot:
            raise CheckpointError(f"its manifest names slot {header.slot}, but it is in the folder {self._slot}")
        return manifest

    def _is_saved(self, point: Point, sizes: dict[str, int]) -> bool:
        for attempt in attempts_in(sizes, MANIFEST_SUFFIX):
            if attempt.point == point and (found := self._inspect(attempt, sizes)).is_usable:
                if attempt.data_name in self._whole:
                    return True
                try:
                    self.verify(found)
                except CheckpointError:
                    continue  # the damaged attempt stays, and a new one is made
                return True
        return False

    def _sweep(self, saved: Attempt, sizes: dict[str, int]) -> None:
        """Remove data of uploads that will never be finished.

        This only frees space, because names are never reused. It removes failed uploads of this process, and uploads of
        older generations that are a day old by the server's clock; their writers would be refused by now.
        """
        manifests = set(attempts_in(sizes, MANIFEST_SUFFIX))
        now_s = None
        for attempt in attempts_in(sizes, DATA_SUFFIX):
            if attempt in manifests or attempt == saved:
                continue
            name = self._name(attempt.data_name)
            try:
                if not attempt.unique.endswith(self._session):
                    if attempt.point.generation >= saved.point.generation:
                        continue
                    now_s = now_s or self._store.modified_at_s(self._name(saved.manifest_name))
                    written_s = self._store.modified_at_s(name)
                    if now_s is None or written_s is None or now_s - written_s < self._leftover_age_s:
                        continue
                self._store.remove(name)
            except StoreError as error:
                _log.warning("the data of an unfinished upload cannot be removed: %s", error)

    # ---- data

    def _chunks(self, name: str, manifest: Manifest) -> Iterator[tuple[int, bytes]]:
        """Yield every verified chunk with its offset; several are requested at once."""
        where, pending = self._store.where(name), list(reading.chunks_of(manifest))
        at_once = max(1, _BATCH_BYTES // manifest.chunk_bytes)
        while pending:
            batch, pending = pending[:at_once], pending[at_once:]
            for (index, start, _), chunk in zip(
                batch, self._ranges(name, [(start, end) for _, start, end in batch]), strict=True
            ):
                reading.require_digest(xxhash.xxh3_128_digest(chunk), len(chunk), where, manifest, index)
                yield start, chunk

    def _range(self, name: str, start: int, end: int) -> bytes:
        return self._ranges(name, [(start, end)])[0]

    def _ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Read the ranges, each with the length that was requested.

        Raises:
            CheckpointError: a range is shorter than requested.
        """
        found = self._store.read_ranges(name, ranges)
        for (start, end), data in zip(ranges, found, strict=True):
            if len(data) != end - start:
                raise CheckpointError(f"{self._store.where(name)} ends at byte {start + len(data)} while it is read")
        return found


def jobs_at(url: str) -> tuple[frozenset[str], int]:
    """Return the jobs that saved below a URL and the newest step, from the first ``LOOKED_AT`` slots."""
    store = ObjectStore(url)
    jobs, newest_step = set(), 0
    for slot in sorted((name for name in store.folders() if name.isdecimal()), key=int)[:LOOKED_AT]:
        data = store.read(f"{slot}/{OWNER_FILE}", MAX_OWNER_BYTES + 1)
        if data:
            try:
                jobs.add(decode_owner(data).job)
            except ValueError as error:
                where = store.where(f"{slot}/{OWNER_FILE}")
                raise StoreError(f"{where}: {error}; choose another CHECKPOINT_PATH") from None
        steps = [attempt.point.step for attempt in attempts_in(store.sizes(slot), MANIFEST_SUFFIX)]
        newest_step = max([newest_step, *steps])
    return frozenset(jobs), newest_step


def slots_at(url: str, *, patience_s: float = PATIENCE_S) -> list[int]:
    """Return the slots that have a folder below the URL, in order."""
    return sorted(int(name) for name in ObjectStore(url, patience_s=patience_s).folders() if name.isdecimal())


DATA_SUFFIX = f".{DATA_FILE}"
MANIFEST_SUFFIX = f".{MANIFEST_FILE}"

_ATTEMPT_NAME = re.compile(r"(step_\d+_gen_\d+)\.((\d{4,9})-[0-9a-f]{16})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One attempt to save a point; the names of both objects contain ``unique``.

    The greatest attempt is the newest.
    """

    point: Point
    number: int
    unique: str

    @property
    def data_name(self) -> str:
        """Return the name of the data object in the rank's folder."""
        return f"{point_name(self.point)}.{self.unique}{DATA_SUFFIX}"

    @property
    def manifest_name(self) -> str:
        """Return the name of the manifest object in the rank's folder."""
        return f"{point_name(self.point)}.{self.unique}{MANIFEST_SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> Attempt | None:
        """Return the attempt that an object belongs to; None for other objects."""
        match = _ATTEMPT_NAME.fullmatch(name.removesuffix(DATA_SUFFIX).removesuffix(MANIFEST_SUFFIX))
        point = None if match is None else parse_point_name(match[1])
        if match is None or point is None:
            return None
        attempt = cls(point, int(match[3]), match[2])
        return attempt if name in (attempt.data_name, attempt.manifest_name) else None


@dataclass(frozen=True, slots=True)
class RemotePoint:
    """A point in the store, represented by its newest valid attempt.

    If no attempt is valid, ``problem`` states why the point cannot be used.
    """

    where: str
    attempt: Attempt
    manifest: Manifest | None
    problem: str | None

    @property
    def point(self) -> Point:
        """Return the point's step and generation."""
        return self.attempt.point

    @property
    def is_usable(self) -> bool:
        """Return whether the manifest and the sizes are valid."""
        return self.manifest is not None

    def require_manifest(self) -> Manifest:
        """Return the manifest, or raise :class:`CheckpointError` with the problem."""
        if self.manifest is None:
            raise CheckpointError(self.problem or f"{self.where} cannot be used")
        return self.manifest


def attempts_in(names: Iterable[str], suffix: str = "") -> list[Attempt]:
    """Return the attempts to which objects with this suffix belong, without duplicates."""
    found = (Attempt.parse(name) for name in names if name.endswith(suffix))
    return list(dict.fromkeys(attempt for attempt in found if attempt is not None))
