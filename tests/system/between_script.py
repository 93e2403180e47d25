"""A training script that changes its model between commits: swapped averages, a frozen half, modes, buffers.

A generator and a discriminator, each in DistributedDataParallel. The discriminator is frozen for the generator's half
of a step, and the generator's first layer until ``THAWED_AT``. Every ``EVERY`` steps the averaged weights are swapped
in (``--swap``), and the model is put into eval mode and evaluated with a collective, before that step's commit or after
it (``--behind``). ``--kill`` accepts the points ``evaluates`` and ``frozen``, each with the number of completed steps.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samebits
from tests.system.kill_points import KillPoints
from tests.system.probe import sha256_of

STEPS, EVERY, THAWED_AT = 20, 5, 8


class Centered(nn.Linear):
    """Subtracts a mean that is not saved, and creates another buffer in its first forward pass."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("mean", torch.zeros(width), persistent=False)
        self.register_buffer("last", None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        last = self.mean if self.last is None else self.last
        if self.training:
            self.mean.lerp_(rows.detach().mean(0), 0.1)
            self.last = rows.detach().mean(0)
        return super().forward(rows - self.mean - last)


class Trained:
    """One process's training."""

    def __init__(self, args: argparse.Namespace, points: KillPoints) -> None:
        self.args, self.points = args, points
        torch.manual_seed(7)
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), Centered(16))
        self.discriminator = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        thawed_later = DistributedDataParallel(self.generator, find_unused_parameters=True)
        self.both = thawed_later, DistributedDataParallel(self.discriminator)
        self.optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in self.both]
        self.average = copy.deepcopy(self.generator)
        self.early = [one.data for one in self.generator.parameters()] if args.swap == "early" else []
        self.generator[0].requires_grad_(False)
        self.state = samebits.elastic.TorchState(
            self.both[0],
            self.optimizers[0],
            discriminator=self.both[1],
            optimizer_2=self.optimizers[1],
            average=self.average,
            rng="per_step",
            seed=3,
            checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=4, keep_checkpoint_max=2),
        )

    def train(self, state: samebits.elastic.TorchState) -> None:
        """The function passed to ``elastic.run``."""
        while state.completed_steps < STEPS:
            done = state.completed_steps
            if done == THAWED_AT:
                self.generator[0].requires_grad_(True)
            if self.args.behind and done % EVERY == 0:
                self.evaluate(done)
            self.step(done)
            if not self.args.behind and done % EVERY == EVERY - 1:
                self.evaluate(done)
            state.commit()

    def step(self, done: int) -> None:
        generator, discriminator = self.both
        noise, real = torch.randn(8, 8), torch.randn(8, 16)
        self.optimizers[1].zero_grad()
        loss = F.softplus(discriminator(torch.cat([generator(noise).detach(), real]))).mean()
        loss.backward()
        self.optimizers[1].step()
        self.discriminator.requires_grad_(False)
        self.optimizers[0].zero_grad()
        self.points.here("frozen", done)
        F.softplus(-self.discriminator(generator(noise))).mean().backward()
        self.optimizers[0].step()
        self.discriminator.requires_grad_(True)
        with torch.no_grad():
            for one, new in zip(self.average.parameters(), self.generator.parameters(), strict=True):
                one.lerp_(new, 0.1)

    @torch.no_grad()
    def evaluate(self, done: int) -> None:
        kept = self.swap_in()
        self.generator.eval()
        watched: list[Any] = []
        hook = self.generator[0].register_forward_hook(
            lambda _module, _args, output: watched.append(output) or output * 2
        )
        loss = self.generator(torch.ones(4, 8)).square().mean()
        self.points.here("evaluates", done)
        dist.all_reduce(loss)
        hook.remove()
        self.generator.train()
        self.swap_back(kept)
        print(f"step {done} evaluated {loss.item():.6f}", flush=True)

    def swap_in(self) -> list[torch.Tensor]:
        pairs = list(zip(self.generator.parameters(), self.average.parameters(), strict=True))
        if self.args.swap == "assign":
            kept: list[torch.Tensor] = list(self.generator.parameters())
            self.generator.load_state_dict(dict(self.average.named_parameters()), strict=False, assign=True)
            return kept
        if self.args.swap == "early":
            kept = [one.clone() for one in self.early]
            torch._foreach_copy_(self.early, [average.detach() for _, average in pairs])
            return kept
        if self.args.swap == "set":
            kept = [one.data for one, _ in pairs]
            for one, average in pairs:
                one.data = average.data
            return kept
        kept = [one.detach().clone() for one, _ in pairs]
        for one, average in pairs:
            one.data.copy_(average.data)
        return kept

    def swap_back(self, kept: list[torch.Tensor]) -> None:
        if self.args.swap == "assign":
            places = [(module, name) for module in self.generator.modules() for name in module._parameters]
            for (module, name), one in zip(places, kept, strict=True):
                module._parameters[name] = one  # type: ignore[assignment]
        elif self.args.swap == "early":
            torch._foreach_copy_(self.early, kept)
        else:
            for one, old in zip(self.generator.parameters(), kept, strict=True):
                if self.args.swap == "set":
                    one.data = old
                else:
                    one.data.copy_(old)


def main() -> None:
    parser = argparse.ArgumentParser(description="A training script that changes its model between commits.")
    parser.add_argument("--swap", choices=["copy", "set", "assign", "early"], default="copy")
    parser.add_argument("--behind", action="store_true", help="evaluate behind the commit, not before it")
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT[:NUMBER]")
    parser.add_argument("--marks", type=Path, default=Path(), help="where a kill that has happened is marked")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="taken for the probe's; nothing is slept here")
    args = parser.parse_args()
    points = KillPoints(args.kill, args.marks)
    points.install()
    samebits.init()
    torch.use_deterministic_algorithms(True)
    trained = Trained(args, points)
    samebits.elastic.run(trained.train)(trained.state)
    whole = nn.ModuleList([trained.generator, trained.discriminator, trained.average])
    print(f"final step={trained.state.completed_steps} sha256={sha256_of(whole)}", flush=True)


if __name__ == "__main__":
    main()
