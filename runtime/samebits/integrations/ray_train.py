"""The worker's side of ``samebits.ray``: run a training function whose restore points are its own reports.

The function is not changed: it creates its model and optimizer itself. The state of ``elastic.run`` therefore contains
only the number of reports, the newest checkpoint's name, and the random number generators. After a loss, every rank
calls the function again, and the function loads that checkpoint.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import itertools
import os
import pkgutil
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from samebits import strict_json
from samebits.core.messages import GenerationStarted
from samebits.errors import UsageError
from samebits.integrations.training_loader import loader_arguments
from samebits.store import durable
from samebits.store.progress_report import MOST_VALUES, is_name
from samebits.training import elastic
from samebits.training.process import context
from samebits.training.state import rng
from samebits.training.state.checkpoint_config import CheckpointConfig

_SCRIPT = "__ray_train_script__"
"""The module name of the script in a worker, so that ``if __name__ == "__main__":`` is false."""


class Session:
    """The session of one worker, whose training function may be called several times.

    Args:
        folder: the run's folder, which all hosts share.
        report_name: name of the file in it with the newest report.
        state: the state of ``elastic.run``.
    """

    def __init__(self, folder: Path, report_name: str, state: elastic.ObjectState) -> None:
        self.folder = folder
        self._report_file = folder / report_name
        self._state = state
        self._generators: dict[str, Any] | None = None

    def begin(self) -> None:
        """Store the generators' states of the last report.

        This must happen before the beginning of the function draws random numbers.
        """
        self._generators = rng.capture() if self._state.reports else None

    def continue_generators(self) -> None:
        """Restore the generators as of the last report, once in each call of the function."""
        if self._generators is not None:
            rng.restore(self._generators)
            self._generators = None

    def place(self) -> GenerationStarted:
        """Return this worker's place in the current generation."""
        generation = context.current("samebits.ray").generation
        assert generation is not None, "the training function runs in a generation"
        return generation

    def checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint, or None."""
        return self.folder / self._state.latest if self._state.latest else None

    def report(self, metrics: Mapping[str, Any], source: Path | None) -> None:
        """Store a report and its checkpoint, and make them the restore point."""
        state, rank = self._state, self.place().rank
        self._generators = None
        number = state.reports + 1
        name = f"checkpoint_{number:06d}"
        partial = self.folder / f"{name}.partial"
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # left by a worker that was lost while it copied
        _agree(False)
        if source is not None:
            copy(source, partial)
        has_checkpoint = _agree(source is not None)
        if rank == 0:
            if has_checkpoint:
                replace(partial, self.folder / name)
            told = {"metrics": dict(metrics), "checkpoint": name if has_checkpoint else state.latest}
            durable.replace_note(self._report_file, strict_json.dumps(told).encode())
        _agree(False)  # no rank commits before the checkpoint has its name
        state.reports = number
        state.latest = name if has_checkpoint else state.latest
        state.are_locals_restored = bool(state.latest)  # the function loads them from the checkpoint
        state.report(**shown(metrics))
        state.commit()


def shown(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that the progress line and the page can show: numbers, as many as ``State.report`` accepts."""
    reserved = ("self", "total_steps")  # parameters of State.report
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and is_name(name) and name not in reserved
    }
    return dict(itertools.islice(numbers.items(), MOST_VALUES))


