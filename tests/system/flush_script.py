"""Save every step in the background; after ``state.flush()`` its point is on disk under its name."""

from __future__ import annotations

from pathlib import Path

import torch

import samebits

STEPS = 6

samebits.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters())
state = samebits.elastic.TorchState(
    model, optimizer, checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=STEPS + 1)
)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    while state.completed_steps < STEPS:
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        state.commit()
        if state.completed_steps % 2 == 0:
            state.flush()
            saved = sorted(path.name for path in Path("ckpt_of_rank", str(samebits.get_rank())).glob("step_*"))
            print(f"after step {state.completed_steps} flushed {len(saved)} up to {saved[-1]}", flush=True)


train(state)
