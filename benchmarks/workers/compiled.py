"""A compiled model: ``plain`` in a process by itself, ``ours`` as a worker that trains until it is ended.

It records the time of the first step minus the second: tracing, and compiling or loading compiled code.
"""

from __future__ import annotations

import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import samebits
from benchmarks.moments import Notebook


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    notebook = Notebook.from_environment()
    if sys.argv[1] == "plain":
        model, times = _model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compiled = torch.compile(model)
        for _ in range(2):
            times.append(_step(compiled, optimizer))
        _note(notebook, times)
        signal.pause()
    samebits.init()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model))
    state = samebits.elastic.TorchState(model, optimizer, rng="per_step")
    ours: list[float] = []

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while True:
            ours.append(_step(compiled, optimizer))
            state.commit()
            if len(ours) == 2:
                _note(notebook, ours)
            time.sleep(0.02)

    train(state)


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    began_s = time.monotonic()
    optimizer.zero_grad()
    F.mse_loss(model(torch.ones(16, 64)), torch.zeros(16, 64)).backward()
    optimizer.step()
    return time.monotonic() - began_s


def _note(notebook: Notebook, times: list[float]) -> None:
    found = counters["inductor"]
    text = f"{times[0] - times[1]:.6f} {found['fxgraph_cache_hit']} {found['fxgraph_cache_miss']}"
    notebook.note("compiled", text=text)


if __name__ == "__main__":
    main()
