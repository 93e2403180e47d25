"""A mesh job with one feature of torch, on random data: ``feature_script.py --use NAME … [--kill RANK:POINT:STEP …]``.

Without recovery (``ENABLE_RECOVERY=0``) torch alone does everything, so the final hashes of both must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard, distribute_tensor

import samebits
from tests.system.kill_points import KillPoints

WIDTH, STEPS = 16, 8
EXPERTS, SAMPLES, LENGTH = 4, 12, 8


class Block(nn.Module):
    """float32 (n, WIDTH) to (n, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Experts(nn.Module):
    """Send each part of the samples to another rank's expert and back, as expert parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = all_to_all_single(torch.empty_like(x), x)
        back = self.expert(there)
        y: torch.Tensor = all_to_all_single(torch.empty_like(back), back)
        return y


class Routed(nn.Module):
    """Send each sample to the expert that a router chooses; each rank along "ep" has a part of the experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.router = mesh, nn.Linear(WIDTH, EXPERTS)
        experts = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.experts = nn.Parameter(distribute_tensor(experts, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group, ranks = self.mesh.get_group(), self.mesh.size()
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=EXPERTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)  # counts of each rank's samples for the experts here
        there, here = (one.view(ranks, -1).sum(1).tolist() for one in (sent, received))
        given = all_to_all_single_autograd(x[order], here, there, group)
        experts: Any = self.experts
        own = experts.to_local()
        expert = torch.arange(len(own)).repeat(ranks).repeat_interleave(received)
        done = torch.zeros_like(given)
        for number, one in enumerate(own):
            rows = (expert == number).nonzero()[:, 0]
            done = done.index_add(0, rows, F.gelu(given[rows] @ one))
        back = all_to_all_single_autograd(done, there, here, group)
        y: torch.Tensor = x + torch.zeros_like(x).index_add(0, order, back) * weight[:, None]
        return y


class Context(nn.Module):
    """Attend from this rank's part of the sequences, (n, LENGTH / ranks, WIDTH), to the parts of all along "cp"."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.qkv = mesh, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, own_k, own_v = self.qkv(x).chunk(3, -1)
        group = self.mesh.get_group()
        k, v = (all_gather_tensor_autograd(one.contiguous(), 1, group) for one in (own_k, own_v))
        y: torch.Tensor = x + F.scaled_dot_product_attention(q, k, v)
        return y


def distributed(uses: Callable[[str], bool], model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    """Divide a model among the ranks."""
    if uses("replicate"):
        return replicate(model)
    apply: Any = replicate_by_fsdp if uses("replicate-fsdp") else fully_shard
    options: dict[str, Any] = {"reshard_after_forward": 2} if uses("reshard") else {}
    if uses("routed"):
        return fully_shard(model, mesh=mesh, ignored_params={model[1].experts})
    for block in model.children():
        apply(block, mesh=mesh, **options)
    return apply(model, mesh=mesh)


def sha256(*modules: nn.Module) -> str:
    """Hash the whole values; a collective if they are sharded."""
    digest = hashlib.sha256()
    for module in modules:
        for value in module.state_dict().values():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--use", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT:STEP")
    parser.add_argument("--marks", type=Path, default=Path())
    args = parser.parse_args()
    uses: Callable[[str], bool] = set(args.use).__contains__

    points = KillPoints(args.kill, args.marks)
    points.install()
    samebits.init()
    if not dist.is_initialized():  # ENABLE_RECOVERY=0
        dist.init_process_group()
    torch.manual_seed(2)
    torch.use_deterministic_algorithms(True)
    sizes = (int(os.environ["WORKER_NUM"]),)
    has_mesh = not (uses("replicate") or uses("replicate-fsdp"))
    name = "ep" if uses("routed") else "cp" if uses("context") else "dp_shard"
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=(name,)) if has_mesh else None
    if mesh is not None and (uses("routed") or uses("context")):
        model = nn.Sequential(Block(), Routed(mesh) if uses("routed") else Context(mesh))
    else:
        model = nn.Sequential(Block(), Experts() if uses("experts") else Block())
    if uses("checkpointing"):
        checkpoint(model[0])
    if uses("compile"):
        model[0].compile()
    model = distributed(uses, model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=uses("foreach"), fused=not uses("foreach"))
    scaler = torch.amp.GradScaler("cpu", enabled=uses("scaler"), init_scale=64.0, growth_interval=3)
    average = None
    if uses("average"):
        average = distributed(uses, nn.Sequential(Block(), Block()).requires_grad_(False), mesh)
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        scaler=scaler,
        **({} if average is None else {"average": average}),
        rng="per_step",
        seed=3,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=3),
    )
    model[1].register_forward_hook(lambda *_: points.here("forward", state.completed_steps + 1))
    optimizer.register_step_pre_hook(lambda *_: points.here("stepping", state.completed_steps + 1))

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> str:
        while state.completed_steps < STEPS:
            if uses("context"):
                inputs = torch.randn(2, LENGTH, WIDTH).chunk(dist.get_world_size(), 1)[dist.get_rank()]
            else:
                inputs = torch.randn(SAMPLES if uses("routed") else 4, WIDTH) + dist.get_rank()
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=uses("foreach"))
            scaler.step(optimizer)
            scaler.update()
            if average is not None:
                with torch.no_grad():
                    for one, other in zip(average.parameters(), model.parameters(), strict=True):
                        one.lerp_(other, 0.1)
            state.commit()
            points.here("committed", state.completed_steps)
        return sha256(model, *([] if average is None else [average]))

    print(f"final step={STEPS} sha256={train(state)}", flush=True)


if __name__ == "__main__":
    main()
