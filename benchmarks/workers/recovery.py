"""A worker that trains until it is killed, and records the phases of its recovery.

``ours``: a worker of SameBits; ``plain``: stock DDP, to compare the weights with; ``holder``: a process of the same
size that only holds a connection. The script part is what a user writes; the probes around it are on the functions that
a recovery passes through.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samebits
from benchmarks.moments import Notebook, before_and_after
from benchmarks.workers.mlp import SEED, Mlp
from benchmarks.workers.paced import INTERVAL, MESH, PACE, RNG, Pace
from samebits.service.agent import Agent
from samebits.training.checkpoint.state_points import StatePoints
from samebits.training.group.group import Group
from samebits.training.run.elastic_run import ElasticRun

CHECKPOINT_STEPS = 10
DROPOUT = 0.1
HOLDER_STEPS = 3


def main() -> None:
    match sys.argv[1:]:
        case [] | ["ours"]:
            train_ours()
        case ["plain"]:
            train_plain()
        case ["holder", port]:
            hold(int(port))
        case other:
            raise SystemExit(f"unknown arguments {other}: expected ours, plain or holder PORT")


def train_ours() -> None:
    notebook = Notebook.from_environment()
    _probe(notebook)

    samebits.init()
    mode = os.environ.get(RNG, "per_step")
    mlp = Mlp(_wrap(), dropout=DROPOUT if mode == "saved" else 0.0)
    state = samebits.elastic.TorchState(
        mlp.model,
        mlp.optimizer,
        rng=mode,
        seed=SEED,
        checkpoint=samebits.CheckpointConfig(
            save_checkpoint_steps=int(os.environ.get(INTERVAL, CHECKPOINT_STEPS)), keep_checkpoint_max=2
        ),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        notebook.note("trains", state.completed_steps)
        run_paced(mlp, notebook, lambda: state.completed_steps, state.commit, state.check_host_updates)

    train(state)


def _wrap() -> Callable[[nn.Module], nn.Module]:
    """Return a function that makes the model distributed: DDP, or FSDP2 on the requested mesh."""
    if MESH not in os.environ:
        return DistributedDataParallel
    from torch.distributed.device_mesh import init_device_mesh  # slow to import, and DDP needs none of it
    from torch.distributed.fsdp import fully_shard

    sizes = tuple(map(int, os.environ[MESH].split(",")))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard")[-len(sizes) :])
    return lambda model: fully_shard(model, mesh=mesh)


def train_plain() -> None:
    dist.init_process_group("gloo")
    done = 0

    def count() -> None:
        nonlocal done
        done += 1

    run_paced(Mlp(), Notebook.from_environment(), lambda: done, count, lambda: None)


def run_paced(
    mlp: Mlp,
    notebook: Notebook,
    completed_steps: Callable[[], int],
    commit: Callable[[], object],
    meanwhile: Callable[[], object],
) -> None:
    """Train as far as allowed, forever; at every pause, report the weights."""
    pace = Pace(Path(os.environ[PACE])) if PACE in os.environ else None
    while True:
        step = completed_steps()
        if pace is not None:
            pace.wait_beyond(step, lambda: notebook.note("pauses", completed_steps(), mlp.digest()), meanwhile)
        mlp.step(step)
        commit()
        notebook.note("stepped", step + 1)


def hold(port: int) -> None:
    """Allocate the memory of a training rank and only hold a connection to that port of loopback."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mlp = Mlp()
    for step in range(HOLDER_STEPS):
        mlp.step(step)
    with socket.create_connection(("127.0.0.1", port)):
        signal.pause()


def _probe(notebook: Notebook) -> None:
    def noting(name: str) -> Any:
        return lambda *_, **__: notebook.note(name)

    def noting_of_generation(name: str) -> Any:
        return lambda group, *_, **__: notebook.note(name) if group.world_size > 1 else None

    before_and_after(Agent, "register", noting("asks"), noting("seated"))
    before_and_after(Agent, "enter", noting("enters"), noting("placed"))
    before_and_after(Agent, "report_failure", noting("failed"), _nothing)
    before_and_after(Group, "break_", noting_of_generation("told"), _nothing)
    before_and_after(Group, "drop", _nothing, noting_of_generation("dropped"))
    before_and_after(Group, "form", _nothing, noting_of_generation("formed"))
    before_and_after(ElasticRun, "_enter_again", _nothing, noting("joins"))
    before_and_after(StatePoints, "obtain", _nothing, noting("obtained"))


def _nothing(*_: object, **__: object) -> None:
    """Do nothing, as the unused side of a probe."""


if __name__ == "__main__":
    main()
