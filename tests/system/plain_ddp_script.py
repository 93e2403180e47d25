"""A DDP script as in torchrun's tutorials, with its own ``torch.save`` and without SameBits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVED = int(sys.argv[1]), Path("snapshot.pt")

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
if SAVED.exists():
    snapshot = torch.load(SAVED)
    model.module.load_state_dict(snapshot["model"])
    step = snapshot["step"]
print(f"begins at {step} as {rank}, pid {os.getpid()}", flush=True)
while step < STEPS:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 10 + rank))
    optimizer.zero_grad()
    (model(x) - 1).pow(2).mean().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0 and rank == 0:
        temporary = SAVED.with_suffix(".tmp")
        torch.save({"model": model.module.state_dict(), "step": step}, temporary)
        temporary.rename(SAVED)
    if not Path("hurry").exists():
        time.sleep(0.02)
print(f"final {step} {[value.hex() for value in model.module.weight.detach().flatten().tolist()]}", flush=True)
