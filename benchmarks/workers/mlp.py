"""The model all of them train: FACTS' MLP 784-512-10, batch 64 per rank, SGD with momentum, on fixed random samples.

Here live the model, its samples and one step of it, the same for SameBits and for the peers. Never here: who trains it.
The one idea: a step depends on (step, rank, world size) and the weights alone, so any run can be compared with any.
"""

from __future__ import annotations

import torch

# What the first optimizer of a process would import when it is built: a second or more, and part of a process's start.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64
SAMPLES = 8192
SEED = 1


class Mlp:
    """One rank's training; to be built when torch's default process group exists."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.samples = torch.randn(SAMPLES, 784)
        self.labels = torch.randint(0, 10, (SAMPLES,))
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._loss = nn.CrossEntropyLoss()

    def step(self, number: int) -> None:
        """Optimizer step ``number``, counted from 0."""
        self._learn(self.model, number)

    def step_alone(self, number: int) -> None:
        """The same, but for its gradients nobody is asked."""
        self._learn(self.model.module, number)

    def _learn(self, model: nn.Module, number: int) -> None:
        begin = (number * dist.get_world_size() + dist.get_rank()) * BATCH % SAMPLES
        rows = slice(begin, begin + BATCH)
        loss = self._loss(model(self.samples[rows]), self.labels[rows])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
