"""Copy every K-th commit of a sharded state to its host's shared memory, where it survives kill -9 of its process.

If no other rank holds a shard, the shard is lost with its process, and all ranks must return to the newest step for
which every shard still exists. Checkpoints every few steps would be too expensive, so each rank copies its commits
alternately into two slots. All ranks copy the same commits, and no rank can be two copies ahead of one that died, so
all slots have one commit in common. The process that replaces the dead one on its host reads the slots; the other ranks
return to their own copy.

A copy is sealed but not hashed, because memory that a killed process has sealed is complete. Its reader hashes it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import xxhash

from samebits.core.messages import KeptCommit
from samebits.core.point import Point
from samebits.core.reports import Part
from samebits.errors import CheckpointError, LockedError, StoreError
from samebits.printable import counted
from samebits.service import log
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import LoadedPoint, MemoryRoom, PointHeader, TensorPart, Tree
from samebits.store.checkpoint.memory_buffer import available_bytes
from samebits.store.checkpoint.memory_room import NAMES, RoomKind
from samebits.training import torch_private
from samebits.training.checkpoint.rollback_copies import SHARE_OF_AVAILABLE
from samebits.training.checkpoint.save_schedule import spoken
from samebits.training.checkpoint.staging import Staging
from samebits.training.state import snapshot
from samebits.training.state.checkpoint_config import AUTO
from samebits.training.state.compared import is_hashable, shard_parts
from samebits.training.state.snapshot import NamedTensors

SHARE = 0.01
"""Share of training time that copies may take with ``auto``."""
MOST_STEPS = 1000
DECIDED_AT = 7
"""The commit of a generation at which the ranks agree on the interval. The first steps and first copy are slow."""
_TOO_LITTLE = 0
"""A rank's answer, in place of an interval, if its copies do not fit into memory."""

Gather = Callable[[int], Sequence[int]]
"""A collective that returns every rank's number."""


