"""Save, load, send and prune one rank's restore points.

The format and its verification are in ``store.checkpoint``, and the core chooses the point to resume from.
:class:`RankCheckpoints` is one rank's folder, locked by the process that writes there, and the points that this process
has verified. A point is the same in memory and on disk, and memory is searched first. :class:`AsyncSaves` has the
memory slots into which a state is copied, and the process that writes them to disk. If memory is missing or too small,
a warning is logged once and saves wait for the disk.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from samebits.core.point import Point
from samebits.core.values import replace
from samebits.errors import CheckpointError, ForeignFolderError, StoreError
from samebits.service import log
from samebits.service.copies.buddy import Brief, CopyListener
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import (
    FoundPoint,
    IncomingPoint,
    LoadedPoint,
    Location,
    MemoryRoom,
    PointHeader,
    Pruned,
    Pruning,
    Retention,
    SaveOutcome,
    StoredPoint,
    TensorPart,
    Tree,
    Writer,
)
from samebits.store.checkpoint.memory_buffer import available_bytes
from samebits.store.checkpoint.pruning import ALL
from samebits.store.durable import disk_errors
from samebits.store.lock import DirectoryLock, read_holder
from samebits.training.checkpoint.staging import Staging
from samebits.training.state import snapshot
from samebits.training.state.checkpoint_config import CheckpointConfig
from samebits.training.state.snapshot import NamedTensors

WRITER_WAIT_S = 60.0
"""Maximum wait of the first save for the writer of a predecessor that was killed while saving."""


class RankCheckpoints:
    """The checkpoint folder of one slot. Only the process that holds its lock writes there, from the first save on.

    Args:
        config: how often to save, and how many points to keep.
        root: the job's checkpoint folder, a path or a URL.
        local_state: where this host keeps the lock of a remote folder; a local folder holds its own lock.
        job, job_name: the owner of the folder; another job's folder is refused.
        slot, node: written into every manifest.
        committed: returns the newest point that every rank is known to hold.
        report: called with the held points, in rising order, whenever one is added.
        memory: the folder in memory for slots that outlive this process.
        listener: receives other ranks' points, to be kept for them; None: no copies are exchanged.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        root: Location,
        *,
        job: str,
        job_name: str,
        slot: int,
        node: str,
        committed: Callable[[], Point | None] = lambda: ALL,
        report: Callable[[Sequence[Point]], object] = lambda points: None,
        memory: Path = checkpoints.SHARED_MEMORY,
        local_state: Path | None = None,
        listener: CopyListener | None = None,
    ) -> None:
        self.config = config
        self.root = root
        self.slot = slot
        self._job = job
        self._job_name = job_name
        self._node = node
        self._committed = committed
        self._report = report
        self._is_remote = checkpoints.is_remote(root)
        folder = local_state if isinstance(root, str) else root
        assert folder is not None, "a lock needs a local folder"
        self._directory = checkpoints.rank_directory(folder, slot)
        self._verified: set[Point] = set()
        self._told: set[Point] = set()  # reported: others may rely on them
        self._has_counted = False  # whether an earlier process's points are in _told
        self._rejected: dict[Point, str] = {}
        self._saves = AsyncSaves(root, slot, job=job, job_name=job_name, memory=memory, listener=listener)
        self._in_memory: dict[Point, FoundPoint] = {}  # verified
        self._passed_over: set[str] = set()  # problems of points in memory that were logged
        self._fetched: tuple[Point, LoadedPoint] | None = None  # read from a remote folder for verification
        self._refused = 0  # failed saves in a row
        self.refused_by: StoreError | None = None  # why this process's last save failed, if it did
        self._stayed_before = False
        self._skipped_before = False
        self._claim_is_durable = False
        self._is_asked_to_keep = False
        self._place = checkpoints.open_point_store(root, slot, job=job, job_name=job_name)
        self._lock = DirectoryLock(self._directory, f"worker {node}")

    def held(self, oldest: Point | None = None) -> list[Point]:
        """Return the verified points, newest first. Each skipped point is logged with the reason.

        Args:
            oldest: if this point is held, older ones are not verified, since that means reading them.
        """
        self._look_into_memory()
        held = list(self._in_memory)
        for found in self._place.scan():
            if oldest is not None and oldest in held and found.point < oldest:
                break
            if found.point in self._rejected or found.point in self._in_memory:
                continue
            try:
                if found.point not in self._verified:
                    self._verify(found)
                    self._verified.add(found.point)
                held.append(found.point)
            except CheckpointError as error:
                self.reject(found.point, str(error))
        self._tell()
        return sorted(held, reverse=True)

    def _verify(self, found: StoredPoint) -> None:
        """Verify a point.

        The first remote point is kept in memory, because the next generation probably begins with it.
        """
        data_bytes = found.require_manifest().data_bytes
        if self._is_remote and self._fetched is None and _has_room_for(2 * data_bytes):
            self._fetched = found.point, self._place.read(found)
        else:
            self._place.verify(found)

    def _look_into_memory(self) -> None:
        self.flush()
        self._hear_of_pruning(wait=True)  # otherwise an offered point might be removed
        found, problems = self._saves.found()
        self._in_memory.clear()
        for problem in problems:
            self._pass_over(problem)
        for one in found:
            if one.point in self._rejected:
                continue
            try:
                checkpoints.verify(one)
            except CheckpointError as error:
                self._pass_over(str(error))
            else:
                self._in_memory[one.point] = one

    def _pass_over(self, problem: str) -> None:
        if problem not in self._passed_over:
            self._passed_over.add(problem)
            log.warn(f"ignored a restore point in memory: {problem}")

    def has_on_disk(self, point: Point) -> bool:
        """Wait for pending writes, then return whether the point is durable, without reading it back."""
        self.flush()
        return point in self._verified

    def saved_by(self, step: int) -> int:
        """Return the newest step up to this one that is known to be saved, or 0."""
        return max((one.step for one in self._verified | self._told if one.step <= step), default=0)

    def oldest_step(self) -> int:
        """Return the step of the oldest point that this rank may roll back to, or 0 if unknown.

        In an object store, points of an earlier process count as removed once this process has saved as many points as
        are kept, because its writer deletes the rest.
        """
        if not self._is_remote:
            return checkpoints.oldest_step_in(self._directory)
        known = self._verified | self._told
        return min(point.step for point in known) if len(known) >= self.config.keep_checkpoint_max else 0

    def reject(self, point: Point, reason: str) -> None:
        """Never offer this point again. It stays on disk."""
        self._verified.discard(point)
        self._told.discard(point)
        self._in_memory.pop(point, None)
        if self._fetched is not None and self._fetched[0] == point:
            self._fetched = None
        if point not in self._rejected:
            self._rejected[point] = reason
            log.warn(f"ignored the restore point of {point}: {reason}")

    @contextlib.contextmanager
    def rejecting(self, point: Point) -> Iterator[None]:
        """Context manager that rejects the point if it is found to be damaged in the ``with`` block."""
        try:
            yield
        except CheckpointError as error:
            self.reject(point, str(error))
            raise

    def header(self, point: Point, rank: int, world_size: int) -> PointHeader:
        """Return the header of a point of this rank, for saving or sending."""
        return PointHeader(self._job, point, world_size, rank, self.slot, self._node)

    def save(
        self,
        header: PointHeader,
        tensors: NamedTensors,
        tree: Tree,
        layout: Tree,
        *,
        durable: bool = False,
        wait_s: float = 0.0,
    ) -> bool:
        """Save a point, then delete old ones. If the disk fails, log a warning and return False; training continues.

        Args:
            header, tensors, tree, layout: the point.
            durable: return only when the point is on disk or could not be written. Otherwise it may be copied aside and
                written while training continues (``async_save``); :meth:`settle` and :meth:`flush` report the outcome.
            wait_s: how long to wait for a previous holder of the folder to exit; the wait is logged.

        Raises:
            CheckpointError: the state itself cannot be saved.
        """
        self.refused_by = None
        self.settle()
        if self._saves.is_busy:
            if not durable and (self._is_remote or self.config.when_busy == "skip"):
                self._say_skipped(header.point)
                return True
            self.flush()
        try:
            with disk_errors(self._directory, "saving"):  # for errors not reported elsewhere, such as EMFILE
                self._take_folder(wait_s)
                is_async = self.config.async_save and not durable
                descriptor, on_disk = self._lock.descriptor, self._verified.__contains__
                if is_async and self._saves.begin(header, tensors, tree, layout, descriptor, is_on_disk=on_disk):
                    return True
                self._hear_of_pruning(wait=True)  # only one process at a time may change a folder
                self._place.write(header, snapshot.parts_of(tensors), tree, layout)
        except (CheckpointError, ForeignFolderError):
            raise
        except StoreError as error:
            self.refused_by = error
            return self._failed(header.point, str(error))
        return self._became_durable(header.point, by_writer=False)

    def save_final(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree) -> bool:
        """Save the final state separately if the last commit's point is on disk with different contents.

        It is stored beside the points, since a point never changes. If a rank is lost before training finishes, all
        ranks return to the commit and repeat what follows it.

        Returns:
            False if the disk fails.
        """
        self.refused_by = None
        try:
            with disk_errors(self._directory, "saving the final state"):
                self._take_folder(0.0)
                self._save_beside(header, snapshot.parts_of(tensors), tree, layout)
        except (CheckpointError, ForeignFolderError):
            raise
        except StoreError as error:
            self.refused_by = error
            return self._failed(header.point, str(error))
        return True

    def link_final(self, header: PointHeader) -> bool:
        """Make the saved final state the point of its step if that step has no point.

        Returns:
            False if there is no such final state, or it cannot be linked; then nothing is changed.

        Raises:
            StoreError: the disk fails.
        """
        root = checkpoints.final_location(self.root)
        if not isinstance(root, Path) or not isinstance(self.root, Path):
            return False
        found = checkpoints.open_point_store(root, self.slot, job=self._job, job_name=self._job_name).find(header.point)
        if not isinstance(found, FoundPoint) or not found.is_usable:
            return False
        manifest = checkpoints.encode_manifest(found.require_manifest())
        return checkpoints.write_linked(self.root, header, manifest, found.data_file)

    def _save_beside(self, header: PointHeader, parts: Sequence[TensorPart], tree: Tree, layout: Tree) -> None:
        saved = self._place.find(header.point)
        like = saved.require_manifest() if saved is not None and saved.is_usable else None
        chunk_bytes = checkpoints.CHUNK_BYTES if like is None else like.chunk_bytes
        now = checkpoints.manifest_of(header, parts, tree, layout, chunk_bytes=chunk_bytes)
        manifest = checkpoints.encode_manifest(now)
        if like is not None and manifest == checkpoints.encode_manifest(like):
            return
        root = checkpoints.final_location(self.root)
        place = checkpoints.open_point_store(root, self.slot, job=self._job, job_name=self._job_name)
        place.claim()
        has_its_tensors = like is not None and now.chunks == like.chunks
        if not (
            has_its_tensors
            and isinstance(root, Path)
            and isinstance(saved, FoundPoint)
            and checkpoints.write_linked(root, header, manifest, saved.data_file)
        ):
            place.write(header, parts, tree, layout)

    def prepare(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree) -> None:
        """Reserve memory in the background for saves of points like this one."""
        if self.config.async_save:
            with contextlib.suppress(StoreError), disk_errors(self._directory, "preparing"):  # the save reports it
                self._saves.prepare(header, tensors, tree, layout)

    def settle(self) -> None:
        """Process the result of the pending save if it is known. Cheap if no save is pending."""
        if self._saves.is_busy:
            self._hear(self._saves.outcome(wait=False))
        self._hear_of_pruning(wait=False)
        self._saves.hear_of_copies()
        if self._is_asked_to_keep:
            self._is_asked_to_keep = False
            # A predecessor's writer may still hold the folder; only the first save waits for it.
            with contextlib.suppress(StoreError), disk_errors(self._directory, "taking copies in"):
                self._take_folder(0.0, waits_for_writer=False)
                self._saves.take_in(self._lock.descriptor)

    def exchange_copies(self, brief: Brief | None) -> None:
        """Set which rank stores copies of this rank's points in this generation, and whose copies this rank stores."""
        self._fetched = None
        self._saves.exchange(brief)
        self._is_asked_to_keep = self._saves.is_awaited  # done later: the others wait for this generation to begin

    def flush(self) -> None:
        """Wait until the pending save is durable or has failed with a warning.

        Deletion of old points may finish later.
        """
        if self._saves.is_busy:
            self._hear(self._saves.outcome(wait=True))

    @property
    def has_buddy(self) -> bool:
        """Whether another rank keeps copies of this rank's points."""
        return self._saves.has_buddy

    def hand_over(self, point: Point) -> str:
        """Wait until the buddy has this point, which is durable; return a problem, or empty for success."""
        return self._saves.await_copy(point)

    def _hear(self, outcome: SaveOutcome | None) -> None:
        if outcome is not None:
            if outcome.problem is None:
                self._became_durable(outcome.point, by_writer=True)
            else:
                self._failed(outcome.point, outcome.problem)

    def _take_folder(self, wait_s: float, *, waits_for_writer: bool = True) -> None:
        """Lock the folder, and make its claim for this job durable before anything is saved there."""
        if not self._lock.is_held:
            holder = read_holder(self._directory)
            if waits_for_writer and holder is not None and holder.is_gone():
                wait_s = max(wait_s, WRITER_WAIT_S)  # if the folder is still locked, the holder's writer is running
            self._lock.acquire(wait_s, on_wait=log.warn)
            if not self._is_remote:  # the writer scans a remote folder: no step waits for a network
                self._count_on_what_is_there()
        if not self._claim_is_durable and not self._is_remote:  # the writer claims a remote folder
            self._place.claim()
            self._claim_is_durable = True

    def _count_on_what_is_there(self) -> None:
        """Count points of an earlier process as reported, because other ranks may already rely on them."""
        self._told.update(found.point for found in self._place.scan())
        self._has_counted = True

    def _became_durable(self, point: Point, *, by_writer: bool) -> bool:
        """Report the saved point, then delete old points on which no other rank relies."""
        self._verified.add(point)
        self._rejected.pop(point, None)
        self._let_go({one for one in self._verified | self._told if checkpoints.is_abandoned(one, point)})
        try:
            if not by_writer and not self._has_counted:
                self._count_on_what_is_there()
            self._saves.forget(
                lambda one: (
                    checkpoints.is_abandoned(one, point)
                    or (by_writer and not self._saves.keeps_two and one < point and one in self._verified)
                )
            )
            self._tell()
            pruning = Pruning(point, self._retention(), self._verified, self._rejected.keys())
            if by_writer:  # no step waits for a disk or a network
                self._saves.prune(pruning)
            else:
                self._take_in(self._place.prune(pruning))
        except StoreError as error:
            return self._failed(point, str(error))
        if self._refused:
            log.say(f"checkpoints are saved again, from step {point.step} on")
        self._refused = 0
        return True

    def _hear_of_pruning(self, *, wait: bool) -> None:
        for pruned in self._saves.pruned(wait=wait):
            self._take_in(pruned)
            if pruned.problem and not self._stayed_before:
                log.warn(f"old checkpoints stay for now: {pruned.problem}")
            self._stayed_before = bool(pruned.problem)

    def _take_in(self, pruned: Pruned) -> None:
        self._let_go(pruned.gone)
        for point, reason in pruned.damaged.items():
            self.reject(point, reason)

    def _let_go(self, gone: Collection[Point]) -> None:
        self._verified.difference_update(gone)
        self._told.difference_update(gone)

    def _failed(self, point: Point, problem: str) -> bool:
        """Warn about a failed save. In a row of failures, warn about the first, second, fourth and so on."""
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:
            again = f" ({self._refused} in a row; {self.newest_on_disk()})" if self._refused > 1 else ""
            log.warn(
                f"the checkpoint of step {point.step} was not saved{again}; training continues, and older "
                f"checkpoints are kept: {problem}"
            )
        return False

    def newest_on_disk(self) -> str:
        """Describe the newest point that is known to be on disk, for a message."""
        newest = max(self._verified | self._told, default=None)
        return "none is on disk yet" if newest is None else f"the newest on disk is of step {newest.step}"

    def _say_skipped(self, point: Point) -> None:
        if not self._skipped_before:
            fix = "raise save_checkpoint_steps" + ("" if self._is_remote else ', or set when_busy="wait"')
            log.warn(
                f"the checkpoint of step {point.step} is skipped because the previous one is still being written; "
                f"later skips are not logged. Fix: {fix}"
            )
        self._skipped_before = True

    def _retention(self) -> Retention:
        """Return which points must be kept now.

        Points of an abandoned line are kept until the new line has a durable point.
        """
        committed = self._committed()
        told = frozenset(one for one in self._told if committed is None or one > committed)
        return Retention(self.config.keep_checkpoint_max, committed, told)

    def _tell(self) -> None:
        """Report this rank's points, so that other ranks can rely on them."""
        points = self._verified | self._told
        self._told = checkpoints.tellable(points, self.config.keep_checkpoint_max, self._committed(), self._told)
        self._report(sorted(self._told & self._verified))

    def load(
        self,
        point: Point,
        targets: Mapping[str, TensorPart] | None = None,
        *,
        threads: int = 1,
        to_send: bool = False,
    ) -> LoadedPoint:
        """Read one of the held points and verify it.

        Args:
            point: the point to read.
            targets: as in ``checkpoints.read``: tensors to fill; after an error their contents are undefined.
            threads: number of threads to read with.
            to_send: the point is read to be sent: the caller does not modify it, and this rank may load it too.

        Raises:
            CheckpointError: the point is gone or damaged.
        """
        found = self._in_memory.get(point)
        if found is not None:
            try:
                loaded = checkpoints.read(found, targets, threads=threads)
            except CheckpointError as error:
                del self._in_memory[point]
                self._pass_over(str(error))
            else:
                log.say(f"the restore point of {point} comes from memory: {found.path}")
                return loaded
        if self._fetched is not None and self._fetched[0] == point:
            fetched = self._fetched[1]
            if not to_send:
                self._fetched = None
            return fetched
        saved = self._place.find(point)
        if saved is None:
            raise CheckpointError(f"{self._place}: the restore point of {point} is gone")
        return self._place.read(saved, targets, threads=threads)

    def receiving(self, preface: memoryview, targets: Mapping[str, TensorPart]) -> IncomingPoint:
        """Return a receiver for a point that another rank sends; ``targets`` are tensors to fill."""
        return IncomingPoint(preface, self._job, targets)

    def discard_memory(self) -> None:
        """Remove the points in memory when the job has finished."""
        self.flush()
        self._in_memory.clear()
        self._fetched = None
        self._saves.discard()

    def release(self) -> None:
        """Finish the pending save, and unlock the folder for another process."""
        self.flush()
        self._saves.close()
        self._lock.release()


