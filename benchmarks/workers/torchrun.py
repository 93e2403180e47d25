"""A worker as in torchrun's documentation: plain DDP, a checkpoint of rank 0's state, loaded at the start.

The checkpoint is as cheap as one that survives kill -9 of a process can be: safetensors, no fsync, renamed.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.moments import CHANNEL, Notebook
from benchmarks.workers.mlp import Mlp
from benchmarks.workers.paced import ENDLESSLY, INTERVAL, LAST_STEP
from benchmarks.workers.recovery import CHECKPOINT_STEPS


def main() -> None:
    notebook = Notebook(Path(os.environ[CHANNEL]), f"torchrun_{os.environ['RANK']}")
    notebook.note("asks")
    dist.init_process_group("gloo")
    notebook.note("formed")
    mlp = Mlp()
    checkpoint = Path("checkpoint.safetensors")
    step = _load(mlp, checkpoint)
    every = int(os.environ.get(INTERVAL, CHECKPOINT_STEPS))
    notebook.note("trains", step)
    last_step = int(os.environ.get(LAST_STEP, ENDLESSLY))
    while step < last_step:
        mlp.step(step)
        step += 1
        if step % every == 0 and dist.get_rank() == 0:
            _save(mlp, step, checkpoint)
        notebook.note("stepped", step)
    notebook.note("ended", step, mlp.digest())


def _save(mlp: Mlp, step: int, checkpoint: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in mlp.model.module.state_dict().items()}
    for index, state in mlp.optimizer.state_dict()["state"].items():
        tensors[f"momentum.{index}"] = state["momentum_buffer"]
    unfinished = checkpoint.with_suffix(".unfinished")
    save_file({**tensors, "step": torch.tensor(step)}, unfinished)
    unfinished.rename(checkpoint)


def _load(mlp: Mlp, checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    tensors = load_file(checkpoint)
    mlp.model.module.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    )
    state = {
        int(name.removeprefix("momentum.")): {"momentum_buffer": tensor}
        for name, tensor in tensors.items()
        if name.startswith("momentum.")
    }
    mlp.optimizer.load_state_dict({**mlp.optimizer.state_dict(), "state": state})
    return int(tensors["step"])


if __name__ == "__main__":
    main()
