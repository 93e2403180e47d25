"""FSDP2 on random data: a model that no rank holds completely, with everything a step depends on.

It prints every step and finally the hash of the full weights, gathered from all ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.kill_points import KillPoints

FEATURES = 13
WIDTH = 9  # no multiple of the ranks: shards differ in size, and a rank may have no part of a bias
BATCH = 8
SAMPLES = 512


class Layers(nn.Module):
    """float32 (n, FEATURES) to (n, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.ones(1))  # held by one rank only

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + F.dropout(self.second(x).tanh(), 0.1, self.training)
        logits: torch.Tensor = self.last(x) * self.scale
        return logits


def sharded() -> Layers:
    """Shard the model as a script does before ``elastic.run``."""
    model = Layers()
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    return model


def whole_sha256(model: nn.Module) -> str:
    """Hash the full weights; a collective if they are sharded."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())  # type: ignore[attr-defined]
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--rng", default="per_step")
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT[:NUMBER]")
    parser.add_argument("--marks", type=Path, default=Path(), help="where a kill that has happened is marked")
    parser.add_argument("--begin-with", type=Path, help="a directory of torch.distributed.checkpoint")
    args = parser.parse_args()

    points = KillPoints(args.kill, args.marks)
    points.install()
    samebits.init()
    if not dist.is_initialized():  # ENABLE_RECOVERY=0: fully_shard does everything, in a world of that size
        dist.init_process_group()
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    images, labels = torch.randn(SAMPLES, FEATURES), torch.randint(0, 5, (SAMPLES,))
    sampler = samebits.ElasticSampler(range(SAMPLES), shuffle=True, seed=1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        schedule=schedule,
        epoch=0,
        step=0,
        rng=args.rng,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=args.interval, keep_checkpoint_max=3),
    )
    model.second.register_full_backward_hook(lambda *_: points.here("backward", state.step + 1))
    if args.begin_with is not None:
        samebits.elastic.load_dcp(state, args.begin_with)

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> str:
        while state.step < args.steps:
            for batch, (inputs, targets) in enumerate(loader):
                time.sleep(args.pause_ms / 1000)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a collective of DTensor itself
                optimizer.step()
                schedule.step()
                sampler.record_batch(batch, BATCH)
                state.step += 1
                points.here("stepped", state.step)
                state.commit()
                points.here("committed", state.step)
                print(f"epoch {state.epoch} step {state.step} loss {loss.item():.6f} at 0", flush=True)
                if state.step == args.steps:
                    break
            else:
                state.epoch += 1
                sampler.set_epoch(state.epoch)
        sha256 = whole_sha256(model)
        points.here("function_returned")
        return sha256

    sha256 = train(state) or whole_sha256(model)
    points.here("train_returned")
    print(f"final step={state.step} sha256={sha256}", flush=True)


if __name__ == "__main__":
    main()
