"""The training script of the system tests: small, fast, and sensitive to every bit that could get lost.

Dropout makes the random numbers matter, Adam the optimizer's state, a schedule its attribute, several epochs the data
position. The model has more than three gradient buckets, with parameters registered in another order than they are
used. It prints every step and dies where ``--kill`` says (``kill_points``).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.kill_points import KillPoints, Way, go

WIDTH = 32
FEATURES = 16
SAMPLES = 500  # no multiple of what the ranks take together: the last round of an epoch is padded
BATCH = 8
BUCKET_CAP_MB = 0.006  # about one layer per bucket
GATE_POLL_S = 0.002
LAST_STEP = "last-step"
"""A file beside the marks with the number of the last step, if earlier than ``--steps`` (``JobFolder.end_at``)."""
FAILS = "PROBE_FAILS"
"""Environment variable: how this process ends once it has its seat, before it trains (:class:`Way`)."""


class Shuffled(nn.Module):
    """float32 (n, FEATURES) to (n, 10); layers registered in another order than used."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.last = nn.Linear(WIDTH, 10)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(FEATURES, WIDTH)
        self.fourth = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        for layer in (self.second, self.third, self.fourth):
            x = x + F.dropout(layer(x).tanh(), 0.1, self.training)
        logits: torch.Tensor = self.last(x)
        return logits


class Probe:
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
        self.bare = Shuffled(norm=args.model == "batch-norm")
        self.by_hand = args.model == "by-hand"
        self.model: nn.Module = self.bare
        if not self.by_hand:
            self.model = DistributedDataParallel(self.bare, bucket_cap_mb=BUCKET_CAP_MB)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7, gamma=0.9)
        self.state = samebits.elastic.TorchState(
            self.model,
            self.optimizer,
            sampler=self.sampler,
            schedule=self.schedule,
            epoch=0,
            step=0,
            rng=args.rng,
            checkpoint=rhythm(args),
        )
        self.state.register_reset_callbacks([lambda: points.here("reset", self.state.step)])
        self.bare.third.weight.register_hook(lambda _: points.here("backward", self.state.step + 1))

    def train(self, state: samebits.elastic.TorchState) -> None:
        """The function passed to ``elastic.run``."""
        if self.args.fork_rank == samebits.get_rank() and state.step == 0:
            leave_a_child()
        while state.step < self.last_step():
            for batch, (images, labels) in enumerate(self.loader):
                self.step(state, batch, images, labels)
                if state.step == self.last_step():
                    self.points.here("function_returned")
                    return
            state.epoch += 1
            self.sampler.set_epoch(state.epoch)

    def last_step(self) -> int:
        """Return the last step as given by ``--steps`` or by the file."""
        said = self.args.marks / LAST_STEP
        return int(said.read_text()) if said.exists() else int(self.args.steps)

    def step(self, state: samebits.elastic.TorchState, batch: int, images: torch.Tensor, labels: torch.Tensor) -> None:
        if self.args.fail_at == state.step + 1:
            raise ValueError(f"the probe was told to fail at step {self.args.fail_at}")
        if self.args.gates and state.step % self.args.gates == 0:
            self.wait_at_gate(state)
        time.sleep(self.args.pause_ms / 1000)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        if self.by_hand:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.schedule.step()
        self.sampler.record_batch(batch, BATCH)
        state.step += 1
        self.points.here("stepped", state.step)
        if self.args.late_rank == samebits.get_rank() and state.step == self.args.fail_at - 1:
            time.sleep(1.0)
        state.commit()
        said = f"epoch {state.epoch} step {state.step} loss {loss.item():.6f} at {time.monotonic():.6f}"
        print(said + (f" queued {queued_s():.6f}" if self.args.say_queued else ""), flush=True)
        self.points.here("committed", state.step)

    def wait_at_gate(self, state: samebits.elastic.TorchState) -> None:
        """Wait until the test allows this step, or a peer is lost."""
        gate = gate_of(self.args.marks, state.step)
        if not gate.exists():
            print(f"waits at the gate of step {state.step}", flush=True)
        while not gate.exists():
            state.check_host_updates()
            time.sleep(GATE_POLL_S)


def gate_of(marks: Path, step: int) -> Path:
    """Return the file whose existence opens the gate after that many steps (``JobFolder.open_gates``)."""
    return marks / f"gate-{step}"


def main() -> None:
    args = parse_arguments()
    points = KillPoints(args.kill, args.marks)
    points.install()
    samebits.init()
    if FAILS in os.environ:
        go(Way(os.environ[FAILS]))
    if not dist.is_initialized():  # ENABLE_RECOVERY=0
        dist.init_process_group()
    torch.use_deterministic_algorithms(True)
    probe = Probe(args, points)
    samebits.elastic.run(probe.train)(probe.state)
    points.here("train_returned")
    print(f"final step={probe.state.step} sha256={sha256_of(probe.bare)}", flush=True)


def rhythm(args: argparse.Namespace) -> samebits.CheckpointConfig:
    """Return the save schedule: by seconds if given, otherwise by steps."""
    if args.save_seconds:
        return samebits.CheckpointConfig(save_checkpoint_seconds=args.save_seconds, keep_checkpoint_max=3)
    return samebits.CheckpointConfig(
        save_checkpoint_steps="auto" if args.auto else args.interval, keep_checkpoint_max=3
    )


def leave_a_child() -> None:
    """Fork a process that outlives this one, as a DataLoader worker may."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    print(f"child {pid}", flush=True)


def queued_s() -> float:
    """Return how long this process's threads have waited for a CPU so far (proc(5), schedstat)."""
    waited_ns = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def sha256_of(model: nn.Module) -> str:
    """Return a hash of all parameters in the order of their names."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The system tests' training script.")
    parser.add_argument("--model", choices=["ddp", "batch-norm", "by-hand"], default="ddp")
    parser.add_argument("--rng", choices=["per_step", "saved"], default="per_step")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--save-seconds", type=float, default=0.0, help="seconds between checkpoints, instead")
    parser.add_argument("--auto", action="store_true", help="checkpoints as often as pays, instead")
    parser.add_argument("--pause-ms", type=float, default=10.0, help="slept in every step")
    parser.add_argument("--say-queued", action="store_true", help="say with each step how long CPUs were waited for")
    parser.add_argument("--fail-at", type=int, default=0, help="raise ValueError in this step, on every rank")
    parser.add_argument("--fork-rank", type=int, help="the rank that forks a child that outlives it")
    parser.add_argument("--late-rank", type=int, help="the rank that comes to that step a second after the others")
    parser.add_argument("--gates", type=int, default=0, help="steps between two gates at which all wait for the test")
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT[:NUMBER]")
    parser.add_argument("--marks", type=Path, default=Path(), help="where a kill that has happened is marked")
    return parser.parse_args()


if __name__ == "__main__":
    main()
