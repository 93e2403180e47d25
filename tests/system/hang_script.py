"""Train until one rank hangs in the given way, once; a mark in the job's folder records it."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import samebits

STEPS = 25
HANGS_AT = 15  # after enough steps for the watchdog to have seen a few
HANGING_RANK = 1
FOR_EVER_S = 3600.0
PAUSE_S = 0.1


class Samples(Dataset[torch.Tensor]):
    """float32 (4,), a function of the index; one of them may never arrive."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if is_time_for("loader"):
            time.sleep(FOR_EVER_S)  # the loader's line
        return torch.arange(4.0) * (index % 7)


def is_time_for(way: str) -> bool:
    """Return whether this rank is to hang here and now; once in a job."""
    if args.way != way or state.step != HANGS_AT or samebits.get_rank() != HANGING_RANK:
        return False
    mark = Path("has-hung")
    if mark.exists():
        return False
    mark.touch()
    return True


def hang() -> None:
    if is_time_for("sleep"):
        time.sleep(FOR_EVER_S)  # the sleeper's line
    if is_time_for("deadlock"):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # the deadlock's line
    if is_time_for("gil"):
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # the line that holds the GIL
    if is_time_for("busy"):
        until = time.monotonic() + FOR_EVER_S
        while time.monotonic() < until:  # the busy line
            pass


parser = argparse.ArgumentParser()
parser.add_argument("--way", default="none")
args = parser.parse_args()
samebits.init()
torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
sampler = samebits.ElasticSampler(range(1000), shuffle=True, seed=5)
loader = DataLoader(Samples(), batch_size=2, sampler=sampler)
state = samebits.elastic.TorchState(ddp, optimizer, sampler=sampler, step=0)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    for batch, samples in enumerate(loader):
        if state.step == STEPS:
            return
        hang()
        time.sleep(PAUSE_S)
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(samples), torch.ones(2, 2))
        loss.backward()
        optimizer.step()
        sampler.record_batch(batch, 2)
        state.step += 1
        state.commit()
        print(f"step {state.step}", flush=True)


train(state)
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
print(f"final step={state.step} sha256={digest}", flush=True)
