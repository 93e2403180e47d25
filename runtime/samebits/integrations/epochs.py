"""The training loop of ``samebits.Model.train``, the same as the tutorial's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from samebits.errors import UsageError
from samebits.training import elastic
from samebits.training.process.context import current
from samebits.training.state.checkpoint_config import CheckpointConfig
from samebits.training.state.data.sampler import ElasticSampler


def train_epochs(
    network: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    epochs: int,
    checkpoint: CheckpointConfig | None,
    step_end: Callable[[int, torch.Tensor, int], None],
) -> None:
    """Train until ``epochs`` epochs are complete, and call ``step_end(step, loss, epoch)`` after each commit.

    Raises:
        UsageError: the loader has no ElasticSampler, or no batch size.
    """
    device = current("samebits.Model.train()").device
    sampler, batch_size = loader.sampler, loader.batch_size
    if not isinstance(sampler, ElasticSampler) or batch_size is None:
        raise UsageError(
            "Model.train: the loader has no samebits.ElasticSampler, or no batch size, so no rank would know which "
            "samples are done. Fix: DataLoader(data, batch_size=32, sampler=samebits.ElasticSampler(data), "
            "generator=torch.Generator())"
        )
    parallel = DistributedDataParallel(network.to(device))
    state = elastic.TorchState(
        parallel, optimizer, sampler=sampler, epoch=0, rng="per_step", seed=0, checkpoint=checkpoint
    )

    @elastic.run
    def loop(state: Any) -> None:
        parallel.train()
        while state.epoch < epochs:
            for batch, (inputs, labels) in enumerate(loader):
                optimizer.zero_grad()
                loss = loss_fn(parallel(inputs.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                sampler.record_batch(batch, batch_size)
                state.commit()
                step_end(state.completed_steps, loss.detach(), state.epoch + 1)
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    loop(state)
