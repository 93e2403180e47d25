"""This rank's restore points: which it holds, saving, loading, sending, and deleting old ones.

The format and its verification are ``store.checkpoint``'s; the core chooses the point to resume.
:class:`RankCheckpoints` is one rank's folder, locked by its live writer, and the points that this process has verified.
A point is the same in memory and on disk, and memory is asked first. :class:`AsyncSaves` is the memory slots that a
save passes through and the process that makes them durable. If memory is missing or too small, it says so once and the
save waits for the disk.
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
    Checkpoint,
    Found,
    FoundPoint,
    Incoming,
    Location,
    MemoryRoom,
    Outcome,
    PointHeader,
    Pruned,
    Pruning,
    Retention,
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
"""How long the first save waits for the writer of a predecessor that was killed while it was saving."""


class RankCheckpoints:
    """The folder of one slot's rank; only its lock's holder writes there, from its first save on.

    Args:
        config: how often and how many.
        root: the job's checkpoint folder, a path or a URL.
        local_state: where this host keeps the lock of a remote folder; a local one has it itself.
        job, job_name: whose folder it is; another job's is refused.
        slot, node: written into every manifest.
        committed: gives the newest point that every rank is known to hold.
        report: told which points are held, rising, whenever one more is.
        memory: the folder of the slots that outlive this process, in memory.
        listener: where other ranks' points come in, to be kept for them; None: no copies are exchanged.
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
        self._told: set[Point] = set()  # those that others may count on
        self._has_counted = False  # what an earlier process has left among them
        self._rejected: dict[Point, str] = {}
        self._saves = AsyncSaves(root, slot, job=job, job_name=job_name, memory=memory, listener=listener)
        self._in_memory: dict[Point, FoundPoint] = {}  # verified
        self._passed_over: set[str] = set()  # in memory
        self._fetched: tuple[Point, Checkpoint] | None = None  # from a remote folder, to be verified
        self._refused = 0  # saves in a row
        self.refused_by: StoreError | None = None  # of the last save in this process, if it was refused
        self._stayed_before = False
        self._skipped_before = False
        self._claim_is_durable = False
        self._is_asked_to_keep = False
        self._place = checkpoints.open_point_store(root, slot, job=job, job_name=job_name)
        self._lock = DirectoryLock(self._directory, f"worker {node}")

    def held(self, oldest: Point | None = None) -> list[Point]:
        """The points that were verified, in this process or just now; each one passed over is named with its reason.

        Args:
            oldest: where this one is whole, what is older is not looked at: it would all have to be read.
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

    def _verify(self, found: Found) -> None:
        """Read it. The first one that comes from afar is kept until a generation begins, most likely with it."""
        data_bytes = found.require_manifest().data_bytes
        if self._is_remote and self._fetched is None and _has_room_for(2 * data_bytes):
            self._fetched = found.point, self._place.read(found)
        else:
            self._place.verify(found)

    def _look_into_memory(self) -> None:
        self.flush()
        self._hear_of_pruning(wait=True)  # else what is offered might go
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
            log.warn(f"passed over a restore point in memory: {problem}")

    def has_on_disk(self, point: Point) -> bool:
        """Whether the point is durable, once what is being written is; nothing is read for that."""
        self.flush()
        return point in self._verified

    def saved_by(self, step: int) -> int:
        """The newest step, not after this one, that this process knows to be saved; 0 where it knows of none."""
        return max((one.step for one in self._verified | self._told if one.step <= step), default=0)

    def oldest_step(self) -> int:
        """No point that this rank may go back to is older; 0 where that is not known.

        In an object store a predecessor's points count as gone once this process has as many as are kept: its writer
        lets go what is more than that.
        """
        if not self._is_remote:
            return checkpoints.oldest_step_in(self._directory)
        known = self._verified | self._told
        return min(point.step for point in known) if len(known) >= self.config.keep_checkpoint_max else 0

    def reject(self, point: Point, reason: str) -> None:
        """Never offer this point again; it stays on disk."""
        self._verified.discard(point)
        self._told.discard(point)
        self._in_memory.pop(point, None)
        if self._fetched is not None and self._fetched[0] == point:
            self._fetched = None
        if point not in self._rejected:
            self._rejected[point] = reason
            log.warn(f"passed over the restore point of {point}: {reason}")

    @contextlib.contextmanager
    def rejecting(self, point: Point) -> Iterator[None]:
        """Inside the block the point is used: where it turns out not to be whole it is rejected."""
        try:
            yield
        except CheckpointError as error:
            self.reject(point, str(error))
            raise

    def header(self, point: Point, rank: int, world_size: int) -> PointHeader:
        """What a point of this rank, saved or sent, says of itself."""
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
        """Save, then let the oldest go. A disk that refuses is said once, and training goes on: False.

        Args:
            header, tensors, tree, layout: the point.
            durable: return once it is on disk, or could not be; else it may be copied aside, to be written while
                training goes on (``async_save``), and what becomes of it is heard in :meth:`settle` or :meth:`flush`.
            wait_s: how long to wait for a previous holder of the folder to end, saying for whom.

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
            with disk_errors(self._directory, "saving"):  # of what no other says: too many files are open, say
                self._take_folder(wait_s)
                is_async = self.config.async_save and not durable
                if is_async and self._saves.begin(header, tensors, tree, layout, self._lock.descriptor):
                    return True
                self._hear_of_pruning(wait=True)  # one process at a time changes a folder
                self._place.write(header, snapshot.parts_of(tensors), tree, layout)
        except (CheckpointError, ForeignFolderError):
            raise
        except StoreError as error:
            self.refused_by = error
            return self._failed(header.point, str(error))
        return self._became_durable(header.point, by_writer=False)

    def save_final(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree) -> bool:
        """Save the state with which training ends, if the last commit's point is on disk with other contents.

        It lies beside the points, because a point never changes: if a rank is lost before training is finished, all
        ranks go back to the commit and do alike what follows it.

        Returns:
            False if the disk refuses.
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
        """Points such as this one will be saved; that they can be copied aside is seen to, beside the training."""
        if self.config.async_save:
            with contextlib.suppress(StoreError), disk_errors(self._directory, "preparing"):  # the first save says so
                self._saves.prepare(header, tensors, tree, layout)

    def settle(self) -> None:
        """Hear what became of the save in hand, if that is known by now; costs nothing where there is none."""
        if self._saves.is_busy:
            self._hear(self._saves.outcome(wait=False))
        self._hear_of_pruning(wait=False)
        self._saves.hear_of_copies()
        if self._is_asked_to_keep:
            self._is_asked_to_keep = False
            # A predecessor's writer may still be there, and the first save waits for it.
            with contextlib.suppress(StoreError), disk_errors(self._directory, "taking copies in"):
                self._take_folder(0.0, waits_for_writer=False)
                self._saves.take_in(self._lock.descriptor)

    def exchange_copies(self, brief: Brief | None) -> None:
        """A generation begins: who keeps this rank's newest points too, and whose are kept here."""
        self._fetched = None
        self._saves.exchange(brief)
        self._is_asked_to_keep = self._saves.is_awaited  # not now: the others wait for this generation to begin

    def flush(self) -> None:
        """Wait until the save in hand is durable, or has failed and that was said; old points may go later."""
        if self._saves.is_busy:
            self._hear(self._saves.outcome(wait=True))

    def _hear(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            if outcome.problem is None:
                self._became_durable(outcome.point, by_writer=True)
            else:
                self._failed(outcome.point, outcome.problem)

    def _take_folder(self, wait_s: float, *, waits_for_writer: bool = True) -> None:
        """Hold the folder's lock, and have its claim durable before anything is saved in it."""
        if not self._lock.is_held:
            holder = read_holder(self._directory)
            if waits_for_writer and holder is not None and holder.is_gone():
                wait_s = max(wait_s, WRITER_WAIT_S)  # where it is locked nevertheless, its writer has it still
            self._lock.acquire(wait_s, on_wait=log.warn)
            if not self._is_remote:  # there its writer asks: no step waits for a network
                self._count_on_what_is_there()
        if not self._claim_is_durable and not self._is_remote:  # that one is claimed by whoever writes there
            self._place.claim()
            self._claim_is_durable = True

    def _count_on_what_is_there(self) -> None:
        """On what an earlier process has left others may count already; which point all hold is heard only later."""
        self._told.update(found.point for found in self._place.scan())
        self._has_counted = True

    def _became_durable(self, point: Point, *, by_writer: bool) -> bool:
        """Tell that it is held, and let go what that makes superfluous: what others count on by then stays."""
        self._verified.add(point)
        self._rejected.pop(point, None)
        self._let_go({one for one in self._verified | self._told if checkpoints.is_abandoned(one, point)})
        try:
            if not by_writer and not self._has_counted:
                self._count_on_what_is_there()
            self._saves.forget(lambda one: checkpoints.is_abandoned(one, point))
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
        """Report a refused save: the first in a row, the second, the fourth and so on."""
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:
            again = f" ({self._refused} in a row; {self.newest_on_disk()})" if self._refused > 1 else ""
            log.warn(
                f"the checkpoint of step {point.step} was not saved{again}; training goes on, and the older ones stay: "
                f"{problem}"
            )
        return False

    def newest_on_disk(self) -> str:
        """Say which step the newest point has that is known to be on disk."""
        newest = max(self._verified | self._told, default=None)
        return "none is on disk yet" if newest is None else f"the newest on disk is of step {newest.step}"

    def _say_skipped(self, point: Point) -> None:
        if not self._skipped_before:
            fix = "raise save_checkpoint_steps" + ("" if self._is_remote else ', or set when_busy="wait"')
            log.warn(
                f"the checkpoint of step {point.step} is left out, because the one before is still being written, and "
                f"so will others be without a word: {fix}"
            )
        self._skipped_before = True

    def _retention(self) -> Retention:
        """How long points stay, as things stand; of abandoned lines they go when the new line has a durable one."""
        committed = self._committed()
        told = frozenset(one for one in self._told if committed is None or one > committed)
        return Retention(self.config.keep_checkpoint_max, committed, told)

    def _tell(self) -> None:
        """Let the others count on what is held."""
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
    ) -> Checkpoint:
        """Read one of the held points, verified; :class:`CheckpointError` if it is no longer whole.

        Args:
            point: which.
            targets: as in ``checkpoints.read``: tensors that are to be filled; after an error they may hold anything.
            threads: how many share the reading.
            to_send: the caller changes nothing of it, and this rank may load it too.
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

    def receiving(self, preface: memoryview, targets: Mapping[str, TensorPart]) -> Incoming:
        """A point that another rank sends; ``targets`` are tensors that are to be filled."""
        return Incoming(preface, self._job, targets)

    def discard_memory(self) -> None:
        """The job has ended well: nobody will look for its points in memory."""
        self.flush()
        self._in_memory.clear()
        self._fetched = None
        self._saves.discard()

    def release(self) -> None:
        """Finish what is in hand, and let another process write here."""
        self.flush()
        self._saves.close()
        self._lock.release()


def _has_room_for(size_bytes: int) -> bool:
    left = available_bytes()
    return left is None or left >= size_bytes


HASHED_SOON_S = 10.0
"""How long a process that was started again waits for what its predecessor's writer is hashing."""
_POLL_S = 0.01  # nobody tells of a byte that changes in shared memory


