"""The tutorial's script with one of several mistakes that users make.

``--wrong``: ``no-ddp``, ``sampler``, ``outside``, ``set-epoch``; or an allowed difference: ``batch-norm``; or
``nothing``.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.gate import wait_at_gate

parser = argparse.ArgumentParser()
parser.add_argument("--wrong", default="nothing")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--pause-ms", type=float, default=0.0)
parser.add_argument("--wrong-from", type=int, default=0, help="the first step that goes wrong")
parser.add_argument("--late-s", type=float, default=0.0, help="how much later than the others rank 0 returns")
parser.add_argument("--gate", type=int, default=-1, help="wait behind so many steps until the test opens it")
arguments = parser.parse_args()


class Net(torch.nn.Module):
    """A linear layer, batch statistics, and a scale that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.norm(self.linear(inputs)) * self.scale


samebits.init()
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
sampler = samebits.elastic.ElasticSampler(data, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=32, sampler=sampler, generator=torch.Generator())
net: torch.nn.Module = Net()
model = net if arguments.wrong == "no-ddp" else DistributedDataParallel(net, broadcast_buffers=False)
if arguments.wrong != "batch-norm":
    net.norm.track_running_stats = False
    net.norm.running_mean = net.norm.running_var = net.norm.num_batches_tracked = None
optimizer = torch.optim.Adam([one for one in net.parameters() if one.requires_grad])
state = samebits.elastic.TorchState(
    model,
    optimizer,
    sampler=sampler,
    epoch=0,
    rng="per_step",
    seed=1,
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=arguments.save_every),
)
iterations = 0


def go_wrong() -> None:
    """Make the mistake, before the commit of the step."""
    if state.completed_steps < arguments.wrong_from:
        return
    if arguments.wrong == "sampler" and samebits.get_rank() == 1:
        sampler.consumed += 8
    if arguments.wrong == "outside":
        with torch.no_grad():
            net.scale += 0.01 * samebits.get_rank()


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    """Train epochs until there are enough."""
    global iterations
    while state.epoch < arguments.epochs:
        if arguments.wrong == "set-epoch":  # as a framework does that counts in its own process
            sampler.set_epoch(iterations)
            iterations += 1
        for batch, (inputs, labels) in enumerate(loader):
            if state.completed_steps == arguments.gate:
                wait_at_gate(arguments.gate, state.check_host_updates)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            sampler.record_batch(batch, 32)
            go_wrong()
            state.commit()
            print(f"epoch {state.epoch} step {state.completed_steps} loss 0 at {time.monotonic():.4f}", flush=True)
            time.sleep(arguments.pause_ms / 1000)
        state.epoch += 1
        if arguments.wrong != "set-epoch":
            sampler.set_epoch(state.epoch)
    if samebits.get_rank() == 0:
        time.sleep(arguments.late_s)


train(state)
weights = b"".join(one.detach().numpy().tobytes() for one in net.parameters())
print(f"final step={state.completed_steps} sha256={hashlib.sha256(weights).hexdigest()}", flush=True)
