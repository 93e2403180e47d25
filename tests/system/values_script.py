"""A state of values that are easily restored inexactly: layouts, nested moments, dict subclasses.

The convolutions and their moments are channels_last, and the update is scaled by norms, whose bits depend on that.
Halfway a frozen layer is added to the optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samebits
from samebits.training.state import snapshot
from tests.system.gate import wait_at_gate
from tests.system.kill_points import KillPoints

STEPS, THAWED_AT = 24, 8

parser = argparse.ArgumentParser()
parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT:NUMBER")
parser.add_argument("--marks", type=Path, default=Path())
parser.add_argument("--gate", type=int, default=-1, help="wait behind so many steps until the test opens it")
args = parser.parse_args()
points = KillPoints(args.kill, args.marks)


class Scaled(torch.optim.Optimizer):
    """An optimizer like LAMB, with a third moment as 8-bit codes, a float64 scale, and a deque of gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": np.float64(0.01)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                kept = self.state[one]
                if not kept:
                    kept["m"], kept["v"] = torch.zeros_like(one), torch.zeros_like(one)
                    kept["codes"] = {
                        "q": torch.zeros_like(one, dtype=torch.int8),
                        "scale": [one.new_zeros(()).double()],
                    }
                    kept["last"] = deque(maxlen=2)
                kept["m"].mul_(0.9).add_(one.grad, alpha=0.1)
                kept["v"].mul_(0.99).addcmul_(one.grad, one.grad, value=0.01)
                wide = kept["codes"]["q"].double() * kept["codes"]["scale"][0] * 0.9 + one.grad.double()
                kept["codes"]["scale"][0] = wide.abs().max() / 127 + 1e-12
                kept["codes"]["q"] = (wide / kept["codes"]["scale"][0]).round().to(torch.int8)
                kept["last"].append(one.grad.clone())
                update = kept["m"] / (kept["v"].sqrt() + 1e-6) + wide.float() + kept["last"][0]
                one.add_(update * (one.norm() / (update.norm() + 1e-6)).clamp(0, 10), alpha=-float(group["lr"]))


samebits.init()
torch.manual_seed(3)
torch.use_deterministic_algorithms(True)
frozen = nn.Conv2d(3, 17, 3)
net = nn.Sequential(frozen, nn.ReLU(), nn.Conv2d(17, 33, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(33, 5))
net.to(memory_format=torch.channels_last)
model = DistributedDataParallel(net)
averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
alpha = torch.zeros(1, requires_grad=True)
optimizer = Scaled([*(one for layer in list(net)[1:] for one in layer.parameters()), alpha])
state = samebits.elastic.TorchState(
    model,
    optimizer,
    averaged=averaged,
    alpha=alpha,
    schedule=torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 8, 20], gamma=0.5),
    seen=Counter(),
    per_class=defaultdict(list),
    order=OrderedDict(a=1, b=2),
    window=deque(maxlen=3),
    best=np.float32(9),
    done=set(),
    rng="per_step",
    seed=5,
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=5),
)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    while state.completed_steps < STEPS:
        step = state.completed_steps
        if step == args.gate:
            wait_at_gate(step, state.check_host_updates)
        if step >= THAWED_AT and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(frozen.parameters()), "lr": np.float64(0.005)})
        generator = torch.Generator().manual_seed(step * 10 + samebits.get_rank())
        inputs = torch.randn(8, 3, 12, 12, generator=generator).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), torch.randint(0, 5, (8,), generator=generator))
        points.here("forward", step)
        (loss + 0.0 * alpha.sum()).backward()
        alpha.grad = torch.full_like(alpha, 0.1 * (step + 1))
        optimizer.step()
        averaged.update_parameters(net)
        state.schedule.step()
        state.seen[step % 3] += 1
        state.per_class[step % 2].append(np.int64(step))
        state.order.move_to_end("a" if step % 2 else "b")
        state.window.append((step, torch.full((2,), step, dtype=torch.complex128)))
        state.best = min(state.best, np.float32(1 / (step + 1)))
        state.done.add((step, "ok"))
        state.commit()
        print(f"epoch 0 step {state.completed_steps} loss {loss.item():.5f} at {time.monotonic():.4f}", flush=True)


train(state)
tree, parts = snapshot.split(state.contents(), "state")  # types, dtypes, strides and bits
form = repr(tree).encode() + b"".join(f"{one.name} {one.dtype}".encode() + bytes(one.data) for one in parts)
print(f"final step={state.completed_steps} sha256={hashlib.sha256(form).hexdigest()}", flush=True)
