"""``ModelCheckpoint`` and ``CheckpointRecovery``: a rank's points without ``runtime.elastic``, in the same format.

Here lives the use of the store's own reading and writing for a loop that calls them itself: whatever is read was
compared with its hashes, whatever is written is durable when it returns, nothing is pickled. What a job has saved can
be recovered here; a job's own folder is never written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runtime.core.point import Point
from runtime.errors import CheckpointError, UsageError
from runtime.service import log
from runtime.store.checkpoint import (
    FoundPoint,
    PointHeader,
    Pruning,
    Retention,
    open_point_store,
    rank_directory,
    read,
    scan,
    verify,
)
from runtime.store.lock import DirectoryLock

__all__ = ["CheckpointRecovery", "ModelCheckpoint"]

ALONE = "standalone"
"""The job's id in points that no job has saved."""


class ModelCheckpoint:
    """Saves a model every so many steps, and lets the oldest go.

    Args:
        directory: the folder; each rank has one of its own below it.
        save_checkpoint_steps: :meth:`step_end` saves at each multiple.
        keep_checkpoint_max: so many are kept, at least 2.
        rank, world_size: this process's place, where several save.
    """

    def __init__(
        self,
        directory: str | Path,
        save_checkpoint_steps: int = 1,
        keep_checkpoint_max: int = 5,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if save_checkpoint_steps < 1 or keep_checkpoint_max < 2:
            raise UsageError(
                f"ModelCheckpoint(save_checkpoint_steps={save_checkpoint_steps!r}, "
                f"keep_checkpoint_max={keep_checkpoint_max!r}): expected 1 or more and 2 or more"
            )
        self._root = Path(directory)
        self._every, self._keep = save_checkpoint_steps, keep_checkpoint_max
        self._rank, self._world_size = rank, world_size

    def step_end(self, step: int, model: Any, optimizer: Any = None, **values: Any) -> Path | None:
        """Save where one is due; the point's folder, or None. As :meth:`save`."""
        return self.save(step, model, optimizer, **values) if step % self._every == 0 else None

    def save(self, step: int, model: Any, optimizer: Any = None, **values: Any) -> Path:
        """Save now, durably; the point's folder.

        Args:
            step: completed steps.
            model, optimizer: what ``state_dict()`` gives of them.
            values: anything plain beside them, and tensors.

        Raises:
            CheckpointError: something cannot be saved faithfully; the message names it.
            ForeignFolderError: the folder is a job's.
            StoreError: the disk refuses; nothing is left of the attempt.
        """
        from runtime.training.state import snapshot

        state = {"model": model.state_dict(), **values}
        if optimizer is not None:
            state["optimizer"] = optimizer.state_dict()
        tree, tensors = snapshot.split({"shared": {"steps": step, "values": state}, "own": {}}, "state")
        header = PointHeader(ALONE, Point(step, 1), self._world_size, self._rank, self._rank, str(self._rank))
        directory = rank_directory(self._root, self._rank)
        place = open_point_store(self._root, self._rank, job=ALONE, job_name=ALONE)
        with DirectoryLock(directory, "ModelCheckpoint"):
            place.claim()
            place.write(header, tensors, tree, {})
            place.prune(Pruning(header.point, Retention(self._keep), verified=(header.point,)))
        found = place.find(header.point)
        assert found is not None, "it was just written"
        return Path(found.where)


class CheckpointRecovery:
    """Finds the newest point of a rank that is whole, a job's or one of :class:`ModelCheckpoint`, and loads it.

    Args:
        directory: CHECKPOINT_PATH, or the folder of a :class:`ModelCheckpoint`.
        rank: whose.
    """

    def __init__(self, directory: str | Path = "ckpt_of_rank", rank: int = 0) -> None:
        self._directory = rank_directory(Path(directory), rank)

    def find_latest_checkpoint(self) -> Path | None:
        """The folder of the newest point whose every byte is as its hashes say; None where there is none.

        A damaged one is named in a warning and passed over; nothing is changed.
        """
        found = next(self._whole(), None)
        return None if found is None else found.path

    def recover_from_failure(self, model: Any, optimizer: Any = None) -> int:
        """Load the newest point that is whole; its step, or 0 where there is none and nothing was changed.

        Args:
            model: a module, also inside DistributedDataParallel.
            optimizer: loaded too, where it is given.

        Raises:
            CheckpointError: the point is of another model or optimizer, or sharded; the message names the point.
        """
        found = next(self._whole(), None)
        if found is None:
            return 0
        from runtime.training.checkpoint.export import nested
        from runtime.training.state.handlers import ModuleHandler, OptimizerHandler

        values: Mapping[str, Any] = nested(read(found))
        try:
            ModuleHandler(model).load(values["model"])
            if optimizer is not None:
                OptimizerHandler(optimizer).load(values["optimizer"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{found.path}: it is not of this model and optimizer ({error}). Fix: build them as they were saved"
            ) from None
        return found.point.step

    def _whole(self) -> Iterator[FoundPoint]:
        for found in scan(self._directory, None):
            try:
                found.require_manifest()
                verify(found)
            except CheckpointError as error:
                log.warn(f"passed over: {error}")
                continue
            yield found
