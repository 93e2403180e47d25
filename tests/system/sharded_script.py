"""FSDP2 on random data: a model that no rank holds completely, with everything a step depends on.

With ``--mesh`` it is sharded over a mesh of two dimensions, whose first replicates (HSDP), or of one. The script prints
every step, and at the end the hash of the whole weights, gathered from all ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import samebits
from samebits.core.watch import hang_judge
from samebits.training.checkpoint.state_points import StatePoints
from samebits.training.group import meshes
from samebits.training.group.group import current_breaker
from samebits.training.process import context
from tests.system.kill_points import KillPoints

FEATURES = 13
WIDTH = 9  # no multiple of the ranks: shards differ in size, and a rank may have no part of a bias
BATCH = 8
SAMPLES = 512
PARTS = 3  # modules that fully_shard is called on: so many reductions does a backward pass have
POLL_S, HELD_S = 0.002, 120.0
FORMING_S = 3.0
NAMES = ("dp_replicate", "dp_shard")


class Layers(nn.Module):
    """float32 (n, FEATURES) to (n, 5)."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.norm = norm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.ones(1))  # held by one rank only

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + F.dropout(self.second(x).tanh(), 0.1, self.training)
        logits: torch.Tensor = self.last(x) * self.scale
        return logits


def sharded(sizes: tuple[int, ...] = ()) -> Layers:
    """Return the model as a script shards it before ``elastic.run``, over a mesh of these sizes."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[-len(sizes) :]) if sizes else None
    model = Layers(nn.LayerNorm if len(sizes) > 1 else nn.BatchNorm1d)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Held:
    """Keeps the shard 0 of a mesh of 2 x 2 in one step's last reduction until its generation has ended.

    The ranks of shard 1 have all their gradients then, and these have not.
    """

    def __init__(self, step: int, present: Callable[[], int], marks: Path) -> None:
        self._step, self._present, self._marks = step, present, marks
        self._inner, self._calls = dist.all_reduce, 0
        self._is_over = False
        dist.all_reduce = self._all_reduce

    def _all_reduce(self, *args: Any, **named: Any) -> Any:
        if self._present() == self._step and not self._is_over and samebits.get_rank() % 2 == 0:
            self._calls += 1
            if self._calls == PARTS:
                self._is_over = True
                mark_held(self._marks, self._step)
                deadline = time.monotonic() + HELD_S
                while not context.current("a held reduction").agent.interrupted:
                    assert time.monotonic() < deadline, "nobody has ended the generation"
                    time.sleep(POLL_S)
        return self._inner(*args, **named)


class HeldBeforeItsStep:
    """Keeps shard 0 of a mesh of 2 x 2 in the wait before one step until its generation has ended.

    The ranks of shard 1 take that step.
    """

    def __init__(self, step: int, present: Callable[[], int], marks: Path) -> None:
        self._step, self._present, self._marks = step, present, marks
        self._inner = StatePoints.wait_for_gradients
        self._is_over = False
        StatePoints.wait_for_gradients = lambda points: self._wait(points)  # type: ignore[method-assign]

    def _wait(self, points: StatePoints) -> None:
        self._inner(points)
        if self._present() == self._step and not self._is_over and samebits.get_rank() % 2 == 0:
            self._is_over = True
            mark_held(self._marks, self._step)
            deadline = time.monotonic() + HELD_S
            while not current_breaker().broken:
                assert time.monotonic() < deadline, "nobody has ended the generation"
                time.sleep(POLL_S)
            current_breaker().check()


class HeldWhileForming:
    """Sends one rank of a generation into a barrier while the others build the groups of the mesh."""

    def __init__(self, rank: int, generation: int) -> None:
        self._place = rank, generation
        self._inner = meshes.form_all
        meshes.form_all = self._form_all

    def _form_all(self) -> list[object]:
        present = context.current("a held formation").generation
        if present is not None and (present.rank, present.generation) == self._place:
            dist.barrier()
        return self._inner()


def mark_held(marks: Path, step: int) -> None:
    """Record that this rank is held at a step."""
    (marks / f"held-{step}-{samebits.get_rank()}").touch()


def wait_until_shard_0_is_held(marks: Path, step: int) -> None:
    """A rank that dies earlier ends the generation before the others are held; they would be held in the next one."""
    deadline = time.monotonic() + HELD_S
    while len(list(marks.glob(f"held-{step}-*"))) < samebits.get_world_size() // 2:
        assert time.monotonic() < deadline, "a rank was not held"
        time.sleep(POLL_S)


def wait_until_all_have_stepped(marks: Path, step: int) -> None:
    """A rank that dies while another waits for all gradients may leave their shards at different steps."""
    (marks / f"stepped-{step}-{samebits.get_rank()}").touch()
    deadline = time.monotonic() + HELD_S
    while len(list(marks.glob(f"stepped-{step}-*"))) < samebits.get_world_size():
        assert time.monotonic() < deadline, "a rank has not taken the step"
        time.sleep(POLL_S)


def wait_for_gate(marks: Path) -> None:
    """Wait until the test lets the job continue."""
    deadline = time.monotonic() + HELD_S
    while not (marks / "gate").exists():
        assert time.monotonic() < deadline, "the gate stays closed"
        time.sleep(POLL_S)


def whole_sha256(model: nn.Module) -> str:
    """Hash the full weights; a collective if they are sharded."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())  # type: ignore[attr-defined]
    return digest.hexdigest()


