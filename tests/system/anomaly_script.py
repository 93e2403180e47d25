"""Train with a NaN loss on one rank at one step: once (``--once``), or whenever it is computed."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import samebits

STEPS, BAD_STEP, BAD_RANK = 20, 12, 1

parser = argparse.ArgumentParser()
parser.add_argument("--bad", choices=("never", "once", "always"), default="never")
args = parser.parse_args()
samebits.init()
torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
state = samebits.elastic.TorchState(ddp, optimizer, step=0)


def is_bad() -> bool:
    """Return whether this rank's device errs at this step."""
    if args.bad == "never" or state.step != BAD_STEP or samebits.get_rank() != BAD_RANK:
        return False
    mark = Path("has-erred")
    if args.bad == "once" and mark.exists():
        return False
    mark.touch()
    return True


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    while state.step < STEPS:
        optimizer.zero_grad()
        inputs = torch.arange(4.0) * (state.step % 7) + samebits.get_rank()
        loss = F.mse_loss(ddp(inputs), torch.ones(2))
        if is_bad():
            loss = loss * float("nan")
        loss.backward()
        state.report(loss=loss)
        optimizer.step()
        state.step += 1
        state.commit()


train(state)
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
print(f"final step={state.step} sha256={digest}", flush=True)
