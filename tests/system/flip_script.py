"""A recipe with dropout in which single bits of weights or moments flip on given ranks and steps.

``--flip RANK:STEP`` (repeatable) flips one bit after the commit of that step, once, in the worker that started with
that rank; with ``--what exponent``, it sets all bits of a weight's exponent, so that the loss is not a number.
``--always`` flips the same bit after every later step too, as a script's own mistake would. ``--die RANK:STEP`` kills
the worker that started with that rank when all have committed that step, once. ``--falling`` reports a loss that is far
larger at the first steps than later.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits

parser = argparse.ArgumentParser()
parser.add_argument("--what", choices=("weight", "moment", "exponent"), default="weight")
parser.add_argument("--flip", action="append", default=[], help="RANK:STEP")
parser.add_argument("--die", action="append", default=[], help="RANK:STEP")
parser.add_argument("--always", action="store_true")
parser.add_argument("--falling", action="store_true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save-every", type=int, default=1000)
parser.add_argument("--pause-ms", type=float, default=0.0)
arguments = parser.parse_args()


def mine(pairs: list[str]) -> set[int]:
    """Return the steps of those RANK:STEP that apply to this worker."""
    return {int(step) for rank, _, step in (one.partition(":") for one in pairs) if rank == os.environ.get("NODE_ID")}


flips, deaths = mine(arguments.flip), mine(arguments.die)
flipped = 0

samebits.init()
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
data = TensorDataset(torch.randn(480, 16), torch.randint(0, 4, (480,)))
sampler = samebits.elastic.ElasticSampler(data, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=8, sampler=sampler, generator=torch.Generator())
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
state = samebits.elastic.TorchState(
    model,
    optimizer,
    sampler=sampler,
    epoch=0,
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=arguments.save_every),
)


def flip_where_it_is_time() -> None:
    """Flip one bit without a trace, as a cosmic ray does, not through a torch operator."""
    global flipped
    step = state.completed_steps
    if not (step >= min(flips, default=step + 1) if arguments.always else step in flips):
        return
    if not arguments.always:
        flips.discard(step)
        flipped += 1
    weight = net[0].weight
    target = optimizer.state[weight]["exp_avg"] if arguments.what == "moment" else weight
    memory = ctypes.c_uint32.from_address(target.data_ptr() + 4 * flipped)
    memory.value = memory.value | 0x7FC00000 if arguments.what == "exponent" else memory.value ^ 1 << 21
    print(f"flipped a bit of a {arguments.what} behind step {state.completed_steps}", flush=True)


def die_where_it_is_time() -> None:
    """Die as by kill -9 once all have committed that step; a replacement lives."""
    step = state.completed_steps
    if not any(one.endswith(f":{step}") for one in arguments.die):
        return
    Path(f"past-{step}-{os.environ['NODE_ID']}").touch()
    died = Path(f"died-{step}-{os.environ['NODE_ID']}")
    if step in deaths and not died.exists():
        while len(list(Path().glob(f"past-{step}-*"))) < int(os.environ["WORKER_NUM"]):
            time.sleep(0.01)
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    """Train epochs until there are enough."""
    while state.epoch < arguments.epochs:
        for batch, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            if arguments.falling:
                state.report(loss=2.0 + 6.0 * 0.8**state.completed_steps)
            optimizer.step()
            sampler.record_batch(batch, 8)
            state.commit()
            flip_where_it_is_time()
            print(f"epoch {state.epoch} step {state.completed_steps} loss 0 at {time.monotonic():.4f}", flush=True)
            die_where_it_is_time()
            time.sleep(arguments.pause_ms / 1000)
        state.epoch += 1
        sampler.set_epoch(state.epoch)


train(state)
moments = [value for one in net.parameters() for _, value in sorted(optimizer.state[one].items())]
content = b"".join(one.detach().numpy().tobytes() for one in [*net.parameters(), *moments])
print(f"final step={state.completed_steps} sha256={hashlib.sha256(content).hexdigest()}", flush=True)
