"""A training that logs its steps and whose runs differ as the test's environment says."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.gate import wait_at_gate
from tests.system.probe import BUCKET_CAP_MB, FEATURES, Shuffled, sha256_of

BATCH = 8
SAMPLES = 500
LR_FROM = "REPLAY_LR_FROM"
"""Environment variable: from this step on the learning rate is different."""
SKIP_FROM = "REPLAY_SKIP_FROM"
"""Environment variable: from this step on the loop records one sample fewer than it was given."""
NOISE_AT = "REPLAY_NOISE_AT"
"""Environment variable: at this step a value outside the state enters the weights."""

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--interval", type=int, default=30)
parser.add_argument("--pause-ms", type=float, default=10.0)
parser.add_argument("--gate", type=int, default=-1, help="wait behind so many steps until the test opens it")
parser.add_argument("--record-after", action="store_true", help="record a batch after its step, not before")
parser.add_argument("--digest-every", type=int, default=1)
parser.add_argument("--on-divergence", default="raise")
args = parser.parse_args()


def due(name: str, step: int) -> bool:
    return name in os.environ and step >= int(os.environ[name])


samebits.init()
torch.manual_seed(3)
torch.use_deterministic_algorithms(True)
images, labels = torch.randn(SAMPLES, FEATURES), torch.randint(0, 10, (SAMPLES,))
sampler = samebits.ElasticSampler(range(SAMPLES), seed=5)
loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, sampler=sampler, generator=torch.Generator())
bare = Shuffled(norm=False)
model = DistributedDataParallel(bare, bucket_cap_mb=BUCKET_CAP_MB)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = samebits.elastic.TorchState(
    model,
    optimizer,
    sampler=sampler,
    epoch=0,
    step=0,
    rng="per_step",
    checkpoint=samebits.CheckpointConfig(
        save_checkpoint_steps=args.interval,
        keep_checkpoint_max=3,
        step_log=samebits.StepLog(digest_every=args.digest_every, on_divergence=args.on_divergence),
    ),
)


def one_step(state: samebits.elastic.TorchState, batch: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    if state.step == args.gate:
        wait_at_gate(args.gate, state.check_host_updates)
    number = state.step + 1
    time.sleep(args.pause_ms / 1000)
    for group in optimizer.param_groups:
        group["lr"] = 0.02 if due(LR_FROM, number) else 0.01
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    if due(NOISE_AT, number) and number == int(os.environ[NOISE_AT]):
        for parameter in model.parameters():
            parameter.grad += 0.001
    size = BATCH - 1 if due(SKIP_FROM, number) else BATCH
    if args.record_after:
        optimizer.step()
        sampler.record_batch(batch, size)
    else:
        sampler.record_batch(batch, size)
        optimizer.step()
    state.step = number
    state.commit()
    print(f"epoch {state.epoch} step {number} loss 0.0 at {time.monotonic():.6f}", flush=True)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    while state.step < args.steps:
        for batch, (inputs, targets) in enumerate(loader):
            one_step(state, batch, inputs, targets)
            if state.step == args.steps:
                return
        state.epoch += 1
        sampler.set_epoch(state.epoch)


train(state)
print(f"final step={state.step} sha256={sha256_of(bare)}", flush=True)
