"""A ported script for torchrun: it trains to a fixed step, and waits at some of them for the test's permission.

It prints to standard error: what torchrun copies to its standard output is buffered.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import samebits

STEPS = 40
GATES = (10, 20, 30)
FAILS, EXITS = "fail", "exit"


def main() -> None:
    samebits.init()
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        rng="per_step",
        seed=1,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=5, keep_checkpoint_max=3),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.completed_steps < STEPS:
            step = state.completed_steps
            if step in GATES:
                print(f"rank {dist.get_rank()} waits at {step}, pid {os.getpid()}", file=sys.stderr, flush=True)
            while step in GATES and not all_see(Path(f"pass_{step}")):
                if dist.get_rank() == 1 and Path(FAILS).exists():
                    raise ValueError("the loss is not a number")
                if dist.get_rank() == 1 and Path(EXITS).exists():
                    sys.exit(3)
                time.sleep(0.02)
            optimizer.zero_grad()
            gradient(model, step, dist.get_rank())
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
            state.commit()

    train(state)
    print(f"rank {dist.get_rank()} ends with {bits_of(model)}", file=sys.stderr, flush=True)


def all_see(path: Path) -> bool:
    """Return whether every rank sees the file; a rank that waits for it must notice that another one is lost."""
    seen = torch.tensor([float(path.exists())])
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    return bool(seen)


def gradient(model: nn.Module, step: int, rank: int) -> None:
    """Add the gradient of one rank's batch."""
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    model(inputs).square().mean().backward()


def bits_of(model: nn.Module) -> str:
    """Return a hash of the raw bytes of all parameters."""
    parts = [parameter.detach().contiguous().view(torch.uint8).numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def undisturbed_bits() -> str:
    """Train as two ranks in one process without any fault; return the hash at the end."""
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        sums = []
        for rank in range(2):
            optimizer.zero_grad()
            gradient(model, step, rank)
            sums.append([parameter.grad for parameter in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *sums, strict=True):
            assert first is not None and second is not None
            parameter.grad = first + second
        optimizer.step()
    return bits_of(model)


if __name__ == "__main__":
    main()
