"""What the adapters share: a training loader whose position belongs to the state, and a state that follows the place.

The loader itself records every batch with the sampler, before the step that uses it, and begins the next epoch after
the last batch. The training loop needs no code for the data position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from samebits.training.state.base_state import CommitSink
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState

_PASSED_ON = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)


def is_for_training(loader: Any) -> bool:
    """Return whether the loader shuffles or has an :class:`ElasticSampler`, so that its position matters."""
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, (RandomSampler, ElasticSampler)) and loader.batch_size is not None


def elastic_parts(loader: DataLoader[Any]) -> tuple[ElasticSampler, dict[str, Any]]:
    """Return the sampler of a training loader, made elastic if needed.

    Also return the other arguments with which to rebuild the loader.
    """
    sampler = loader.sampler
    if not isinstance(sampler, ElasticSampler):
        dataset: Any = loader.dataset
        sampler = ElasticSampler(dataset, shuffle=True, seed=torch.initial_seed() % 2**31)
    parts = loader_arguments(loader)
    parts["batch_sampler"] = BatchSampler(sampler, int(loader.batch_size or 1), loader.drop_last)
    parts["generator"] = torch.Generator()  # the default generator belongs to the training
    return sampler, parts


def loader_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments to rebuild a loader, without dataset, batches, order and generator."""
    return {name: getattr(loader, name) for name in _PASSED_ON}


def batches_left(loader: Any, sampler: ElasticSampler) -> int:
    """Return how many batches this rank gets in the current iteration."""
    size: int = loader.batch_sampler.batch_size
    return len(sampler) // size if loader.batch_sampler.drop_last else -(-len(sampler) // size)


def batches_of(loader: Any, sampler: ElasticSampler) -> Iterator[Any]:
    """Yield the remaining batches of this epoch, then begin the next epoch.

    This process prefetches no batch, because random numbers that a dataset draws belong to the step that uses them.
    """
    epoch = sampler.epoch
    for number, batch in enumerate(loader):
        sampler.record_batch(number, loader.batch_sampler.batch_size)
        yield batch
    sampler.set_epoch(epoch + 1)


class FollowingState(TorchState):
    """A :class:`TorchState` that notifies its framework when this process's rank or world size changes.

    By default, its ``rng`` is ``"per_step"``, seeded like the script. It relies on ``bind`` being called whenever a
    generation begins, before the training function is called.

    Args:
        follow: called whenever this process's place may have changed.
        attributes: as for :class:`TorchState`.
    """

    def __init__(self, follow: Callable[[], None], **attributes: Any) -> None:
        super().__init__(**{"rng": "per_step", "seed": torch.initial_seed(), **attributes})
        self._follow = follow

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """Bind as :meth:`TorchState.bind` does, and notify the framework."""
        super().bind(session, rank)
        if session is not None:
            self._follow()


def numbered(name: str, values: list[Any]) -> dict[str, Any]:
    """Return the values by name. The first one gets the plain name, the others get a number."""
    return {name if not number else f"{name}_{number}": value for number, value in enumerate(values)}
