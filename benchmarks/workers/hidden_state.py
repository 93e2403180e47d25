"""A script in a world of one that trains a few steps and prints their cost to its thread as one line of JSON.

``tell_ms``: all steps up to the second after the first epoch's end, with the preceding work of ``elastic.run``.
``step_ms`` and ``swap_ms``: a step of a larger model, and one before which averaged weights are swapped in through
``.data`` for an evaluation and out again; ``bare_ms`` is the swap itself in a model outside any state.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samebits

EPOCHS, BATCH, SAMPLES, WIDTH = 3, 8, 64, 1024
seen = 0


def layers(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def swap(net: nn.Module, average: nn.Module) -> None:
    kept = [one.data.clone() for one in net.parameters()]
    for one, other in zip(net.parameters(), average.parameters(), strict=True):
        one.data.copy_(other)
    net.eval()
    net.train()
    for one, before in zip(net.parameters(), kept, strict=True):
        one.data.copy_(before)


def cpu_ms(call: Callable[[], object]) -> float:
    began_s = time.thread_time()
    call()
    return 1000 * (time.thread_time() - began_s)


def main() -> None:
    samebits.init()
    torch.manual_seed(1)
    is_large = "--swap" in sys.argv
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randint(0, 4, (SAMPLES,)))
    sampler = samebits.ElasticSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    net = layers(WIDTH if is_large else 16)
    average = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=1000)
    state = samebits.elastic.TorchState(
        net, optimizer, sampler=sampler, epoch=0, rng="per_step", seed=1, checkpoint=checkpoint
    )
    with_swap: list[float] = []
    without: list[float] = []

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        global seen
        while state.epoch < EPOCHS:
            for batch, (inputs, labels) in enumerate(loader):
                began_s = time.thread_time()
                if is_large and batch % 2:
                    swap(net, average)
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
                sampler.record_batch(batch, BATCH)
                seen += 1
                state.commit()
                (with_swap if batch % 2 else without).append(1000 * (time.thread_time() - began_s))
                if not is_large and state.epoch == 1 and batch == 1:
                    return
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    told = {"tell_ms": cpu_ms(lambda: train(state))}
    if is_large:
        bare, other = copy.deepcopy(average), copy.deepcopy(average)
        told = {
            "step_ms": statistics.median(without[4:]),
            "swap_ms": statistics.median(with_swap[4:]),
            "bare_ms": statistics.median(cpu_ms(lambda: swap(bare, other)) for _ in range(9)),
        }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
