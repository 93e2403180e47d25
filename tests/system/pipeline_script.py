"""A pipeline of stages on random data, with kills in any microbatch of a step.

The stages are spread over the "pp" dimension of a mesh; further dimensions shard or replicate each stage. The script
prints every step, and at the end the hash of the whole weights of all stages.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.kill_points import KillPoints
from tests.system.sharded_script import wait_until_all_have_stepped

WIDTH = 9  # no multiple of the ranks
CLASSES = 5
BATCH, MICROBATCHES = 8, 4
SAMPLES = 512
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class Stage(nn.Module):
    """float32 (n, WIDTH) to (n, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + F.dropout(self.second(self.norm(self.first(x)).relu()).tanh(), 0.1, self.training)
        return out


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[:, :CLASSES], targets)


def full(parameter: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()


def whole_sha256(own: dict[str, nn.Module]) -> str:
    """Hash the weights of all stages; a collective."""
    mine = {
        f"{stage}.{name}": hashlib.sha256(full(one).numpy().tobytes()).hexdigest()
        for stage, module in own.items()
        for name, one in module.named_parameters()
    }
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    merged = {name: digest for one in found for name, digest in one.items()}
    return hashlib.sha256(repr(sorted(merged.items())).encode()).hexdigest()


class Counted:
    """Reaches ``forward0``, ``forward1``, … and ``backward0``, … in a step, over all stages of this rank."""

    def __init__(self, points: KillPoints) -> None:
        self.points = points
        self.begins(0)

    def begins(self, step: int) -> None:
        self.step, self.counts = step, {"forward": 0, "backward": 0}

    def here(self, point: str) -> None:
        self.counts[point] += 1
        self.points.here(f"{point}{self.counts[point] - 1}", self.step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--dp-replicate", type=int, default=1)
    parser.add_argument("--dp-shard", type=int, default=1)
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="gpipe")
    parser.add_argument("--keeps", action="store_true", help="keep stage and schedule over calls of the function")
    parser.add_argument("--meta", action="store_true", help="build the model without memory")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interval", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT[:NUMBER]")
    parser.add_argument("--marks", type=Path, default=Path(), help="where a kill that has happened is marked")
    args = parser.parse_args()

    stepped_at = {int(one.split(":")[2]) for one in args.kill if one.split(":")[1] in ("stepped", "committed")}
    points = KillPoints(args.kill, args.marks)
    points.install()
    samebits.init()
    if not dist.is_initialized():  # ENABLE_RECOVERY=0
        dist.init_process_group()
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randint(0, CLASSES, (SAMPLES,))
    sampler = samebits.ElasticSampler(range(SAMPLES), shuffle=True, seed=1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, sampler=sampler, generator=torch.Generator())

    sizes = {"dp_replicate": args.dp_replicate, "pp": args.pp, "dp_shard": args.dp_shard}
    names = list(sizes) if args.dp_replicate * args.dp_shard > 1 else ["pp"]
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
    count = args.pp * (2 if args.schedule == "interleaved" else 1)
    with torch.device("meta" if args.meta else "cpu"):
        parts = nn.ModuleList(Stage() for _ in range(count))
    if len(names) > 1:
        for part in parts:
            fully_shard(part, mesh=mesh["dp_replicate", "dp_shard"])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=0.01)
    state = samebits.elastic.TorchState(
        parts,
        optimizer,
        pipeline=mesh["pp"],
        sampler=sampler,
        epoch=0,
        rng="per_step",
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=args.interval, keep_checkpoint_max=3),
    )
    counted = Counted(points)
    for part in parts:
        part.second.register_forward_hook(lambda *_: counted.here("forward"))
        part.second.register_full_backward_hook(lambda *_: counted.here("backward"))
    optimizer.register_step_pre_hook(lambda *_: points.here("stepping", counted.step))
    kept: list[Any] = []

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> str:
        here = mesh.get_local_rank("pp")
        own = {index: part for index, part in enumerate(parts) if index % args.pp == here}
        if not kept or not args.keeps:
            stages = [
                PipelineStage(part, index, count, torch.device("cpu"), group=mesh.get_group("pp"))
                for index, part in own.items()
            ]
            several = args.schedule == "interleaved"
            kept[:] = [SCHEDULES[args.schedule](stages if several else stages[0], MICROBATCHES, loss_fn=loss_of)]
        (schedule,) = kept
        while state.completed_steps < args.steps:
            for batch, (x, y) in enumerate(loader):
                counted.begins(state.completed_steps + 1)
                optimizer.zero_grad()
                losses: list[torch.Tensor] = []
                given = (x,) if here == 0 else ()
                schedule.step(*given, target=y if here == args.pp - 1 else None, losses=losses)
                points.here("reduced", counted.step)
                optimizer.step()
                sampler.record_batch(batch, BATCH)
                if args.dp_replicate > 1 and counted.step in stepped_at:
                    wait_until_all_have_stepped(args.marks, counted.step)
                points.here("stepped", counted.step)
                state.commit()
                points.here("committed", state.completed_steps)
                print(f"epoch {state.epoch} step {state.completed_steps} loss 0 at 0", flush=True)
                if state.completed_steps == args.steps:
                    break
            else:
                state.epoch += 1
                sampler.set_epoch(state.epoch)
        return whole_sha256({str(index): part for index, part in own.items()})

    print(f"final step={args.steps} sha256={train(state)}", flush=True)


if __name__ == "__main__":
    main()
