"""A script for a world of one: twenty steps, a checkpoint every fifth; ``--die N`` kills it at that step."""

from __future__ import annotations

import argparse
import os
import signal

import torch

import samebits

parser = argparse.ArgumentParser()
parser.add_argument("--die", type=int, default=-1)
options = parser.parse_args()

samebits.init()
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = samebits.elastic.TorchState(
    model, optimizer, step=0, checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=5)
)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    print(f"from step {state.step}", flush=True)
    while state.step < 20:
        if state.step == options.die:
            state.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(state.step))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True) * 2).pow(2).mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()


train(state)
told = samebits.status()
assert (told.rank, told.world_size, told.is_alone, told.is_finished) == (0, 1, True, True), told
assert f"<td>{told.job}</td>" in told._repr_html_()
print(f"final {state.step} {[value.hex() for value in model.weight.detach().flatten().tolist()]}", flush=True)