class AsyncSaves:
    """The asynchronous half of a rank's checkpoints.

    Args:
        root: the job's checkpoint folder.
        slot, job, job_name: whose points.
        memory: the folder in memory; ``checkpoints.SHARED_MEMORY`` but in tests.
        listener: where copies of other ranks' points come in; None: none are exchanged.
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
        self._is_copying = False  # the writer that runs
        self._said_of_copies = False
        self._root, self._job, self._job_name, self._slot, self._memory = root, job, job_name, slot, memory
        self._room: MemoryRoom | None = None
        self._staging: Staging | None = None
        self._writer: Writer | None = None
        self._refused_bytes: int | None = None  # so much there was no memory for
        self._said = False

    @property
    def is_busy(self) -> bool:
        """Whether a save is in hand."""
        return self._writer is not None and self._writer.is_busy

    def prepare(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree) -> None:
        """Have memory for the first saves by the time they come, where there is any; such a point will be saved."""
        with contextlib.suppress(CheckpointError, StoreError):  # the first save says so
            self._opened_room()[1].prepare(header, tensors, tree, layout)

    def begin(
        self,
        header: PointHeader,
        tensors: NamedTensors,
        tree: Tree,
        layout: Tree,
        lock_descriptor: int,
    ) -> bool:
        """Copy the point and hand it to the writer; False, said once with the reason, where that is not possible.

        Args:
            header, tensors, tree, layout: the point.
            lock_descriptor: of the rank's folder; the writer keeps it locked as long as it writes.

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
                name, sequence = staging.stage(header, tensors, tree, layout)
                self._refused_bytes = None
                writer.submit(name, sequence, header.point)
        except CheckpointError:
            self._refused_bytes = None
            raise
        except checkpoints.BufferGoneError as error:
            self._refuse(str(error))
            self._refused_bytes = None  # there is memory: the next save opens the room anew
            return False
        except StoreError as error:
            self._refuse(str(error))
            return False
        if self._said:
            log.say("checkpoints are copied aside again: training goes on while they are written")
        self._said = False
        return True

    def _refuse(self, why: str) -> None:
        if self._refused_bytes is not None:
            self.discard()  # one slot of two is no use, and what is in it is on disk
        if not self._said:
            log.warn(
                f"training waits for the disk at every checkpoint, because it cannot be copied aside: {why} "
                "(CheckpointConfig(async_save=False) does so without a word)"
            )
        self._said = True

    def _opened(self, lock_descriptor: int) -> tuple[Staging, Writer]:
        room, staging = self._opened_room()
        if self._writer is not None and self._brief is not None and not self._is_copying:
            self._writer.close()  # the ranks were all on one host before; nothing is in hand here
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
        """A generation begins: who keeps this rank's copies, and whose come here; None where nobody's do."""
        if brief is None and self._brief is not None:
            brief = replace(self._brief, keeper="", who="", keeps=())
        self._brief = brief
        if self._writer is not None and self._is_copying and brief is not None:
            self._writer.brief(brief.pack())

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks send their copies here and nobody takes them in yet."""
        return self._writer is None and self._brief is not None and bool(self._brief.keeps)

    def take_in(self, lock_descriptor: int) -> None:
        """Take other ranks' copies in, though nothing of this rank's was saved yet; see :meth:`begin`.

        Raises:
            StoreError: that is not possible; the first save says so too.
        """
        self._opened(lock_descriptor)[1].start()

    def hear_of_copies(self) -> None:
        """Say it once when points are not copied to the buddy, and when they are again; costs nothing otherwise."""
        if self._writer is None or not self._is_copying:
            return
        for problem in self._writer.copies():
            if problem and not self._said_of_copies:
                log.warn(
                    f"the newest checkpoint has no copy at this rank's buddy: {problem}; training goes on, and older "
                    "copies stay (CheckpointConfig(buddy_copies=False) does without them)"
                )
            elif not problem and self._said_of_copies:
                log.say("checkpoints are copied to this rank's buddy again")
            self._said_of_copies = bool(problem)

    def outcome(self, *, wait: bool) -> Outcome | None:
        """The end of the save in hand, if it has one or ``wait`` says to wait for it."""
        return None if self._writer is None else self._writer.outcome(wait=wait)

    def prune(self, pruning: Pruning) -> None:
        """Have old points let go beside the training, now that the save that was in hand is durable."""
        if self._writer is not None:
            self._writer.prune(pruning)

    def pruned(self, *, wait: bool) -> list[Pruned]:
        """What went since this was asked last; ``wait`` for what is going. No save is in hand."""
        return [] if self._writer is None else self._writer.pruned(wait=wait)

    def found(self) -> tuple[list[FoundPoint], list[str]]:
        """The points in memory that can be used once verified, and why others cannot be."""
        deadline_s = time.monotonic() + HASHED_SOON_S
        while self._room is None and checkpoints.is_being_hashed(self._memory, self._job, self._slot):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return checkpoints.points_in_memory(self._memory, self._job, self._slot)

    def forget(self, is_unwanted: Callable[[Point], bool]) -> None:
        """Empty the slots that hold such a point, a predecessor's too; no save is in hand."""
        if self._room is not None:
            self._room.forget(is_unwanted)
        elif any(
            is_unwanted(found.point) for found in checkpoints.points_in_memory(self._memory, self._job, self._slot)[0]
        ):
            checkpoints.remove_room(self._memory, self._job, self._slot)

    def close(self) -> None:
        """Let go of slots and writer, once it has written what it has in hand; what is in memory stays."""
        if self._writer is not None:
            self._writer.close()
        if self._staging is not None:
            self._staging.close()
        if self._room is not None:
            self._room.close()
        self._writer = self._staging = self._room = None

    def discard(self) -> None:
        """As :meth:`close`, and give the memory back, also where a predecessor took it."""
        self.close()
        checkpoints.remove_room(self._memory, self._job, self._slot)