def _agree(flag: bool) -> bool:
    """Return whether any rank passed True. A collective, so it also waits for all ranks."""
    told = torch.tensor([int(flag)], device=context.current("samebits.ray.report()").device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


def copy(source: Path, target: Path) -> None:
    """Copy a checkpoint's files into a folder durably."""
    with durable.disk_errors(target, "copying the reported checkpoint"):
        target.mkdir(mode=durable.DIRECTORY_MODE, exist_ok=True)
        shutil.copytree(source, target, dirs_exist_ok=True)
        for folder, _, names in os.walk(target):
            for name in names:
                durable.sync_entry(Path(folder, name))
            durable.fsync_dir(Path(folder))


def replace(partial: Path, target: Path) -> None:
    """Give a complete checkpoint its name. It replaces one that an abandoned report of the same number left."""
    with durable.disk_errors(target, "storing the reported checkpoint"):
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    durable.fsync_dir(target.parent)


_session: Session | None = None


def current(call: str) -> Session:
    """Return this worker's session.

    Raises:
        UsageError: no training function runs in this process.
    """
    if _session is None:
        raise UsageError(f"{call} was called outside a training function. Fix: call it in the train_fn of a Trainer")
    return _session


def report(metrics: Mapping[str, Any], source: Path | None) -> None:
    """Report metrics and a checkpoint's folder; see :func:`samebits.ray.report`."""
    current("samebits.ray.report()").report(metrics, source)


def prepare_model(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Return the model for this worker; see :func:`samebits.ray.prepare_model`."""
    world_size = current("samebits.ray.prepare_model()").place().world_size
    device = context.current("samebits.ray.prepare_model()").device
    model = model.to(device)
    return DistributedDataParallel(model, **options) if world_size > 1 else model


def prepare_data_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader for this worker; see :func:`samebits.ray.prepare_data_loader`."""
    place = current("samebits.ray.prepare_data_loader()").place()
    device = context.current("samebits.ray.prepare_data_loader()").device
    return divided(loader, place.rank, place.world_size, device)


def divided(loader: DataLoader[Any], rank: int, world_size: int, device: torch.device) -> DataLoader[Any]:
    """Return a loader with this rank's samples that moves batches to the device.

    Raises:
        UsageError: the loader has a sampler of its own, or no batch size.
    """
    if loader.batch_size is None or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise UsageError(
            f"samebits.ray.prepare_data_loader(): the loader has a {type(loader.sampler).__name__} "
            f"{'without a batch size' if loader.batch_size is None else 'of its own'}. Fix: give the DataLoader a "
            "batch_size, and shuffle=True or no sampler; or divide the samples in the training function"
        )
    if world_size == 1 and device.type == "cpu":
        return loader
    given = {**loader_arguments(loader), "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    sampler: Any = loader.sampler
    if world_size > 1:
        is_shuffled = isinstance(loader.sampler, RandomSampler)
        sampler = DistributedSampler(loader.dataset, world_size, rank, shuffle=is_shuffled)
    made = _MovingLoader(loader.dataset, sampler=sampler, generator=loader.generator, **given)
    made.device = device
    return made


class _MovingLoader(DataLoader[Any]):
    """A loader that moves each batch to the device."""

    device: torch.device

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield moved(batch, self.device)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def imported(module: str, name: str, places: list[str]) -> Callable[..., object]:
    """Import the training function.

    Args:
        module: a module's name, or a script's absolute path.
        name: the function's qualified name.
        places: the folders in which the command that started the run found modules.

    Raises:
        UsageError: this host lacks the script, the module or the function.
    """
    sys.path += [one for one in places if one not in sys.path]
    try:
        if Path(module).is_absolute():
            _import_script(module)
            module = _SCRIPT
        function: Callable[..., object] = pkgutil.resolve_name(f"{module}:{name}")
    except (FileNotFoundError, AttributeError, ModuleNotFoundError) as error:
        raise UsageError(
            f"the training function {name} was not found in {module} on this host: {error}. Fix: put the script and "
            "its modules in a folder that all hosts see under the same path"
        ) from error
    return function


def _import_script(path: str) -> None:
    spec = importlib.util.spec_from_file_location(_SCRIPT, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT] = module
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)


def run(plan: Mapping[str, Any], folder: Path, report_name: str) -> None:
    """Take a seat, and run the training function that the plan names until it returns."""
    global _session
    context.init()
    function = imported(plan["module"], plan["function"], plan["path"])
    arguments = [plan["config"]] if inspect.signature(function).parameters else []
    state = elastic.ObjectState(checkpoint=CheckpointConfig(1), reports=0, latest="")
    session = _session = Session(folder, report_name, state)

    def train(state: elastic.ObjectState) -> None:
        gc.collect()  # models of an earlier call, which cycles keep alive
        session.begin()
        function(*arguments)

    elastic.run(train)(state)
