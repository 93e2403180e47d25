"""One rank that trains window by window, on demand: ``plain`` DDP, or ``elastic`` with a commit after every step.

A line on standard input asks for a window: ``train <steps>``, or ``alone <steps>`` for steps without communication.
Both kinds run this same loop; only what follows a step differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import runtime
from benchmarks.moments import Notebook
from benchmarks.workers.mlp import SEED, Mlp

NEVER = 10**9  # no checkpoint falls into a window: what is measured is the commit


def main() -> None:
    {"plain": train_plain, "elastic": train_elastic}[sys.argv[1]]()


def train_plain() -> None:
    dist.init_process_group("gloo")
    run_windows(Mlp(), lambda: None)


def train_elastic() -> None:
    runtime.init()
    mlp = Mlp()
    config = runtime.CheckpointConfig(save_checkpoint_steps=NEVER)
    state = runtime.elastic.TorchState(mlp.model, mlp.optimizer, rng="per_step", seed=SEED, checkpoint=config)

    @runtime.elastic.run
    def train(state: runtime.elastic.TorchState) -> None:
        run_windows(mlp, state.commit)

    train(state)


def run_windows(mlp: Mlp, after_step: Callable[[], None]) -> None:
    """Until standard input ends, which it does not: the process is ended from outside."""
    notebook = Notebook.from_environment()
    notebook.note("ready")
    done = 0
    for line in sys.stdin:
        kind, _, steps = line.partition(" ")
        dist.all_reduce(torch.zeros(1))  # all begin together
        notebook.note("begins", done)
        for _ in range(int(steps)):
            if kind == "train":
                mlp.step(done)
                after_step()
            else:
                mlp.step_alone(done)
            done += 1
        notebook.note("ends", done)


if __name__ == "__main__":
    main()
