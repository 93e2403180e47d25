"""A training loader whose position is the state's, whichever framework iterates it.

Here live the loader's parts that no framework has a say in. Never here: moving batches to a device, a framework's own
counters. The one idea: the loop needs no line for the data, because the loader itself tells the sampler of every batch
it gives out, before the step that uses it, and of the epoch when it is through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from samebits.training.state.data.sampler import ElasticSampler

__all__ = ["batches_left", "batches_of", "elastic_parts", "is_for_training"]

_PASSED_ON = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)


def is_for_training(loader: Any) -> bool:
    """Whether it shuffles or has an :class:`ElasticSampler`, so that its position is worth keeping."""
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, (RandomSampler, ElasticSampler)) and loader.batch_size is not None


def elastic_parts(loader: DataLoader[Any]) -> tuple[ElasticSampler, dict[str, Any]]:
    """The sampler of a loader that is for training, a new one unless it is elastic, and all else to build it anew."""
    sampler = loader.sampler
    if not isinstance(sampler, ElasticSampler):
        dataset: Any = loader.dataset
        sampler = ElasticSampler(dataset, shuffle=True, seed=torch.initial_seed() % 2**31)
    parts = {name: getattr(loader, name) for name in _PASSED_ON}
    parts["batch_sampler"] = BatchSampler(sampler, int(loader.batch_size or 1), loader.drop_last)
    parts["generator"] = torch.Generator()  # else it would draw from the training's random numbers
    return sampler, parts


def batches_left(loader: Any, sampler: ElasticSampler) -> int:
    """How many batches this rank gets in the iteration that has begun."""
    size: int = loader.batch_sampler.batch_size
    return len(sampler) // size if loader.batch_sampler.drop_last else -(-len(sampler) // size)


def batches_of(loader: Any, sampler: ElasticSampler) -> Iterator[Any]:
    """The batches of this epoch that are left; behind the last one the next epoch begins.

    No batch is taken ahead in this process: random numbers that a data set draws belong to the step that uses them.
    """
    epoch = sampler.epoch
    for number, batch in enumerate(loader):
        sampler.record_batch(number, loader.batch_sampler.batch_size)
        yield batch
    sampler.set_epoch(epoch + 1)
