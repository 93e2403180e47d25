"""The common model: an MLP 784-512-10, batch 64 per rank, SGD with momentum, on fixed random samples.

The model, its samples and its step are the same for SameBits and for the peers. A step depends only on (step, rank,
world size) and the weights, so all runs are comparable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

# A process's first optimizer would import this, for a second or more; it is part of the start.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64
SAMPLES = 8192
SEED = 1


class Mlp:
    """One rank's training.

    Args:
        wrap: makes the model distributed; torch's DDP needs torch's default process group.
        dropout: the share of hidden values that a step leaves out.
        width: the hidden layer's width.
    """

    def __init__(
        self,
        wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
        dropout: float = 0.0,
        width: int = 512,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.samples = torch.randn(SAMPLES, 784)
        self.labels = torch.randint(0, 10, (SAMPLES,))
        hidden = [nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        self.model = wrap(nn.Sequential(nn.Linear(784, width), *hidden, nn.Linear(width, 10)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._loss = nn.CrossEntropyLoss()

    def step(self, number: int) -> torch.Tensor:
        """Make optimizer step ``number``, counted from 0; return its loss."""
        return self._learn(self.model, number)

    def step_alone(self, number: int) -> None:
        """Make optimizer step ``number`` without reducing its gradients."""
        self._learn(self.model.module, number)

    def loss(self, model: nn.Module, number: int, rank: int, world_size: int) -> torch.Tensor:
        """Return the loss of this rank's samples in that step."""
        begin = (number * world_size + rank) * BATCH % SAMPLES
        rows = slice(begin, begin + BATCH)
        loss: torch.Tensor = self._loss(model(self.samples[rows]), self.labels[rows])
        return loss

    def digest(self) -> str:
        """Return the SHA-256 of all weights and of the optimizer's momentum; a collective if they are sharded."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            for tensor in (parameter.detach(), self.optimizer.state[parameter].get("momentum_buffer")):
                if tensor is not None:
                    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                    digest.update(whole.numpy().data)
        return digest.hexdigest()

    def _learn(self, model: nn.Module, number: int) -> torch.Tensor:
        loss = self.loss(model, number, dist.get_rank(), dist.get_world_size())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
