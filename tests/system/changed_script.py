"""A rank whose weights change at the start of a generation: a reset callback modifies them."""

from __future__ import annotations

import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import samebits
from samebits.errors import UnequalError

PAUSE = 3  # after this many steps all wait for a loss, so that every survivor continues from its own memory
CHANGED = 0  # the rank that changes its weights
FIRST = 2  # the rank that notices long before the others check

samebits.init()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
state = samebits.elastic.TorchState(
    model, optimizer, rng="per_step", checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=100)
)


@torch.no_grad()
def change() -> None:
    if samebits.get_rank() == CHANGED:
        model.module.bias += 1.0


state.register_reset_callbacks([change])


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    begun_at = state.completed_steps
    print(f"pid {os.getpid()} begins at step {state.completed_steps}", flush=True)
    while True:
        while begun_at == 0 and state.completed_steps == PAUSE:
            state.check_host_updates()
            time.sleep(0.01)
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        if begun_at > 0 and samebits.get_rank() != FIRST:
            time.sleep(1.0)
        print(f"looks at {time.monotonic()}", flush=True)
        optimizer.step()
        print(f"stepped {state.completed_steps}", flush=True)
        state.commit()


try:
    train(state)
except UnequalError:
    print(f"dies at {time.monotonic()}", flush=True)
    raise