class CopySchedule:
    """Decides which commits are copied. The result is the same on every rank.

    Args:
        every: commits between two copies; ``auto``: chosen so that copies take ``SHARE`` of the time; 0: no copies.
        gather: exchanges the ranks' measurements.
        clock: monotonic seconds.

    Attributes:
        interval: the current interval in steps; 0: nothing is copied.
        refused_by: the ranks whose copies do not fit into memory.
    """

    def __init__(self, every: int | str, gather: Gather, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._gather = gather
        self._clock = clock
        self.refused_by: tuple[int, ...] = ()
        self.begins(0)

    def begins(self, step: int) -> None:
        """Begin a generation at this step, which every rank has copied or can load."""
        self.interval = 1 if self._every == AUTO else int(self._every)
        self.refused_by = ()
        self._next = step + self.interval
        self._copied: int | None = None
        self._commits = 0
        self._steps_s: list[float] = []
        self._costs_s: list[float] = []
        self._step, self._at_s = step, self._clock()

    def is_at(self, step: int, *, fits: bool = True) -> bool:
        """Return whether to copy this commit. A collective at the ``DECIDED_AT``-th commit of a generation.

        Args:
            step: the commit's step; several commits of one step are all copied, or none.
            fits: whether this rank has memory for its copies.
        """
        if not self.interval:
            return False
        now_s = self._clock()
        if step > self._step:
            self._steps_s.append((now_s - self._at_s) / (step - self._step))
        self._step, self._at_s = step, now_s
        self._commits += 1
        if self._commits == DECIDED_AT:
            self._decide(fits)
        return bool(self.interval) and (step >= self._next or step == self._copied)

    def copied(self, step: int) -> None:
        """Record that the commit was copied. The time since :meth:`is_at` counts as the cost of the copy."""
        now_s = self._clock()
        if self._commits < DECIDED_AT:
            self._costs_s.append(now_s - self._at_s)
        self._copied, self._next, self._at_s = step, step + self.interval, now_s

    @property
    def is_decided(self) -> bool:
        """Whether the ranks have agreed on the interval of this generation."""
        return self._commits >= DECIDED_AT

    @property
    def text(self) -> str:
        """A sentence with the agreed interval, why it was chosen, and what it means."""
        cost = f": a copy takes {spoken(self._cost_s())} and a step {spoken(self._step_s())}" if self._costs_s else ""
        each = "every commit" if self.interval == 1 else f"every {self.interval}th commit"
        return (
            f"{each} is copied to shared memory{cost} (SHARD_COPY_EVERY={self._every}). A killed process costs at most "
            f"{counted(self.interval, 'step')}"
        )

    def _decide(self, fits: bool) -> None:
        mine = self.interval
        if self._every == AUTO and self._costs_s:
            mine = min(max(1, math.ceil(self._cost_s() / (SHARE * max(self._step_s(), 1e-9)))), MOST_STEPS)
        answers = self._gather(mine if fits else _TOO_LITTLE)
        self.refused_by = tuple(rank for rank, answer in enumerate(answers) if answer == _TOO_LITTLE)
        self.interval = 0 if self.refused_by else max(answers)
        if self._copied is not None:
            self._next = self._copied + self.interval

    def _cost_s(self) -> float:
        return statistics.median(self._costs_s[1:] or self._costs_s)

    def _step_s(self) -> float:
        return statistics.median(self._steps_s[1:] or self._steps_s or [0.0])


class ShardsAtRest:
    """Detects shards that change between a commit and the next step, when nothing may change them.

    If no other rank holds such a shard, only its own rank can detect a flipped bit, and only until an optimizer changes
    the shard.
    """

    def __init__(self) -> None:
        self._digests: dict[str, tuple[int, str]] = {}  # the version and the digest of each shard at the commit

    def committed(self, shards: Mapping[str, torch.Tensor]) -> list[Part]:
        """Store the digests of a commit's shards by name, and return them for the comparison with replicas.

        Tensors of subclasses of torch's are left out.
        """
        self._digests = {
            name: (torch_private.version_of(one), _digest_of(one)) for name, one in shards.items() if is_hashable(one)
        }
        return shard_parts({name: digest for name, (_, digest) in self._digests.items()})

    @property
    def is_due(self) -> bool:
        """Whether the shards must be checked before the next step."""
        return bool(self._digests)

    def changed(self, shards: Mapping[str, torch.Tensor]) -> str:
        """Return the name of the first shard whose bits have changed without an operator, or "".

        The digests are then dropped, because an optimizer step follows.
        """
        digests, self._digests = self._digests, {}
        for name, (version, digest) in digests.items():
            one = shards.get(name)
            if one is not None and version == torch_private.version_of(one) and digest != _digest_of(one):
                return name
        return ""


def _digest_of(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(snapshot.bytes_of(tensor))


class ShardCopies:
    """The newest commits of one rank in two slots of shared memory.

    Args:
        job: the job's id.
        memory: the folder in memory; other than ``checkpoints.SHARED_MEMORY`` only in tests.

    Attributes:
        is_off: True if this process has no usable memory for copies.
    """

    def __init__(self, job: str, *, memory: Path = checkpoints.SHARED_MEMORY) -> None:
        self._job, self._memory = job, memory
        self._slot: int | None = None
        self._room: MemoryRoom | None = None
        self._staging: Staging | None = None
        self._begun: Point | None = None
        self._rejected: set[Point] = set()
        self._locked_slot: int | None = None  # the last slot whose lock was logged
        self.is_off = False

    def begins(self, begun: Point) -> None:
        """Begin a generation at this step. Copies of later steps belong to an abandoned line."""
        self._begun = begun

    def offer(self, slot: int) -> tuple[KeptCommit, ...]:
        """Return the commits in this rank's slots, including an earlier process's.

        The result is empty if a live process writes there.
        """
        if not self._opens(slot):
            return ()
        found, problems = checkpoints.points_in_memory(self._memory, self._job, slot, kind=RoomKind.COMMITTED)
        for problem in problems:
            log.warn(f"ignored a copy of a commit: {problem}")
        kept = []
        for one in found:
            tree = one.require_manifest().tree
            commits = tree.get("commits") if isinstance(tree, dict) else None
            if type(commits) is int and commits >= 0 and one.point not in self._rejected:
                kept.append(KeptCommit(one.point, commits))
        return tuple(kept)

    def holds(self, point: Point, commits: int) -> bool:
        """Return whether the commit is in one of the slots."""
        return self._slot is not None and KeptCommit(point, commits) in self.offer(self._slot)

    def read(self, point: Point, targets: Mapping[str, TensorPart] | None = None, *, threads: int = 1) -> LoadedPoint:
        """Read a commit, as ``checkpoints.read`` does.

        Raises:
            CheckpointError: the copy is gone or damaged.
        """
        try:
            if self._room is None:
                raise CheckpointError(f"the copy of {point} in shared memory is gone")
            return checkpoints.read(self._room.hash(point), targets, threads=threads)
        except CheckpointError as error:
            self._rejected.add(point)
            log.warn(f"ignored a copy of a commit: {error}")
            raise

    def copy(
        self,
        slot: int,
        header: PointHeader,
        tensors: NamedTensors,
        tree: Tree,
        layout: Tree,
        *,
        ranks_here: int,
    ) -> bool:
        """Copy a commit in place of the least useful copy, and return whether it was copied.

        Args:
            slot: this rank's.
            header, tensors, tree, layout: the commit.
            ranks_here: how many ranks of this host need as much memory.

        Raises:
            CheckpointError: the state itself cannot be saved.
        """
        if self.is_off or not self._opens(slot):
            return False
        assert self._room is not None and self._staging is not None, "it is open"
        begun = self._begun or header.point
        try:
            if why := self._lacks(sum(tensor.nbytes for _, tensor in tensors), ranks_here):
                self._turn_off(why)
                return False
            self._rejected.discard(header.point)
            self._staging.stage(
                *(header, tensors, tree, layout),
                is_unwanted=lambda one: one == header.point or checkpoints.is_abandoned(one, begun),
            )
        except CheckpointError:
            raise
        except StoreError as error:
            self._turn_off(str(error))
            return False
        return True

    def _lacks(self, size_bytes: int, ranks_here: int) -> str:
        """Return why the copies would take too much of this host's memory, or "" if they fit."""
        assert self._room is not None, "it is open"
        missing_bytes = (len(NAMES) * size_bytes - self._room.size_bytes) * ranks_here
        left = available_bytes()
        if missing_bytes <= 0 or left is None or missing_bytes <= left * SHARE_OF_AVAILABLE:
            return ""
        return (
            f"{len(NAMES)} copies of {size_bytes / 2**20:.0f} MiB on {counted(ranks_here, 'rank')} of this host need "
            f"{missing_bytes / 2**20:.0f} MiB, and {left * SHARE_OF_AVAILABLE / 2**20:.0f} MiB is the share of the "
            f"available {left / 2**20:.0f} MiB that copies may take"
        )

    def _turn_off(self, why: str) -> None:
        self.is_off = True
        self.discard()
        log.warn(
            f"commits are not copied to shared memory: {why}. If a process is killed, all ranks return to a "
            "checkpoint. Fix: add memory, or run fewer ranks on this host; SHARD_COPY_EVERY=off turns off the copies "
            "and this warning"
        )

    def _opens(self, slot: int) -> bool:
        """Open the slot's room unless another live process uses it, and return whether it is open."""
        if self._slot == slot and self._room is not None:
            return True
        self.close()
        try:
            room = MemoryRoom(self._memory, self._job, slot, kind=RoomKind.COMMITTED)
        except LockedError as error:  # a process that was given up is still alive
            if slot != self._locked_slot:
                self._locked_slot = slot
                log.warn(f"the copies of commits of slot {slot} are not used: {error}")
            return False
        except StoreError as error:
            if not self.is_off:
                self.is_off = True
                log.warn(f"commits are not copied to shared memory: {error}")
            return False
        self._slot, self._room, self._staging = slot, room, Staging(room)
        return True

    def close(self) -> None:
        """Release the slots so that another process can use them. The commits remain."""
        if self._staging is not None:
            self._staging.close()
        if self._room is not None:
            self._room.close()
        self._room = self._staging = None

    def discard(self) -> None:
        """Free the memory."""
        self.close()
        if self._slot is not None:
            checkpoints.remove_room(self._memory, self._job, self._slot, kind=RoomKind.COMMITTED)