def flip(model: Layers, optimizer: torch.optim.Optimizer, what: str) -> None:
    """Flip a bit of this rank's shard of a weight, its ``exp_avg`` or its reduced gradient, without a trace.

    ``nan`` sets all bits of a weight's exponent.
    """
    weight = model.second.weight
    shard = {
        "weight": weight,
        "nan": weight,
        "moment": optimizer.state[weight].get("exp_avg"),
        "gradient": weight.grad,
    }[what].to_local()
    memory = ctypes.c_uint32.from_address(shard.data_ptr())
    memory.value = memory.value ^ 1 << 20 if what != "nan" else 0x7FC00000
    print(f"flipped a bit of a {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--rng", default="per_step")
    parser.add_argument("--buddies", action="store_true", help="keep copies as if every rank were on its own host")
    parser.add_argument("--mesh", type=int, nargs="+", default=(), metavar="SIZE")
    parser.add_argument("--hold", type=int, default=0, metavar="STEP", help="see Held")
    parser.add_argument("--hold-step", type=int, default=0, metavar="STEP", help="see HeldBeforeItsStep")
    parser.add_argument("--hold-forming", metavar="RANK:GENERATION", help="see HeldWhileForming")
    parser.add_argument("--flip", action="append", default=[], metavar="RANK:STEP:WHAT", help="see flip")
    parser.add_argument("--gate", type=int, default=0, metavar="STEP", help="wait before it for the file MARKS/gate")
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT[:NUMBER]")
    parser.add_argument("--marks", type=Path, default=Path(), help="where a kill that has happened is marked")
    parser.add_argument("--begin-with", type=Path, help="a directory of torch.distributed.checkpoint")
    args = parser.parse_args()

    stepped_at = {int(one.split(":")[2]) for one in args.kill if one.split(":")[1] in ("stepped", "committed")}
    flips = [one.split(":") for one in args.flip]
    points = KillPoints(args.kill, args.marks)
    points.install()
    if args.hold_forming is not None:
        hang_judge.FORMING_S = FORMING_S  # for the process that becomes the scheduler
        HeldWhileForming(*map(int, args.hold_forming.split(":")))
    samebits.init()
    if not dist.is_initialized():  # ENABLE_RECOVERY=0: fully_shard does everything, in a world of that size
        dist.init_process_group()
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    images, labels = torch.randn(SAMPLES, FEATURES), torch.randint(0, 5, (SAMPLES,))
    sampler = samebits.ElasticSampler(range(SAMPLES), shuffle=True, seed=1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    model = sharded(tuple(args.mesh))
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
        checkpoint=samebits.CheckpointConfig(
            save_checkpoint_steps=args.interval, keep_checkpoint_max=3, buddy_copies=args.buddies or "auto"
        ),
    )
    if args.hold:
        Held(args.hold, lambda: state.step + 1, args.marks)
    if args.hold_step:
        HeldBeforeItsStep(args.hold_step, lambda: state.step + 1, args.marks)
    model.second.register_forward_hook(lambda *_: points.here("forward", state.step + 1))
    optimizer.register_step_pre_hook(lambda *_: points.here("stepping", state.step + 1))  # behind SameBits' own
    model.second.register_full_backward_hook(lambda *_: points.here("backward", state.step + 1))
    if args.begin_with is not None:
        samebits.elastic.load_dcp(state, args.begin_with)

    def flip_at(step: int, *kinds: str) -> None:
        for one in [one for one in flips if one[:2] == [str(samebits.get_rank()), str(step)] and one[2] in kinds]:
            flips.remove(one)
            flip(model, optimizer, one[2])

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> str:
        while state.step < args.steps:
            for batch, (inputs, targets) in enumerate(loader):
                time.sleep(args.pause_ms / 1000)
                if state.step + 1 == args.gate:
                    wait_for_gate(args.marks)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                if f"{samebits.get_rank()}:reduced:{state.step + 1}" in args.kill and state.step + 1 == args.hold:
                    wait_until_shard_0_is_held(args.marks, args.hold)
                points.here("reduced", state.step + 1)
                flip_at(state.step + 1, "gradient")
                if state.step % 2 == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a collective of DTensors' own
                optimizer.step()
                schedule.step()
                sampler.record_batch(batch, BATCH)
                state.step += 1
                if args.mesh and state.step in stepped_at and state.step != args.hold_step:
                    wait_until_all_have_stepped(args.marks, state.step)
                if f"{samebits.get_rank()}:stepped:{state.step}" in args.kill and state.step == args.hold_step:
                    wait_until_shard_0_is_held(args.marks, args.hold_step)
                points.here("stepped", state.step)
                state.commit()
                points.here("committed", state.step)
                flip_at(state.step, "weight", "moment", "nan")
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
