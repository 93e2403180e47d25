"""This rank's restore points: which it holds, saving, loading, giving to another rank, and letting old ones go.

The format and its verification are ``store.checkpoint``'s; which point is resumed is the core's choice. Here is one
rank's folder, locked by its live writer, and the memory of which points this process has already verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from runtime.core.point import Point
from runtime.errors import CheckpointError, StoreError
from runtime.service import voice
from runtime.store import checkpoint as store
from runtime.store.checkpoint import Checkpoint, FoundPoint, PointHeader, TensorPart, Tree
from runtime.store.lock import DirectoryLock
from runtime.store.owner import claim_folder, make_claim_durable
from runtime.training.checkpoint.config import CheckpointConfig


class RankCheckpoints:
    """The folder of one slot's rank; only its lock's holder writes there, from its first save on.

    Args:
        config: how often and how many.
        root: the job's checkpoint folder.
        job, job_name: whose folder it is; another job's is refused.
        slot, node: written into every manifest.
        committed: gives the newest point that every rank is known to hold.
        report: told which points are held, rising, whenever one more is.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        root: Path,
        *,
        job: str,
        job_name: str,
        slot: int,
        node: str,
        committed: Callable[[], Point | None],
        report: Callable[[Sequence[Point]], object],
    ) -> None:
        self.config = config
        self.root = root
        self.slot = slot
        self._job = job
        self._node = node
        self._committed = committed
        self._report = report
        self._directory = store.rank_directory(root, slot)
        self._verified: set[Point] = set()
        self._told: set[Point] = set()  # of them, those that others may count on
        self._rejected: dict[Point, str] = {}
        self._failed_before = False
        self._claim_is_durable = False
        claim_folder(self._directory, job, job_name, sync=False)  # nobody waits for a disk before there is state
        self._lock = DirectoryLock(self._directory, f"worker {node}")

    def held(self) -> list[Point]:
        """The points that were verified, in this process or just now; each one passed over is named with its reason."""
        held = []
        for found in store.scan(self._directory, self._job):
            if found.point in self._rejected:
                continue
            try:
                if found.point not in self._verified:
                    found.require_manifest()
                    store.verify(found)
                    self._verified.add(found.point)
                    self._told.add(found.point)
                held.append(found.point)
            except CheckpointError as error:
                self.reject(found.point, str(error))
        self._tell()
        return held

    def reject(self, point: Point, reason: str) -> None:
        """Never offer this point again; it stays on disk."""
        self._verified.discard(point)
        if point not in self._rejected:
            self._rejected[point] = reason
            voice.warn(f"passed over the restore point of {point}: {reason}")

    def header(self, point: Point, rank: int, world_size: int) -> PointHeader:
        """What a point of this rank, saved or sent, says of itself."""
        return PointHeader(self._job, point, world_size, rank, self.slot, self._node)

    def save(
        self, header: PointHeader, tensors: Iterable[TensorPart], tree: Tree, layout: Tree, *, wait_s: float = 0.0
    ) -> bool:
        """Save durably, then let the oldest go. A disk that refuses is said once, and training goes on: False.

        Args:
            wait_s: how long to wait for a previous holder of the folder to end, saying for whom.

        Raises:
            CheckpointError: the state itself cannot be saved.
        """
        point = header.point
        try:
            if not self._lock.is_held:
                self._lock.acquire(wait_s, on_wait=voice.warn)
            if not self._claim_is_durable:
                make_claim_durable(self._directory)
                self._claim_is_durable = True
            store.write_point(self.root, header, tensors, tree, layout)
            self._verified.add(point)
            self._rejected.pop(point, None)
            self._prune(point)
            self._tell()
        except CheckpointError:
            raise
        except StoreError as error:
            if not self._failed_before:
                voice.warn(f"the checkpoint of step {point.step} was not saved, the older ones stay: {error}")
            self._failed_before = True
            return False
        if self._failed_before:
            voice.say(f"checkpoints are saved again, from step {point.step} on")
        self._failed_before = False
        return True

    def _prune(self, newest: Point) -> None:
        """Points of abandoned lines go when the new line has a durable one, and that is ``newest``."""
        abandoned = {
            found.point
            for found in store.scan(self._directory, self._job)
            if found.point.generation < newest.generation and found.point.step > newest.step
        }
        gone = store.prune(
            self._directory,
            self._job,
            self.config.keep_checkpoint_max,
            keep_points=[newest],
            abandoned=abandoned,
            verified=self._verified,
            committed=self._committed(),
            told=self._told,
        )
        self._verified.difference_update(gone)

    def _tell(self) -> None:
        """Let the others count on what is held; what an earlier process has left they may do already."""
        self._told = store.tellable(self._verified, self.config.keep_checkpoint_max, self._committed(), self._told)
        self._report(sorted(self._told))

    def load(self, point: Point) -> Checkpoint:
        """Read one of the held points, verified; :class:`CheckpointError` where it is no longer whole."""
        return store.read(self._found(point))

    def pack(self, point: Point) -> memoryview:
        """One of the held points as bytes, for another rank."""
        return store.pack(self._found(point))

    def unpack(self, packed: bytes | bytearray | memoryview) -> Checkpoint:
        """A point that another rank packed, verified."""
        return store.unpack(packed, self._job)

    def _found(self, point: Point) -> FoundPoint:
        for found in store.scan(self._directory, self._job):
            if found.point == point:
                return found
        raise CheckpointError(f"{self._directory}: the restore point of {point} is gone")

    def release(self) -> None:
        """Let another process write here."""
        self._lock.release()
