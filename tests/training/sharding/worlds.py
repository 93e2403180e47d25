"""Worlds without peers: any rank's view of any group, for code without collectives; and a model sharded in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from samebits.training.group.group import form_alone
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState

RANKS = 3
WIDTHS = (7, 5, 2)  # over three ranks: parts of 3, 3 and 1, of 2, 2 and 1, of 1, 1 and 0


@contextlib.contextmanager
def world(rank: int = 0, size: int = 1) -> Iterator[None]:
    """Become one rank of a group whose collectives do nothing; replaces any previous group for good."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()  # otherwise an operator's result has the mesh of another rank's world


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """As a process between ``samebits.init()`` and ``elastic.run``."""
    group = form_alone(torch.device("cpu"), alone=lambda: "before")
    try:
        yield
    finally:
        group.drop()
        _clear_sharding_prop_cache()


def sharded_model(seed: int = 0, **options: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    first, second, third = WIDTHS
    model = nn.Sequential(nn.Linear(4, first), nn.Tanh(), nn.Linear(first, second), nn.Linear(second, third))
    fully_shard(model[2], **options)
    return fully_shard(model, **options)


def sharded_state(seed: int = 0, **attributes: object) -> TorchState:
    model = sharded_model(seed)
    return TorchState(model, torch.optim.Adam(model.parameters()), sampler=ElasticSampler(range(32)), **attributes)


def loss_of(model: nn.Module, number: int = 0) -> torch.Tensor:
    """Use the same data for the same number; in a world of one, which needs no peer."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    return model(x).square().sum()


def train_one_step(state: TorchState, number: int = 0) -> None:
    """Like :func:`loss_of`, with an optimizer step."""
    assert state.model is not None and state.optimizer is not None
    state.optimizer.zero_grad()
    loss_of(state.model, number).backward()
    state.optimizer.step()


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [one._local_tensor.detach().clone() for one in model.parameters()]  # type: ignore[attr-defined]


def wholes_of(state: TorchState) -> list[torch.Tensor]:
    """Return weights and first moments in a world of one."""
    assert state.model is not None and state.optimizer is not None
    moments = [values["exp_avg"] for values in state.optimizer.state.values()]
    return [one._local_tensor.detach().clone() for one in [*state.model.parameters(), *moments]]
