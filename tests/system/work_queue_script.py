"""Train on the items of a shared queue: each item adds 1 to its own weight, so that weights count items."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import samebits

parser = argparse.ArgumentParser()
parser.add_argument("--items", type=int, default=24)

parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--gates", default="", help="steps before which all wait, each with an item in hand")
parser.add_argument("--not-before", help="a file: until it is there nobody takes an item")
parser.add_argument("--until", help="a file: until it is there all go on without items")
parser.add_argument("--interval", type=int, default=1000)
args = parser.parse_args()
GATES = {int(step) for step in args.gates.split(",") if step}


class Counts(torch.nn.Module):
    """One weight per item."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(args.items))

    def forward(self, used: torch.Tensor) -> torch.Tensor:
        return -(self.counts * used).sum()


samebits.init()
model = Counts()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
queue = samebits.WorkQueue("numbers")
queue.put(range(args.items))  # each rank calls it, and it happens once
saves = samebits.CheckpointConfig(save_checkpoint_steps=args.interval)
state = samebits.elastic.TorchState(ddp, optimizer, checkpoint=saves, step=0)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    while True:
        items = queue.take() if args.not_before is None or Path(args.not_before).exists() else []
        samebits.report(queue=queue.waiting())
        if state.step in GATES:
            print(f"holds {items} at gate {state.step}", flush=True)
        while state.step in GATES and not Path(f"gate-{state.step}").exists():
            time.sleep(0.01)
        used = torch.zeros(args.items)
        used[items] = 1.0
        goes_on = args.until is not None and not Path(args.until).exists()
        got = torch.tensor([float(len(items) + goes_on)])
        dist.all_reduce(got)
        if not got.item():
            return

        time.sleep(args.step_s)
        optimizer.zero_grad()
        (ddp(used) * samebits.get_world_size()).backward()  # the mean over the ranks becomes their sum
        optimizer.step()
        state.step += 1
        state.commit()
        print(f"step {state.step} of {samebits.get_world_size()} took {items}", flush=True)


train(state)
counts = model.counts.detach()
digest = hashlib.sha256(counts.numpy().tobytes()).hexdigest()
print(f"counts from {counts.min():g} to {counts.max():g}", flush=True)
print(f"final step={state.step} sha256={digest}", flush=True)
