"""A Ray Train script as tests run it: a training function that knows nothing of recovery, and its checkpoint.

Dropout makes the generators matter, Adam the checkpoint. ``python -m tests.clusters.ray_train_script FOLDER`` runs it
in that folder, on the cluster that RAY_ADDRESS names.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from samebits import ray

EPOCHS = 4
BATCH = 8
GATED_EPOCH = 2
GATED_BATCH = 3
UNSHOWN = {"text": "a", "self": 1, "total_steps": -1, **{f"metric {number}": number for number in range(100)}}
"""Metrics that a report keeps although the progress line cannot show them."""
GATE = f"waits in epoch {GATED_EPOCH}"


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(120, 16), torch.randint(0, 10, (120,)))
    loader = ray.prepare_data_loader(DataLoader(data, BATCH, shuffle=True))
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)]
    model = ray.prepare_model(nn.Sequential(*layers), parallel_strategy_kwargs={"bucket_cap_mb": 0.003})
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first = 0
    if (checkpoint := ray.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epochs"]
    print(f"trains from epoch {first}", flush=True)
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch, (inputs, labels) in enumerate(loader):
            if (epoch, batch) == (GATED_EPOCH, GATED_BATCH):
                wait_for(Path(config["marks"], "open"))
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
        report({"loss": loss.item(), "epoch": epoch, **UNSHOWN}, saved)
    weights = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
    print(f"final step={EPOCHS} sha256={weights.hexdigest()}", flush=True)


def report(metrics: dict[str, Any], saved: dict[str, Any]) -> None:
    if ray.get_context().get_world_rank() != 0:
        ray.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(saved, Path(folder, "model.pt"))
        ray.report(metrics, ray.Checkpoint.from_directory(folder))


def wait_for(gate: Path) -> None:
    if not gate.exists():
        print(GATE, flush=True)
    while not gate.exists():
        time.sleep(0.01)


def main() -> None:
    folder = Path(sys.argv[1])
    result = ray.Trainer(
        train,
        train_loop_config={"lr": 0.01, "marks": str(folder)},
        scaling_config=ray.ScalingConfig(num_workers=3, num_hosts=3, num_spares=1),
        run_config=ray.RunConfig(name=folder.name, storage_path=folder.parent),
    ).fit()
    assert result.metrics is not None
    assert result.checkpoint is not None
    print(f"result: epoch {result.metrics['epoch']}, {result.checkpoint.path}", flush=True)


if __name__ == "__main__":
    main()
