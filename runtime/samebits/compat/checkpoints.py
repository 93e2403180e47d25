"""Save and load a rank's points without ``samebits.elastic``, in the job's format.

``ModelCheckpoint`` and ``CheckpointRecovery`` are for loops that save and load on their own. Every byte read is
verified with its hash, everything written is durable when the call returns, and nothing is pickled. Points that a job
has saved can be loaded here, but a job's own folder is never written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.core.point import Point
from samebits.errors import CheckpointError, UsageError
from samebits.service import log
from samebits.store.checkpoint import (
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
from samebits.store.lock import DirectoryLock

if TYPE_CHECKING:
    from samebits.training.state.checkpoint_config import CheckpointConfig

ALONE = "standalone"
"""The job's id in points that no job has saved."""


class ModelCheckpoint:
    """Save a model every few steps from your own loop, and remove the oldest checkpoints.

    In a job, use :class:`CheckpointConfig` instead, which saves in parallel with training.

    Args:
        directory: the folder in which each rank has its own folder.
        save_checkpoint_steps: number of steps between two checkpoints.
        keep_checkpoint_max: number of checkpoints to keep, at least 2.
        prefix: a folder in ``directory``, so that several models can share it.
        config: replaces the two numbers above. In a callback of :meth:`Model.train`, the entire config applies to the
            job, which saves in CHECKPOINT_PATH.
        rank, world_size: this process's rank and the number of processes that save.

    Raises:
        UsageError: a value is out of range, or ``prefix`` is not the name of one folder.

    Example::

        saver = samebits.ModelCheckpoint("saved", save_checkpoint_steps=10)
        folder = saver.step_end(10, model, optimizer)
        assert samebits.CheckpointRecovery("saved").recover_from_failure(model, optimizer) == 10
    """

    def __init__(
        self,
        directory: str | Path = "",
        save_checkpoint_steps: int = 1,
        keep_checkpoint_max: int = 5,
        *,
        prefix: str = "",
        config: CheckpointConfig | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if config is not None:
            if isinstance(config.save_checkpoint_steps, int):  # else the job decides, or it is a time
                save_checkpoint_steps = config.save_checkpoint_steps
            keep_checkpoint_max = config.keep_checkpoint_max
        if "/" in prefix or prefix in (".", ".."):
            raise UsageError(f"ModelCheckpoint(prefix={prefix!r}): expected the name of one folder")
        if save_checkpoint_steps < 1 or keep_checkpoint_max < 2:
            raise UsageError(
                f"ModelCheckpoint(save_checkpoint_steps={save_checkpoint_steps!r}, "
                f"keep_checkpoint_max={keep_checkpoint_max!r}): expected 1 or more and 2 or more"
            )
        self.config = config
        self._root = Path(directory) / prefix
        self._every, self._keep = save_checkpoint_steps, keep_checkpoint_max
        self._rank, self._world_size = rank, world_size

    def step_end(self, step: int, model: Any, optimizer: Any = None, **values: Any) -> Path | None:
        """Save if ``step`` is a multiple of ``save_checkpoint_steps``, and return the folder, or None.

        Arguments and errors are the same as for :meth:`save`.
        """
        return self.save(step, model, optimizer, **values) if step % self._every == 0 else None

    def save(self, step: int, model: Any, optimizer: Any = None, **values: Any) -> Path:
        """Save now, and return the checkpoint's folder once it is durable.

        Args:
            step: completed steps.
            model, optimizer: objects with ``state_dict()``.
            values: tensors and plain values to save with the model and the optimizer.

        Raises:
            CheckpointError: a value cannot be saved exactly; the message names it.
            ForeignFolderError: the folder belongs to a job.
            StoreError: the disk failed; nothing was left behind.
        """
        from samebits.training.state import snapshot

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
    """Load a rank's newest undamaged checkpoint, saved by a job, :class:`ModelCheckpoint` or this class.

    Args:
        checkpoint_dir: the folder of the checkpoints; CHECKPOINT_PATH for those of a job.
        rank: the rank whose checkpoints are used.

    Attributes:
        checkpoint_interval: 100; this class does not use it, but your loop may read it.
        current_step: the step that was saved last.
    """

    def __init__(self, checkpoint_dir: str | Path = "checkpoints", rank: int = 0) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.checkpoint_interval = 100
        self.current_step = 0
        self._rank = rank
        self._directory = rank_directory(Path(checkpoint_dir), rank)

    def save_checkpoint(self, model: Any, optimizer: Any, step: int) -> None:
        """Save durably, without removing older checkpoints. Raises like :meth:`ModelCheckpoint.save`."""
        keeps_all = ModelCheckpoint(
            self.checkpoint_dir, keep_checkpoint_max=sys.maxsize, rank=self._rank, world_size=self._rank + 1
        )
        keeps_all.save(step, model, optimizer)
        self.current_step = step

    def load_checkpoint(self, checkpoint_path: str | Path) -> dict[str, Any]:
        """Return a checkpoint's contents: a dict of ``model``, ``optimizer`` and ``step``.

        The first two are state dicts on the CPU; ``optimizer`` is None if no optimizer was saved.

        Raises:
            CheckpointError: there is no undamaged checkpoint in this folder.
        """
        from samebits.training.checkpoint.export import nested

        wanted = Path(checkpoint_path)
        for found in scan(wanted.parent, None):
            if found.path.name == wanted.name:
                found.require_manifest()
                verify(found)
                held = nested(read(found))
                return {"model": held.get("model"), "optimizer": held.get("optimizer"), "step": found.point.step}
        raise CheckpointError(
            f"{wanted}: no checkpoint is there. Fix: pass a path that find_latest_checkpoint() returns"
        )

    def find_latest_checkpoint(self) -> Path | None:
        """Return the folder of the newest undamaged checkpoint, or None if there is none.

        Damaged checkpoints are skipped with a warning. Nothing is changed.
        """
        found = next(self._whole(), None)
        return None if found is None else found.path

    def recover_from_failure(self, model: Any, optimizer: Any = None) -> int | None:
        """Load the newest undamaged checkpoint and return its step.

        Return None, and change nothing, if there is no checkpoint.

        Args:
            model: a module, with or without DistributedDataParallel.
            optimizer: an optimizer, also loaded if given.

        Raises:
            CheckpointError: the checkpoint belongs to a different model or optimizer, or is sharded; the message names
                it.
        """
        found = next(self._whole(), None)
        if found is None:
            return None
        from samebits.training.checkpoint.export import nested
        from samebits.training.state.handlers import ModuleHandler, OptimizerHandler

        values: Mapping[str, Any] = nested(read(found))
        try:
            ModuleHandler(model).load(values["model"])
            if optimizer is not None:
                OptimizerHandler(optimizer).load(values["optimizer"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{found.path} was not saved from this model and optimizer ({error}). Fix: build them as they were "
                "when it was saved"
            ) from None
        return found.point.step

    def _whole(self) -> Iterator[FoundPoint]:
        for found in scan(self._directory, None):
            try:
                found.require_manifest()
                verify(found)
            except CheckpointError as error:
                log.warn(f"skipped: {error}")
                continue
            yield found
