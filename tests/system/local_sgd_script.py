"""Local SGD on random data; every rank prints each of its steps and the number of averages so far."""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.gate import wait_at_gate
from tests.system.probe import FEATURES, Shuffled, sha256_of

BATCH = 8
SAMPLES = 4096

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=64)
parser.add_argument("--sync-every", type=int, default=8)
parser.add_argument("--diloco", action="store_true")
parser.add_argument("--pause-ms", type=float, default=20.0)
parser.add_argument("--gate", type=int, default=-1, help="wait behind so many steps until the test opens it")
args = parser.parse_args()

samebits.init()
torch.manual_seed(3)
torch.use_deterministic_algorithms(True)
images, labels = torch.randn(SAMPLES, FEATURES), torch.randint(0, 10, (SAMPLES,))
sampler = samebits.ElasticSampler(range(SAMPLES), seed=1)
loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, sampler=sampler, generator=torch.Generator())
model = Shuffled(norm=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True) if args.diloco else None
state = samebits.elastic.LocalSGD(
    samebits.elastic.TorchState(model, optimizer, sampler=sampler, rng="per_step", step=0),
    sync_every=args.sync_every,
    outer_optimizer=outer,
)


@samebits.elastic.run
def train(state: samebits.elastic.LocalSGD) -> None:
    print(f"begins at own step {state.step}, local {state.local_steps}, average {state.completed_steps}", flush=True)
    for batch, (inputs, targets) in enumerate(loader):
        if state.step == args.steps:
            return
        if state.step == args.gate:
            wait_at_gate(args.gate)
        time.sleep(args.pause_ms / 1000)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        sampler.record_batch(batch, BATCH)
        state.step += 1
        print(f"own step {state.step} local {state.local_steps}", flush=True)
        state.commit()


train(state)
print(f"final step={state.step} sha256={sha256_of(model)}", flush=True)
