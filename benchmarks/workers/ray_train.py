"""A Ray Train script as in its documentation: DDP, and a checkpoint from rank 0 with every tenth step's report."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.moments import CHANNEL, Notebook
from benchmarks.recovery_trials import WORLD_SIZE

CHECKPOINT_STEPS = 10
ENDLESSLY = 100


def train(config: dict[str, Any]) -> None:
    import torch
    from ray import train as ray_train

    from benchmarks.workers.mlp import Mlp

    rank = ray_train.get_context().get_world_rank()
    notebook = Notebook(Path(config["channel"]), f"ray_train_{rank}")
    notebook.note("asks")
    mlp, step = Mlp(), 0
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"), weights_only=True)
        mlp.model.load_state_dict(saved["model"])
        mlp.optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    notebook.note("trains", step)
    while True:
        mlp.step(step)
        step += 1
        notebook.note("stepped", step)
        if step % CHECKPOINT_STEPS == 0:
            with tempfile.TemporaryDirectory() as folder:
                given = None
                if rank == 0:
                    saved = {"model": mlp.model.state_dict(), "optimizer": mlp.optimizer.state_dict(), "step": step}
                    torch.save(saved, Path(folder, "model.pt"))
                    given = ray_train.Checkpoint.from_directory(folder)
                ray_train.report({"step": step}, checkpoint=given)


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="auto")
    TorchTrainer(
        train,
        train_loop_config={"channel": os.environ[CHANNEL]},
        scaling_config=ScalingConfig(num_workers=WORLD_SIZE),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="benchmark", storage_path=str(Path.cwd()), failure_config=FailureConfig(max_failures=ENDLESSLY)
        ),
    ).fit()


if __name__ == "__main__":
    main()
