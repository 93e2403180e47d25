"""The training script of ``tests.device``: the probe's model and data, on whatever device this process was given.

It is a user's script: it takes the device from torch and the local rank, and knows nothing of the transport. Its
options (``--amp``, ``--compile``, ``--graphs``) decide the bits; a disturbance must not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits
from tests.system.probe import BATCH, BUCKET_CAP_MB, FEATURES, GATE_POLL_S, SAMPLES, Shuffled, gate_of


class Training:
    """One process's."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = device_here()
        torch.manual_seed(7)
        data = torch.Generator().manual_seed(11)
        images = torch.randn(SAMPLES, FEATURES, generator=data)
        labels = torch.randint(0, 10, (SAMPLES,), generator=data)
        self.sampler = samebits.ElasticSampler(range(SAMPLES), shuffle=True, seed=5)
        self.loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, sampler=self.sampler, drop_last=True)
        self.bare = Shuffled(norm=False).to(self.device)
        module: nn.Module = self.bare
        if args.graphs:
            sample = torch.zeros(BATCH, FEATURES, device=self.device)
            module = torch.cuda.make_graphed_callables(self.bare, (sample,))  # type: ignore[assignment]
        if args.compile:
            module = torch.compile(self.bare, backend=args.compile)  # type: ignore[assignment]
        self.model = DistributedDataParallel(
            module,
            device_ids=None if self.device.index is None else [self.device.index],
            bucket_cap_mb=None if args.compile else BUCKET_CAP_MB,
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=args.amp, init_scale=2.0**10, growth_interval=7)
        self.state = samebits.elastic.TorchState(
            self.model,
            self.optimizer,
            sampler=self.sampler,
            scaler=self.scaler,
            epoch=0,
            step=0,
            rng=args.rng,
            checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=args.interval, keep_checkpoint_max=3),
        )

    def train(self, state: samebits.elastic.TorchState) -> None:
        """The function passed to ``elastic.run``; it selects the device as scripts for torchrun do."""
        local_rank = int(os.environ["LOCAL_RANK"])
        print(f"LOCAL_RANK {local_rank} on {self.device} over {dist.get_backend()}", flush=True)
        if self.device.index is not None:
            torch.accelerator.set_device_index(local_rank)
            assert torch.empty(0, device=self.device.type).device == self.device, "the model is on another device"
        while state.step < self.args.steps:
            for batch, (images, labels) in enumerate(self.loader):
                self.step(state, batch, images.to(self.device), labels.to(self.device))
                if state.step == self.args.steps:
                    return
            state.epoch += 1
            self.sampler.set_epoch(state.epoch)

    def step(self, state: samebits.elastic.TorchState, batch: int, images: torch.Tensor, labels: torch.Tensor) -> None:
        if self.args.gates and state.step % self.args.gates == 0:
            self.wait_at_gate(state)
        if self.args.fill == state.step + 1 and samebits.get_rank() == 1:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
        self.optimizer.zero_grad(set_to_none=not self.args.graphs)
        context: Any = contextlib.nullcontext()
        if self.args.amp:
            context = torch.autocast(self.device.type, dtype=torch.bfloat16)
        with context:
            loss = F.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.sampler.record_batch(batch, BATCH)
        state.step += 1
        state.commit()
        print(f"epoch {state.epoch} step {state.step} loss {loss.item():.6f} at {time.monotonic():.6f}", flush=True)

    def wait_at_gate(self, state: samebits.elastic.TorchState) -> None:
        """Wait until the test allows this step, or a peer is lost."""
        gate = gate_of(self.args.marks, state.step)
        while not gate.exists():
            state.check_host_updates()
            time.sleep(GATE_POLL_S)


def device_here() -> torch.device:
    """Return this process's device, as a script gets it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, samebits.get_local_rank())


def memory_bytes(device: torch.device) -> int:
    """Return what this process holds of the device's memory, by torch's count."""
    module: Any = torch.get_device_module(device)
    return int(module.memory_allocated(device)) if hasattr(module, "memory_allocated") else 0


def sha256_of(model: nn.Module) -> str:
    """Return a hash of all parameters in the order of their names."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--rng", choices=["per_step", "saved"], default="saved")
    parser.add_argument("--gates", type=int, default=0, help="steps between two gates at which all wait for the test")
    parser.add_argument("--marks", type=Path, default=Path())
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16, with a GradScaler")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="of torch.compile")
    parser.add_argument("--graphs", action="store_true", help="the module's forward and backward as CUDA graphs")
    parser.add_argument("--fill", type=int, default=0, metavar="STEP", help="rank 1 asks for a pebibyte of the device")
    args = parser.parse_args()
    samebits.init()
    torch.use_deterministic_algorithms(True)
    training = Training(args)
    print(f"device {training.device} holds {memory_bytes(training.device)} bytes", flush=True)
    samebits.elastic.run(training.train)(training.state)
    print(f"final step={training.state.step} sha256={sha256_of(training.bare)}", flush=True)


if __name__ == "__main__":
    main()
