"""Train until told when to end; one node's loader takes four times as long per sample."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import samebits

LAST_STEP = Path("last-step")
SAMPLES = 1 << 20


class Samples(Dataset[torch.Tensor]):
    """float32 (4,), a function of the index; its delay is given to the script."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.arange(4.0) * (index % 7)


def last_step() -> int:
    """Return the step at which every rank ends; written before any rank has reached it."""
    if args.steps is not None:
        return int(args.steps)
    return int(LAST_STEP.read_text()) if LAST_STEP.exists() else SAMPLES


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--sample-s", type=float, default=0.0)
parser.add_argument("--slow-node", default="")
args = parser.parse_args()
samebits.init()
torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
sampler = samebits.ElasticSampler(range(SAMPLES), shuffle=False)
slowness = 4 if os.environ.get("NODE_ID") == args.slow_node else 1
loader = DataLoader(Samples(args.sample_s * slowness), batch_size=1, sampler=sampler)
state = samebits.elastic.TorchState(ddp, optimizer, sampler=sampler, step=0)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    for batch, samples in enumerate(loader):
        if state.step == last_step():
            return
        optimizer.zero_grad()
        F.mse_loss(ddp(samples), torch.ones(1, 2)).backward()
        optimizer.step()
        sampler.record_batch(batch, 1)
        state.step += 1
        state.commit()
        print(f"epoch 0 step {state.step} loss 0 at 0", flush=True)


train(state)
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
print(f"final step={state.step} sha256={digest}", flush=True)
