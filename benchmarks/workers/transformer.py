"""A transformer of 25 million parameters: many tensors, AdamW, and more bytes to reduce than to compute.

Its sequences are so short that two cores can train it, while weights and moments (300 MB per rank) are as large as in
practice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo  # a process's first optimizer would import this when it is built
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS = 512, 8, 8
TOKENS = 256
SEQUENCE = 16
BATCH = 2
SAMPLES = 1024
SEED = 1


class Transformer:
    """One rank's training; create it once torch's default process group exists."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.samples = torch.randint(0, TOKENS, (SAMPLES, SEQUENCE + 1))
        self.model = wrap(_Model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._loss = nn.CrossEntropyLoss()

    def step(self, number: int) -> torch.Tensor:
        """Make optimizer step ``number``, counted from 0; return its loss."""
        return self._learn(self.model, number)

    def step_alone(self, number: int) -> None:
        """Make optimizer step ``number`` without reducing its gradients."""
        self._learn(self.model.module, number)

    def _learn(self, model: nn.Module, number: int) -> torch.Tensor:
        begin = (number * dist.get_world_size() + dist.get_rank()) * BATCH % SAMPLES
        tokens = self.samples[begin : begin + BATCH]
        logits = model(tokens[:, :-1])
        loss: torch.Tensor = self._loss(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class _Model(nn.Module):
    """int64 (n, SEQUENCE) tokens to float32 (n, SEQUENCE, TOKENS) logits; no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Parameter(torch.randn(SEQUENCE, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens) + self.place, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.last(hidden)
        return logits