def _has_room_for(size_bytes: int) -> bool:
    left = available_bytes()
    return left is None or left >= size_bytes


HAND_OVER_S = 20.0
"""Maximum wait of a leaving process until its buddy has its last commit."""
HASHED_SOON_S = 10.0
"""Maximum wait of a restarted process for the predecessor's writer to finish hashing."""
_POLL_S = 0.01  # polling interval, since a process cannot wait for a change in shared memory


class AsyncSaves:
    """Copies a rank's points to memory, from which a separate process writes them to disk.

    Args:
        root: the job's checkpoint folder.
        slot, job, job_name: the owner of the points.
        memory: the folder in memory; it differs from ``checkpoints.SHARED_MEMORY`` only in tests.
        listener: receives copies of other ranks' points; None: no copies are exchanged.
    """

    def __init__(
        self,
        root: Location,
        slot: int,
        *,
        job: str,
        job_name: str,
        memory: Path = checkpoints.SHARED_MEMORY,
        listener: CopyListener | None = None,
    ) -> None:
        self._listener = listener
        self._brief: Brief | None = None
        self._is_copying = False  # whether the running writer exchanges copies
        self._said_of_copies = False
        self._root, self._job, self._job_name, self._slot, self._memory = root, job, job_name, slot, memory
        self._room: MemoryRoom | None = None
        self._staging: Staging | None = None
        self._writer: Writer | None = None
        self._refused_bytes: int | None = None  # size for which there was not enough memory
        self._said = False

    @property
    def keeps_two(self) -> bool:
        """Whether two points stay in memory: a buddy's copy may be on its way while the next save is made."""
        return self._brief is not None

    @property
    def has_buddy(self) -> bool:
        """Whether another rank keeps copies of the points in memory."""
        return self._brief is not None and bool(self._brief.keeper)

    def await_copy(self, point: Point) -> str:
        """Wait until the buddy has a copy of this point; return a problem, or empty for success."""
        if self._writer is None or not self._is_copying:
            return "no copies are sent"
        return self._writer.await_copy(point, HAND_OVER_S)

    @property
    def is_busy(self) -> bool:
        """Whether a save is pending."""
        return self._writer is not None and self._writer.is_busy

    def prepare(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree) -> None:
        """Reserve memory for saves of points like this one, if there is enough."""
        with contextlib.suppress(CheckpointError, StoreError):  # the first save reports it
            self._opened_room()[1].prepare(header, tensors, tree, layout, slots=2 if self.keeps_two else 1)

    def begin(
        self,
        header: PointHeader,
        tensors: NamedTensors,
        tree: Tree,
        layout: Tree,
        lock_descriptor: int,
        *,
        is_on_disk: Callable[[Point], bool],
    ) -> bool:
        """Copy the point and pass it to the writer. If that is impossible, log one warning and return False.

        Args:
            header, tensors, tree, layout: the point.
            lock_descriptor: descriptor of the folder's lock; the writer keeps it locked while it writes.
            is_on_disk: returns whether a point is durable, so that its copy in memory may be overwritten.

        Raises:
            CheckpointError: the state itself cannot be saved.
        """
        needed_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        if self._refused_bytes is not None and needed_bytes >= self._refused_bytes:
            return False
        try:
            with disk_errors(self._memory, "copying aside"):
                staging, writer = self._opened(lock_descriptor)
                self._refused_bytes = needed_bytes
                if self.keeps_two:
                    name, sequence = staging.stage(header, tensors, tree, layout)
                else:
                    name, sequence = staging.stage(header, tensors, tree, layout, is_on_disk=is_on_disk)
                self._refused_bytes = None
                writer.submit(name, sequence, header.point)
        except CheckpointError:
            self._refused_bytes = None
            raise
        except checkpoints.BufferGoneError as error:
            self._refuse(str(error))
            self._refused_bytes = None  # memory is available: the next save opens the room again
            return False
        except StoreError as error:
            self._refuse(str(error))
            return False
        if self._said:
            log.say("checkpoints are copied aside again: training continues while they are written")
        self._said = False
        return True

    def _refuse(self, why: str) -> None:
        if self._refused_bytes is not None:
            self.discard()  # one slot without the other is useless, and its content is on disk
        if not self._said:
            log.warn(
                "training waits for the disk at every checkpoint, because the state cannot be copied to memory "
                f"first: {why} (CheckpointConfig(async_save=False) does so without a warning)"
            )
        self._said = True

    def _opened(self, lock_descriptor: int) -> tuple[Staging, Writer]:
        room, staging = self._opened_room()
        if self._writer is not None and self._brief is not None and not self._is_copying:
            self._writer.close()  # started while all ranks were on one host; no save is pending
            self._writer = None
        if self._writer is None:
            self._writer = self._new_writer(room, lock_descriptor)
        return staging, self._writer

    def _opened_room(self) -> tuple[MemoryRoom, Staging]:
        if self._room is None or self._staging is None:
            checkpoints.sweep(self._memory, self._job)
            self._room = MemoryRoom(self._memory, self._job, self._slot)
            self._staging = Staging(self._room)
        return self._room, self._staging

    def _new_writer(self, room: MemoryRoom, lock_descriptor: int) -> Writer:
        self._is_copying = self._listener is not None and self._brief is not None
        if self._listener is None or self._brief is None:
            return Writer(self._root, room, lock_descriptor, job_name=self._job_name)
        inherited = (self._listener.descriptor,)
        command = self._listener.command
        writer = Writer(
            self._root, room, lock_descriptor, job_name=self._job_name, command=command, inherited=inherited
        )
        writer.brief(self._brief.pack())
        return writer

    def exchange(self, brief: Brief | None) -> None:
        """Set which rank stores this rank's copies, and whose copies are stored here; None: no copies are exchanged."""
        if brief is None and self._brief is not None:
            brief = replace(self._brief, keeper="", who="", keeps=())
        self._brief = brief
        if self._writer is not None and self._is_copying and brief is not None:
            self._writer.brief(brief.pack())

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks send copies here that no writer process can receive yet."""
        return self._writer is None and self._brief is not None and bool(self._brief.keeps)

    def take_in(self, lock_descriptor: int) -> None:
        """Start receiving other ranks' copies before this rank's first save. See :meth:`begin`.

        Raises:
            StoreError: copies cannot be received; the first save reports this too.
        """
        self._opened(lock_descriptor)[1].start()

    def hear_of_copies(self) -> None:
        """Log once when copies to the buddy fail, and once when they work again."""
        if self._writer is None or not self._is_copying:
            return
        for problem in self._writer.copies():
            if problem and not self._said_of_copies:
                log.warn(
                    f"the newest checkpoint has no copy at this rank's buddy: {problem}; training continues, and "
                    "older copies are kept (CheckpointConfig(buddy_copies=False) turns copies off)"
                )
            elif not problem and self._said_of_copies:
                log.say("checkpoints are copied to this rank's buddy again")
            self._said_of_copies = bool(problem)

    def outcome(self, *, wait: bool) -> SaveOutcome | None:
        """Return the result of the pending save, or None if it is not known yet. With ``wait``, wait for it."""
        return None if self._writer is None else self._writer.outcome(wait=wait)

    def prune(self, pruning: Pruning) -> None:
        """Delete old points in the background, once the pending save is durable."""
        if self._writer is not None:
            self._writer.prune(pruning)

    def pruned(self, *, wait: bool) -> list[Pruned]:
        """Return which points were deleted since the last call. With ``wait``, wait for deletions in progress."""
        return [] if self._writer is None else self._writer.pruned(wait=wait)

    def found(self) -> tuple[list[FoundPoint], list[str]]:
        """Return the points in memory that can be used once verified, and texts about the other ones."""
        deadline_s = time.monotonic() + HASHED_SOON_S
        while self._room is None and checkpoints.is_being_hashed(self._memory, self._job, self._slot):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return checkpoints.points_in_memory(self._memory, self._job, self._slot)

    def forget(self, is_unwanted: Callable[[Point], bool]) -> None:
        """Empty the slots that hold an unwanted point, including an earlier process's. No save may be pending."""
        if self._room is not None:
            self._room.forget(is_unwanted)
        elif any(
            is_unwanted(found.point) for found in checkpoints.points_in_memory(self._memory, self._job, self._slot)[0]
        ):
            checkpoints.remove_room(self._memory, self._job, self._slot)

    def close(self) -> None:
        """Release slots and writer after the pending write. Points in memory remain."""
        if self._writer is not None:
            self._writer.close()
        if self._staging is not None:
            self._staging.close()
        if self._room is not None:
            self._room.close()
        self._writer = self._staging = self._room = None

    def discard(self) -> None:
        """Close, and free the memory, including an earlier process's."""
        self.close()
        checkpoints.remove_room(self._memory, self._job, self._slot)
