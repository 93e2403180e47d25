"""A training script with common additions to a step: accumulation, mixed precision, several optimizers and more.

Same model and data as ``probe``, other loops. The options decide the bits; where it dies (``--kill``) must not.
``micro`` is an additional kill point: after the backward pass of that micro-batch, counted from 1 over the run.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.kill_points import KillPoints
from tests.system.probe import BATCH, BUCKET_CAP_MB, FEATURES, SAMPLES, Shuffled, sha256_of


class Rider:
    """One process's training."""

    def __init__(self, args: argparse.Namespace, points: KillPoints) -> None:
        self.args = args
        self.points = points
        torch.manual_seed(7)
        data = torch.Generator().manual_seed(11)
        images = torch.randn(SAMPLES, FEATURES, generator=data)
        labels = torch.randint(0, 10, (SAMPLES,), generator=data)
        self.sampler = samebits.ElasticSampler(range(SAMPLES), shuffle=True, seed=5)
        self.loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, sampler=self.sampler)
        self.bare = Shuffled(norm=args.batch_norm)
        module: nn.Module = self.bare
        if args.compile:
            module = torch.compile(self.bare, backend="aot_eager")  # type: ignore[assignment]
        self.model = DistributedDataParallel(
            module,
            # torch.compile wants the first bucket to be smallest
            bucket_cap_mb=None if args.compile else BUCKET_CAP_MB,
            gradient_as_bucket_view=args.bucket_view,
            find_unused_parameters=args.find_unused,
            static_graph=args.static_graph,
        )
        weights, biases = ([one for one in module.parameters() if (one.ndim == 1) is flat] for flat in (False, True))
        if args.two_optimizers:
            self.optimizers: list[torch.optim.Optimizer] = [
                torch.optim.Adam(weights, lr=0.01),
                torch.optim.SGD(biases, lr=0.05, momentum=0.9),
            ]
        else:
            self.optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01)]
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizers[0], max_lr=0.02, total_steps=args.steps + 1)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.amp, init_scale=2.0**10, growth_interval=7)
        others = {f"optimizer_{index}": one for index, one in enumerate(self.optimizers[1:], start=1)}
        self.state = samebits.elastic.TorchState(
            self.model,
            self.optimizers[0],
            sampler=self.sampler,
            schedule=self.schedule,
            scaler=self.scaler,
            average=torch.zeros(10),
            history=[0],
            epoch=0,
            step=0,
            micro=0,
            rng="per_step",
            checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=args.interval, keep_checkpoint_max=3),
            **others,
        )

    def train(self, state: samebits.elastic.TorchState) -> None:
        """The function passed to ``elastic.run``."""
        while state.step < self.args.steps:
            for batch, (images, labels) in enumerate(self.loader):
                self.micro_batch(state, batch, images, labels)
                if state.step == self.args.steps:
                    return
            state.epoch += 1
            self.sampler.set_epoch(state.epoch)

    def micro_batch(
        self, state: samebits.elastic.TorchState, batch: int, images: torch.Tensor, labels: torch.Tensor
    ) -> None:
        ends_window = (state.micro + 1) % self.args.accumulate == 0
        with contextlib.nullcontext() if ends_window or not self.args.no_sync else self.model.no_sync():
            with torch.autocast("cpu", enabled=self.args.amp, dtype=torch.bfloat16):
                logits = self.model(images)
            loss = F.cross_entropy(logits.float(), labels) / self.args.accumulate
            self.scaler.scale(loss).backward()
        state.micro += 1
        state.average.mul_(0.9).add_(logits.detach().float().mean(0))
        state.history.append(int(labels[0]))
        self.points.here("micro", state.micro)
        self.sampler.record_batch(batch, BATCH)
        if ends_window:
            self.step(state)
        if not ends_window or state.step % self.args.commit_every == 0 or state.step == self.args.steps:
            state.commit()
            self.points.here("committed", state.step)
        if ends_window:
            print(f"epoch {state.epoch} step {state.step} loss {loss.item():.6f}", flush=True)

    def step(self, state: samebits.elastic.TorchState) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.schedule.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        del state.history[:-5]
        state.step += 1
        self.points.here("stepped", state.step)
        if self.args.reduce_after:
            dist.all_reduce(torch.ones(1))  # it fails between the step and its commit if a peer is lost there
        if self.args.clamp:
            with torch.no_grad():
                for parameter in self.bare.parameters():
                    parameter.clamp_(-0.5, 0.5)


def main() -> None:
    args = parse_arguments()
    points = KillPoints(args.kill, args.marks)
    points.install()
    samebits.init()
    torch.use_deterministic_algorithms(True)
    rider = Rider(args, points)
    samebits.elastic.run(rider.train)(rider.state)
    average = ",".join(f"{value:.9g}" for value in rider.state.average.tolist()) if samebits.get_rank() == 0 else ""
    print(f"average {average} history {rider.state.history}", flush=True)
    print(f"final step={rider.state.step} sha256={sha256_of(rider.bare)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training script with a user's loop around each step.")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--no-sync", action="store_true", help="reduce gradients in a window's last micro-batch only")
    parser.add_argument("--commit-every", type=int, default=1, help="steps between two commits")
    parser.add_argument("--reduce-after", action="store_true", help="a collective between every step and its commit")
    parser.add_argument("--clamp", action="store_true", help="change the weights by hand after every step")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16, with a gradient scaler")
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile the module")
    parser.add_argument("--two-optimizers", action="store_true")
    parser.add_argument("--bucket-view", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("--find-unused", action="store_true", help="find_unused_parameters")
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="taken for the probe's; nothing is slept here")
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT[:NUMBER]")
    parser.add_argument("--marks", type=Path, default=Path(), help="where a kill that has happened is marked")
    return parser.parse_args()


if __name__ == "__main__":
    main()
