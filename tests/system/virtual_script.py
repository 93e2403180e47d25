"""An ordinary DistributedDataParallel script with virtual workers, and everything that could depend on the world size.

Dropout, BatchNorm, autocast with a gradient scaler, clipping, momentum, a schedule for each step and one for each
epoch. It waits at gates inside a step: the ranks that are left then have computed some of its micro-batches. With
``--mesh``, the model is sharded over replicas and shards (HSDP), tensor parallel with three sizes, and has LayerNorm
instead.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.gate import POLL_S, wait_at_gate
from tests.system.kill_points import KillPoints

SAMPLES, FEATURES, MICRO, WORKERS = 150, 16, 4, 8  # the last global batch of an epoch is filled up
WIDTH = 33  # no multiple of the ranks: shards differ in size
NAMES = ("dp_replicate", "dp_shard", "tp")
WITHIN_S = 120.0

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--gate", type=int, action="append", default=[], help="wait in the step after so many steps")
parser.add_argument("--mesh", type=int, nargs="+", metavar="SIZE", help="replicas, shards, tensor-parallel ranks")
parser.add_argument("--interval", type=int, default=50, help="steps between checkpoints")
parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT:STEP")
parser.add_argument("--marks", type=Path, default=Path(), help="where a kill that has happened is marked")
args = parser.parse_args()
stepped_at = {int(one.split(":")[2]) for one in args.kill if one.split(":")[1] in ("stepped", "committed")}


class Cooled(nn.Module):
    """Divides by a plain attribute that each forward pass changes."""

    temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.98
        return x / self.temperature


def wait_until_all_have_stepped(step: int) -> None:
    """A rank that dies while another waits for all gradients may leave their shards at different steps."""
    (args.marks / f"stepped-{step}-{samebits.get_rank()}").touch()
    deadline = time.monotonic() + WITHIN_S
    while len(list(args.marks.glob(f"stepped-{step}-*"))) < samebits.get_world_size():
        assert time.monotonic() < deadline, "a rank has not taken the step"
        time.sleep(POLL_S)


points = KillPoints(args.kill, args.marks)
points.install()
samebits.init()
torch.manual_seed(3)
torch.use_deterministic_algorithms(True)
data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, 10, (SAMPLES,)))
is_tensor_parallel = args.mesh is not None and len(args.mesh) == len(NAMES)
norm: Any = nn.BatchNorm1d
if args.mesh:  # clip_grad_norm_ needs all parameters on the same mesh
    norm = functools.partial(nn.LayerNorm, elementwise_affine=not is_tensor_parallel)
net = nn.Sequential(
    *(nn.Linear(FEATURES, WIDTH), norm(WIDTH), nn.ReLU(), nn.Dropout(0.3)),
    *(nn.Linear(WIDTH, 10), norm(10), Cooled()),
)
net.register_buffer("seen", torch.zeros(10, dtype=torch.int64))  # no batch statistics: virtual worker 0's
model: nn.Module
if args.mesh:
    mesh = init_device_mesh("cpu", tuple(args.mesh), mesh_dim_names=NAMES[: len(args.mesh)])
    if is_tensor_parallel:
        plan = {"0": ColwiseParallel(output_layouts=Replicate()), "4": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(net, mesh["tp"], plan)
    fully_shard(net[0], mesh=mesh[NAMES[:2]])
    model = fully_shard(net, mesh=mesh[NAMES[:2]])
else:
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
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=args.interval),
)


def forward(_: object, __: object, output: torch.Tensor) -> None:
    points.here("forward", state.completed_steps + 1)
    output.register_hook(lambda _: points.here("backward", state.completed_steps + 1))


def stepped(*_: object) -> None:
    """Called behind SameBits' own hook, which counts the step."""
    if state.completed_steps in stepped_at:
        wait_until_all_have_stepped(state.completed_steps)
    points.here("stepped", state.completed_steps)


if args.kill:
    net[0].register_forward_hook(forward)
    optimizer.register_step_pre_hook(lambda *_: points.here("stepping", state.completed_steps + 1))
    optimizer.register_step_post_hook(stepped)


def sha256() -> str:
    """Hash everything that the job computes; a collective if the model is sharded."""
    digest = hashlib.sha256()
    for _, one in sorted(net.state_dict().items()):
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        digest.update(whole.detach().numpy().tobytes())
    digest.update(repr((state.epoch, state.counted, scaler.state_dict(), schedule.get_last_lr())).encode())
    return digest.hexdigest()


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> str:
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
                points.here("committed", state.completed_steps)
                print(f"step {state.completed_steps} of {samebits.get_world_size()}", flush=True)
            if state.completed_steps == args.steps:
                return sha256()
        state.epoch += 1
        by_epoch.step()
        net[3].p *= 0.8
        sampler.set_epoch(state.epoch)
    return sha256()


print(f"final step={args.steps} sha256={train(state) or sha256()}", flush=True)
