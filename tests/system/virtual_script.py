"""An ordinary DistributedDataParallel script with virtual workers, and everything that could depend on the world size.

Dropout, BatchNorm, autocast with a gradient scaler, clipping, momentum, a schedule for each step and one for each
epoch. It waits at gates inside a step: the ranks that are left then have computed some of its micro-batches.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.gate import wait_at_gate

SAMPLES, FEATURES, MICRO, WORKERS = 150, 16, 4, 8  # the last global batch of an epoch is filled up

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--gate", type=int, action="append", default=[], help="wait in the step after so many steps")
args = parser.parse_args()


class Cooled(nn.Module):
    """Divides by a plain attribute that each forward pass changes."""

    temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.98
        return x / self.temperature


samebits.init()
torch.manual_seed(3)
torch.use_deterministic_algorithms(True)
data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, 10, (SAMPLES,)))
net = nn.Sequential(
    *(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3)),
    *(nn.Linear(32, 10), nn.BatchNorm1d(10), Cooled()),
)
net.register_buffer("seen", torch.zeros(10, dtype=torch.int64))  # no batch statistics: virtual worker 0's
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=4)  # overflows in the first steps
sampler = samebits.ElasticSampler(data, seed=1)
loader = DataLoader(data, batch_size=MICRO, sampler=sampler)
state = samebits.elastic.TorchState(
    model,
    optimizer,
    sampler=sampler,
    schedule=schedule,
    by_epoch=by_epoch,
    scaler=scaler,
    epoch=0,
    counted=0,
    global_batch=MICRO * WORKERS,
    micro_batch=MICRO,
)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    while state.completed_steps < args.steps:
        assert len(loader) == -(-(SAMPLES - sampler.consumed) // (MICRO * WORKERS)), "the optimizer steps that are left"
        for number, (inputs, labels) in enumerate(loader):
            before = state.completed_steps
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(inputs), labels)
            net.seen += torch.bincount(labels, minlength=10)
            scaler.scale(loss).backward()
            if state.completed_steps in args.gate:
                wait_at_gate(state.completed_steps, state.check_host_updates)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            sampler.record_batch(number, MICRO)
            state.counted += 1
            state.commit()
            if state.completed_steps > before:
                print(f"step {state.completed_steps} of {samebits.get_world_size()}", flush=True)
            if state.completed_steps == args.steps:
                return
        state.epoch += 1
        by_epoch.step()
        net[3].p *= 0.8
        sampler.set_epoch(state.epoch)


train(state)
digest = hashlib.sha256()
for _, one in sorted(net.state_dict().items()):
    digest.update(one.detach().numpy().tobytes())
digest.update(repr((state.epoch, state.counted, scaler.state_dict(), schedule.get_last_lr())).encode())
print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)
