"""Which samples this rank sees next: a function of (seed, epoch, consumed), and of nothing else.

``consumed`` counts the samples that all ranks together have gone through in this epoch. All ranks hold the same three
numbers, so the position goes back and forward with the state, and a replacement goes on exactly where the group is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from runtime.training import context


class ElasticSampler(Sampler[int]):
    """Splits an epoch's samples among the ranks and knows how far the group has come.

    The order is a permutation drawn from (seed, epoch); rank r of n takes every n-th of what is not consumed yet. So
    that all ranks take equally many steps, the last round is filled up from the beginning of the order.

    Args:
        dataset: anything with a length.
        shuffle: permute anew every epoch; else in order.
        seed: the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.consumed = 0
        self._began_at = 0
        self.on_iterate: Callable[[bool], None] | None = None  # told whether the epoch goes on, not begins

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Where it is the present one already, as after a recovery, the position stays."""
        if epoch != self.epoch:
            self.epoch, self.consumed, self._began_at = epoch, 0, 0

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has gone through batch number ``batch_idx`` (from 0) since the iteration began."""
        through = self._began_at + (batch_idx + 1) * batch_size * context.get_world_size()
        self.consumed = min(through, len(self.dataset))

    def __iter__(self) -> Iterator[int]:
        self._began_at = self.consumed
        if self.on_iterate is not None:
            self.on_iterate(self.consumed > 0)
        order = self._order()
        rest = order[self.consumed :]
        world_size = context.get_world_size()
        missing = -len(rest) % world_size
        while rest and missing:  # more than once only where fewer samples than ranks exist
            rest += order[:missing]
            missing = -len(rest) % world_size
        return iter(rest[context.get_rank() :: world_size])

    def __len__(self) -> int:
        return -(-(len(self.dataset) - self.consumed) // context.get_world_size())

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator()
        generator.manual_seed((self.seed << 20) + self.epoch)
        order: list[int] = torch.randperm(len(self.dataset), generator=generator).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and position."""
        return {"seed": self.seed, "epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position that ``state_dict`` gave."""
        self.seed, self.epoch, self.consumed = state["seed"], state["epoch"], state["consumed"]
        self._began_at = self.consumed
