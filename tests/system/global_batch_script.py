"""Global batches of one size in worlds of any size: a model with dropout, Adam, and losses printed to the last bit."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.gate import wait_at_gate
from tests.system.probe import FEATURES, Shuffled, sha256_of

# the last global batch of an epoch is smaller, and so is each rank's last micro-batch
SAMPLES, SIZE, MICRO = 150, 40, 6

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--gate", type=int, action="append", default=[], help="wait behind so many steps")
args = parser.parse_args()

samebits.init()
torch.manual_seed(3)
torch.use_deterministic_algorithms(True)
data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, 10, (SAMPLES,)))
model = Shuffled(norm=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = samebits.ElasticSampler(data, seed=1)
batches = samebits.GlobalBatch(sampler, model.parameters(), size=SIZE, micro=MICRO)
loader = DataLoader(data, batch_sampler=batches, generator=torch.Generator())
state = samebits.elastic.TorchState(model, optimizer, sampler=sampler, step=0, epoch=0, rng="per_step")


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    while state.step < args.steps:
        for step in batches.steps(loader):
            if state.step in args.gate:
                wait_at_gate(state.step, state.check_host_updates)
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            loss = step.reduce()
            optimizer.step()
            state.step += 1
            state.commit()
            print(f"step {state.step} of {samebits.get_world_size()} loss {loss.hex()}", flush=True)
            if state.step == args.steps:
                return
        state.epoch += 1
        sampler.set_epoch(state.epoch)


train(state)
print(f"final step={state.step} sha256={sha256_of(model)}", flush=True)
