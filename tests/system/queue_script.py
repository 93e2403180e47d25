"""Train while each rank takes numbers from a shared queue: ``samebits.kv.add`` gives each to one rank only."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import samebits

TAKEN_A_STEP = 3

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()
samebits.init()
torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
state = samebits.elastic.TorchState(ddp, optimizer, step=0)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    while state.step < args.steps:
        for _ in range(TAKEN_A_STEP):
            print(f"took {samebits.kv.add('taken', durable=True)}", flush=True)
        while not Path(f"gate-{state.step}").exists() and state.step in (5, 10):
            time.sleep(0.01)
        optimizer.zero_grad()
        F.mse_loss(ddp(torch.full((2, 4), float(state.step))), torch.ones(2, 2)).backward()
        optimizer.step()
        state.step += 1
        state.commit()
        print(f"step {state.step}", flush=True)
    if samebits.get_rank() == 0:
        samebits.kv.put("summary", f"step {state.step}", durable=True)
    print(f"summary {samebits.kv.wait('summary').value}, {samebits.kv.get('taken')} taken", flush=True)


train(state)
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
print(f"final step={state.step} sha256={digest}", flush=True)
