"""Gradient accumulation over four micro-batches with DDP, mixed precision and a schedule, one commit per window."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.kill_points import KillPoints
from tests.system.probe import BUCKET_CAP_MB, FEATURES, Shuffled, sha256_of

BATCH = 4
WINDOW = 4
MICRO_BATCHES = 80

parser = argparse.ArgumentParser()
parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT:NUMBER")
parser.add_argument("--marks", type=Path, default=Path())
args = parser.parse_args()
points = KillPoints(args.kill, args.marks)

samebits.init()
torch.manual_seed(3)
torch.use_deterministic_algorithms(True)
data = TensorDataset(torch.randn(1024, FEATURES), torch.randint(0, 10, (1024,)))
sampler = samebits.ElasticSampler(data, seed=1)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
model = DistributedDataParallel(Shuffled(norm=True), bucket_cap_mb=BUCKET_CAP_MB)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=MICRO_BATCHES // WINDOW)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
state = samebits.elastic.TorchState(
    model,
    optimizer,
    sampler=sampler,
    schedule=schedule,
    scaler=scaler,
    micro=0,
    rng="per_step",
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=4),
)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    for batch, (inputs, targets) in enumerate(loader):
        if state.micro == MICRO_BATCHES:
            return
        is_last = state.micro % WINDOW == WINDOW - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs).float(), targets)
            scaler.scale(loss / WINDOW).backward()
        sampler.record_batch(batch, BATCH)
        state.micro += 1
        points.here("micro", state.micro)
        if is_last:
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
            points.here("stepped", state.micro)
        state.commit()
        print(f"micro {state.micro} loss {loss.item():.5f} step {state.completed_steps}", flush=True)


train(state)
print(f"final step={state.completed_steps} sha256={sha256_of(model.module)}", flush=True)
