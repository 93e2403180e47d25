"""Lightning's ``Fabric``, whose processes are the workers of this job.

Lightning asks its environment for a rank and its strategy for a wrapper. Here, the environment returns the rank of the
seat or the generation, and the strategy returns a DistributedDataParallel on the existing group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import lightning.fabric
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler

from samebits.errors import UsageError
from samebits.integrations.training_loader import (
    FollowingState,
    batches_of,
    elastic_parts,
    is_for_training,
    numbered,
)
from samebits.service import log
from samebits.training.group.calling_place import calling_place
from samebits.training.process import context
from samebits.training.state.torch_state import TorchState

if TYPE_CHECKING:
    from samebits.integrations.lightning_trainer import Trainer, TrainerStrategy

__all__ = ["Fabric", "SameBitsStrategy", "Trainer", "TrainerStrategy"]


def __getattr__(name: str) -> Any:
    """Import the Trainer on first use, because a Fabric does not need ``lightning.pytorch``."""
    if name not in ("Trainer", "TrainerStrategy"):
        raise AttributeError(f"module 'samebits.integrations.lightning' has no attribute {name!r}")
    from samebits.integrations import lightning_trainer

    return getattr(lightning_trainer, name)


class Fabric(lightning.fabric.Fabric):
    """Lightning's Fabric, created after ``samebits.init()``. ``elastic_state()`` returns the state to train with.

    A loader that shuffles, or has an :class:`samebits.ElasticSampler`, is a training loader: after a loss it continues
    in the middle of an epoch. All other loaders are Lightning's own. ``launch()`` starts no processes.

    Raises:
        UsageError: ``samebits.init()`` was not called, or a strategy other than DDP was given.
    """

    def __init__(self, **kwargs: Any) -> None:
        context.current("samebits.integrations.lightning.Fabric()")
        strategy = kwargs.pop("strategy", "auto")
        if not isinstance(strategy, SameBitsStrategy):
            if strategy not in ("auto", "ddp"):
                raise UsageError(
                    f"Fabric(strategy={strategy!r}): expected none, 'ddp' or a SameBitsStrategy, which is Lightning's "
                    "DDPStrategy and takes its arguments. Fix: leave strategy out"
                )
            strategy = SameBitsStrategy()
        self._training_loaders: list[_TrainingLoader] = []
        self._divided: list[DistributedSampler[Any]] = []  # samplers that Lightning made for this process's place
        super().__init__(strategy=strategy, **kwargs)

    def _setup_dataloader(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_for_training(dataloader):
            prepared = super()._setup_dataloader(dataloader, *args, **kwargs)
            if isinstance(prepared.sampler, DistributedSampler):
                self._divided.append(prepared.sampler)
            return prepared
        to_device = kwargs.get("move_to_device", True)
        loader = _TrainingLoader(dataloader, self.device if to_device else None)
        self._training_loaders.append(loader)
        return loader

    def elastic_state(self, **attributes: Any) -> TorchState:
        """Return one state of what ``setup()`` returned and of the loaders' positions.

        Args:
            attributes: ``model=model, optimizer=optimizer, epoch=0`` and whatever else the next step depends on, as for
                ``fabric.save``; and arguments of :class:`samebits.elastic.TorchState`, whose ``rng`` is ``"per_step"``
                here, with the seed that was given to ``seed_everything``.

        Raises:
            UsageError: no training loader was set up.
        """
        if not self._training_loaders:
            raise UsageError(
                "Fabric.elastic_state(): none of the loaders that were set up has a position that can be saved. Fix: "
                "set up a DataLoader with shuffle=True or with sampler=samebits.ElasticSampler(data, shuffle=False), "
                "or create the state yourself with samebits.elastic.TorchState"
            )
        samplers = numbered("sampler", [one.elastic_sampler for one in self._training_loaders])
        return FollowingState(self._follow, **samplers, **attributes)

    def _follow(self) -> None:
        take_place(self._divided)

    @contextlib.contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Wait as Lightning does; before ``elastic.run``, return at once."""
        with contextlib.nullcontext() if _is_early("rank_zero_first") else super().rank_zero_first(local):
            yield

    def barrier(self, name: str | None = None) -> None:
        """Wait as Lightning does; before ``elastic.run``, return at once."""
        if not _is_early("barrier"):
            super().barrier(name)


class SameBitsStrategy(DDPStrategy):
    """Lightning Fabric's DDP strategy in existing processes.

    Args:
        kwargs: as for ``lightning.fabric.strategies.DDPStrategy``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(cluster_environment=seat(), **kwargs)

    @property
    def root_device(self) -> torch.device:
        """The device that ``samebits.init()`` chose."""
        return context.current("Fabric()").device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments with which Lightning splits the samples of other loaders; a spare's rank is corrected later."""
        return {"num_replicas": self.world_size, "rank": self.global_rank % self.world_size}

    def _configure_launcher(self) -> None:
        self._launcher = None  # the processes exist already

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        if not dist.is_initialized():  # ENABLE_RECOVERY=0
            dist.init_process_group()

    def _set_world_ranks(self) -> None:
        take_place()


class _TrainingLoader:
    """Fabric's view of a loader over an :class:`ElasticSampler`."""

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        self.elastic_sampler, parts = elastic_parts(loader)
        self.device = device
        self._loader: DataLoader[Any] = DataLoader(loader.dataset, **parts)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in batches_of(self._loader, self.elastic_sampler):
            yield batch if self.device is None else move_data_to_device(batch, self.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_early(call: str) -> bool:
    is_early = context.current(f"Fabric.{call}()").generation is None
    if is_early:
        when = context.side_of_training()
        log.say(
            f"{calling_place()}: {call}() {when} elastic.run does not wait, because a process may join or leave at "
            "any time"
        )
    return is_early


class _ClusterPlace(ClusterEnvironment):
    """Lightning's cluster environment for this process."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return context.current("Lightning").settings.sched_host

    @property
    def main_port(self) -> int:
        return context.current("Lightning").settings.sched_port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return context.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Ignore the value: the scheduler sets it."""

    def global_rank(self) -> int:
        process = context.current("Lightning")
        return process.seat[0] if process.generation is None else process.generation.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore the value: the scheduler sets it."""

    def local_rank(self) -> int:
        return context.get_local_rank()

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any ``devices`` and ``num_nodes``, because they start no processes here."""


def seat() -> ClusterEnvironment:
    """Return the cluster environment for a strategy."""
    return _ClusterPlace()


def take_place(divided: Iterable[DistributedSampler[Any]] = ()) -> None:
    """Set this process's rank in Lightning, and in ``divided``, the samplers that Lightning has created."""
    place = _ClusterPlace()
    rank_zero_only.rank = place.global_rank()
    for sampler in divided:
        sampler.rank, sampler.num_replicas = place.global_rank(), place.world_size()
        sampler.num_samples = -(-len(sampler.dataset) // sampler.num_replicas)  # type: ignore[arg-type]
        sampler.total_size = sampler.num_samples * sampler.num_replicas
