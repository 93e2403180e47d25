"""A training script that prints each step's samples, world size and learning rate.

The rate follows the world size by Horovod's recipe: set at the start, and again in a reset callback.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.gate import wait_at_gate
from tests.system.probe import sha256_of

SAMPLES = 203
BATCH = 4
RATE = 0.001


def main() -> None:
    args = parse_arguments()
    while args.not_while is not None and args.not_while.exists() and os.environ.get("NODE_ID") == args.node:
        time.sleep(0.01)
    samebits.init()
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8), torch.randint(0, 4, (SAMPLES,)))
    sampler = samebits.ElasticSampler(range(SAMPLES), shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    bare = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * samebits.get_world_size(), momentum=0.9)
    state = samebits.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, rng="per_step")

    def world_changed() -> None:
        for group in optimizer.param_groups:
            group["lr"] = RATE * samebits.get_world_size()

    state.register_reset_callbacks([world_changed])

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            if state.epoch in args.gate:
                wait_at_gate(state.epoch, state.check_host_updates)
            for batch, (indices, inputs, labels) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                time.sleep(args.pause_ms / 1000)
                sampler.record_batch(batch, BATCH)
                state.save()
                say(state, indices, optimizer.param_groups[0]["lr"])
                state.check_host_updates()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    def say(state: samebits.elastic.TorchState, indices: torch.Tensor, rate: float) -> None:
        step, size = state.completed_steps, samebits.get_world_size()
        samples = ",".join(map(str, indices.tolist()))
        print(f"epoch {state.epoch} step {step} of {size} lr {rate:.6f} samples {samples}", flush=True)
        death = Path(f"died-{os.environ['NODE_ID']}:{step}")
        if death.name.removeprefix("died-") in args.die and not death.exists():
            death.touch()  # its replacement does not die again
            os.kill(os.getpid(), signal.SIGKILL)

    train(state)
    print(f"final step={state.completed_steps} sha256={sha256_of(bare)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Says which samples every step took.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--gate", type=int, action="append", default=[], help="wait before this epoch until the test opens it"
    )
    parser.add_argument("--pause-ms", type=float, default=20.0, help="slept in every step")
    parser.add_argument(
        "--die", action="append", default=[], metavar="NODE:STEP", help="kill -9, having said that step"
    )
    parser.add_argument("--node", default="", help="the node that --not-while is meant for")
    parser.add_argument("--not-while", type=Path, help="that node does not start while this file is there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
