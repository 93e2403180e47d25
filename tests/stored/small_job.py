"""The script of the stored job: two workers train eight numbers for twelve steps. It must not change.

This script and the last release wrote the content of ``tests/stored/last_release``: a worker was killed after step 3,
and the job stopped after step 6.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import runtime

STEPS = 12


def main() -> None:
    runtime.init()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(2, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = runtime.elastic.TorchState(
        model, optimizer, step=0, rng="per_step", seed=1, checkpoint=runtime.CheckpointConfig(save_checkpoint_steps=2)
    )

    @runtime.elastic.run
    def train(state: runtime.elastic.TorchState) -> None:
        while state.step < STEPS:
            _wait_at(state.step)
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            print(f"epoch 0 step {state.step} loss 0 at 0", flush=True)

    train(state)
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.module.state_dict().values()))
    print(f"final step={state.step} sha256={digest.hexdigest()}", flush=True)


def _wait_at(step: int) -> None:
    """Wait at the step that the file names, if it exists, until it names another."""
    gate = Path(os.environ.get("GATE", "/nowhere"))
    while gate.exists() and gate.read_text() == str(step):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
