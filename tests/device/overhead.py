"""``python overhead.py ROUNDS``: the time of steps on one device, plain, and committed one by one.

A world of one; the plain steps are a twin's, which SameBits does not know. Blocks of both alternate. The last line is
JSON: the median seconds of a step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import nn

import samebits
from tests.device.script import device_here

STEPS = 50
SIZES = {"cuda": (4, 2048, 2048)}
OTHER_SIZE = (1, 512, 64)
"""Layers, width and rows: a step of some milliseconds, since a commit's time does not depend on the layers' width."""


def made(layers: int, width: int) -> nn.Module:
    hidden = [one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


def main() -> None:
    rounds = int(sys.argv[1])
    samebits.init()
    device = device_here()
    layers, width, count = SIZES.get(device.type, OTHER_SIZE)
    models = {name: made(layers, width).to(device) for name in ("plain", "commit")}
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    state = samebits.elastic.TorchState(models["commit"], optimizers["commit"], step=0)
    rows = torch.randn(count, width, device=device)
    took: dict[str, list[float]] = {name: [] for name in models}

    def train(state: samebits.elastic.TorchState) -> None:
        for _ in range(rounds):
            for name in took:
                torch.accelerator.synchronize()
                began_s = time.monotonic()
                for _ in range(STEPS):
                    optimizers[name].zero_grad()
                    models[name](rows).square().mean().backward()
                    optimizers[name].step()
                    if name == "commit":
                        state.step += 1
                        state.commit()
                torch.accelerator.synchronize()
                took[name].append(time.monotonic() - began_s)

    samebits.elastic.run(train)(state)
    print(json.dumps({name: statistics.median(seconds[1:]) / STEPS for name, seconds in took.items()}))


if __name__ == "__main__":
    main()
