"""Hugging Face Accelerate's ``Accelerator``, whose processes are the workers of this job.

Accelerate reads its rank from the environment once, and its loader counts epochs per process. Here, the rank follows
the generation and the epoch follows the state. Everything else is Accelerate's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, send_to_device
from torch.utils.data import DataLoader

from samebits.errors import UsageError
from samebits.integrations.training_loader import (
    FollowingState,
    batches_left,
    batches_of,
    elastic_parts,
    is_for_training,
    numbered,
)
from samebits.service import log
from samebits.training.group.calling_place import calling_place
from samebits.training.process import context
from samebits.training.state.torch_state import TorchState

__all__ = ["Accelerator", "place_found"]

_CARRIED = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_NPU}


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator, created after ``samebits.init()``.

    :meth:`elastic_state` returns the state that the next step depends on.

    A loader that shuffles, or has an :class:`samebits.ElasticSampler`, is a training loader: after a loss it continues
    in the middle of an epoch. All other loaders are Accelerate's own.

    Raises:
        UsageError: ``samebits.init()`` was not called, or Accelerate is configured in an unsupported way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        context.current("samebits.integrations.accelerate.Accelerator()")
        with place_found():
            super().__init__(*args, **kwargs)
        self.require_carried()

    def require_carried(self) -> None:
        """Raise UsageError if Accelerate is configured in an unsupported way."""
        if self.distributed_type not in _CARRIED:
            raise UsageError(
                f"Accelerator(): distributed_type is {self.distributed_type.value}; expected one of "
                f"{', '.join(sorted(one.value for one in _CARRIED))}. Fix: leave the plugins of DeepSpeed, FSDP and "
                "Megatron-LM out, and without an accelerator pass cpu=True or use_cpu=True"
            )

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, **kwargs: Any) -> Any:
        """Prepare a loader as Accelerate does.

        The position of a training loader becomes part of the state.
        """
        if not is_for_training(data_loader):
            return super().prepare_data_loader(data_loader, device_placement, **kwargs)
        if isinstance(data_loader, TrainingLoader):
            return data_loader
        if self.split_batches:
            raise UsageError(
                "DataLoaderConfiguration(split_batches=True): here batch_size is that of one process. Fix: leave "
                "split_batches out and divide batch_size by the number of processes"
            )
        placed = self.device_placement if device_placement is None else device_placement
        loader = TrainingLoader(data_loader, self.device if placed else None)
        self._dataloaders.append(loader)
        return loader

    def elastic_state(self, **attributes: Any) -> TorchState:
        """Return one state of everything prepared or given to ``register_for_checkpointing``.

        Args:
            attributes: whatever else the next step depends on, such as ``epoch=0``; and arguments of
                :class:`samebits.elastic.TorchState`, whose ``rng`` is ``"per_step"`` here, with the seed that was given
                to ``accelerate.utils.set_seed``.

        Raises:
            UsageError: no training loader was prepared.
        """
        samplers = [one.elastic_sampler for one in self._dataloaders if isinstance(one, TrainingLoader)]
        if not samplers:
            raise UsageError(
                "Accelerator.elastic_state(): none of the prepared loaders has a position that can be saved. Fix: "
                "prepare a DataLoader with shuffle=True or with sampler=samebits.ElasticSampler(data, "
                "shuffle=False), or create the state yourself with samebits.elastic.TorchState"
            )
        found = {
            **numbered("model", self._models),
            **numbered("optimizer", self._optimizers),
            **numbered("scheduler", self._schedulers),
            **numbered("sampler", samplers),
            **numbered("registered", self._custom_objects),
            **({} if self.scaler is None else {"scaler": self.scaler}),
        }
        return FollowingState(self.follow, **{**found, "window": _Window(self), **attributes})

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Wait as Accelerate does; before ``elastic.run``, return at once."""
        with contextlib.nullcontext() if self._is_early("main_process_first") else super().main_process_first():
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Wait as Accelerate does; before ``elastic.run``, return at once."""
        early = self._is_early("local_main_process_first")
        with contextlib.nullcontext() if early else super().local_main_process_first():
            yield

    def wait_for_everyone(self) -> None:
        """Wait as Accelerate does; before ``elastic.run``, return at once."""
        if not self._is_early("wait_for_everyone"):
            super().wait_for_everyone()

    def follow(self) -> None:
        """Adopt this process's current place."""
        place = context.current("samebits.elastic.run").generation
        if place is None:
            return
        for shared in (PartialState._shared_state, AcceleratorState._shared_state):
            shared["process_index"], shared["num_processes"] = place.rank, place.world_size
            shared["local_process_index"] = context.get_local_rank()
        for loader in self._dataloaders:
            batches = getattr(loader, "batch_sampler", None)
            if isinstance(batches, BatchSamplerShard):
                batches.process_index, batches.num_processes = place.rank, place.world_size

    def _is_early(self, call: str) -> bool:
        is_early = context.current(f"Accelerator.{call}()").generation is None
        if is_early:
            when = context.side_of_training()
            log.say(
                f"{calling_place()}: {call}() {when} elastic.run does not wait, because a process may join or "
                "leave at any time"
            )
        return is_early


@contextlib.contextmanager
def place_found() -> Iterator[None]:
    """Context manager in which Accelerate finds a rank even in a spare, whose environment has none.

    If transformers' TrainingArguments created a state from that environment earlier, it is created again.
    """
    if not context.is_spare():
        yield
        return
    process = context.current("Accelerator()")
    made = dict(PartialState._shared_state)
    AcceleratorState._reset_state(reset_partial_state=True)
    with process.stands_in():
        if made:
            PartialState(cpu=bool(made.get("_cpu")))
        yield


class TrainingLoader(DataLoaderShard):
    """A loader over an :class:`ElasticSampler` that also updates what Accelerate records about the current loader.

    Args:
        loader: the script's own; its sampler is replaced unless it is an ElasticSampler.
        device: where batches are moved to; None leaves them in place.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        self.elastic_sampler, parts = elastic_parts(loader)
        super().__init__(loader.dataset, device=device, _drop_last=loader.drop_last, **parts)

    @property
    def iteration(self) -> int:
        """Accelerate's count of epochs, taken from the state."""
        return self.elastic_sampler.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        """Ignore the value: the state counts epochs."""

    @property
    def total_batch_size(self) -> int:
        """Samples that all processes together use in a step."""
        return int(self.batch_sampler.batch_size) * context.get_world_size()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.elastic_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the remaining batches of this epoch."""
        self.begin()
        try:
            for number, batch in enumerate(batches_of(self.base_dataloader, self.elastic_sampler), 1):
                self.end_of_dataloader = number == batches_left(self, self.elastic_sampler)
                placed = self.device is not None
                yield send_to_device(batch, self.device, non_blocking=self._non_blocking) if placed else batch
        finally:
            self.end()


class _Window:
    """This process's position within the steps of ``accelerator.accumulate``."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": int(self._accelerator.step)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]
