"""One rank that trains window by window, on demand: ``plain`` DDP, or ``elastic`` with a commit after every step.

``plain|elastic|saving|virtual|reporting|sharded mlp|wide|transformer [STEPS]``: a commit after every STEPS steps,
preceded by a report of the loss if ``reporting`` or ``sharded``, where FSDP2 takes DDP's place. Each rank of
``virtual`` runs one virtual worker, and only ``saving`` saves checkpoints. A line on standard input asks for a window:
``train <steps>``, or ``alone <steps>`` for steps without communication.
All kinds run this same loop; only what follows a step differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import samebits
from benchmarks.moments import Notebook
from benchmarks.workers.mlp import SEED, Mlp
from benchmarks.workers.transformer import Transformer

NEVER = 10**9  # no checkpoint falls into a window, since the commit is measured
SAVED = 20
Model = Mlp | Transformer
WIDTH = 3_776  # a "wide" MLP has 3 million parameters
Wrap = Callable[[nn.Module], nn.Module]
MODELS: dict[str, Callable[[Wrap], Model]] = {
    "mlp": Mlp,
    "wide": lambda wrap: Mlp(wrap, width=WIDTH),
    "transformer": Transformer,
}


def main() -> None:
    kind, workload, *interval = sys.argv[1:]
    build = MODELS[workload]
    if kind == "plain":
        dist.init_process_group("gloo")
        run_windows(build(DistributedDataParallel), lambda done, loss: None)
    else:
        wrap = _sharded if kind == "sharded" else DistributedDataParallel
        train_elastic(build, wrap, int(interval[0]) if interval else 1, kind)


def _sharded(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


def train_elastic(build: Callable[[Wrap], Model], wrap: Wrap, commit_steps: int, kind: str) -> None:
    samebits.init()
    model = build(wrap)
    config = samebits.CheckpointConfig(save_checkpoint_steps=SAVED if kind == "saving" else NEVER)
    sizes = {"global_batch": samebits.get_world_size(), "micro_batch": 1} if kind == "virtual" else {}
    state = samebits.elastic.TorchState(
        model.model, model.optimizer, rng="per_step", seed=SEED, checkpoint=config, **sizes
    )
    reports = kind in ("reporting", "sharded")

    def after_step(done: int, loss: torch.Tensor) -> None:
        if reports:
            state.report(loss=loss)
        if done % commit_steps == 0:
            state.commit()

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        run_windows(model, after_step)

    train(state)


def run_windows(model: Model, after_step: Callable[[int, torch.Tensor], None]) -> None:
    """Run until the process is ended from outside.

    Args:
        model: the model to train.
        after_step: called after every step, with the number of steps done and the loss.
    """
    notebook = Notebook.from_environment()
    notebook.note("ready")
    done = 0
    for line in sys.stdin:
        kind, _, steps = line.partition(" ")
        dist.all_reduce(torch.zeros(1))  # all start together
        notebook.note("begins", done)
        for _ in range(int(steps)):
            if kind == "train":
                after_step(done + 1, model.step(done))
            else:
                model.step_alone(done)
            done += 1
        notebook.note("ends", done)


if __name__ == "__main__":
    main()
