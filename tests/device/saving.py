"""``python saving.py MEGABYTES ROUNDS``: how long saving a state on the device blocks training.

A world of one. The floor is the same bytes copied from the device into host memory that was touched before (pinned if
the device supports it), and the other way for a restore. ``durable`` is from a commit until its point is on disk. The
last line is JSON with each way's median in seconds, and the group's backend.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import samebits
from tests.device.script import device_here

TENSORS = 40


class Weights(nn.Module):
    """float32 tensors with this many bytes in total."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(size_bytes // TENSORS // 4) for _ in range(TENSORS))


def main() -> None:
    size_bytes, rounds = int(sys.argv[1]) << 20, int(sys.argv[2])
    samebits.init()
    device = device_here()
    weights = Weights(size_bytes).to(device)
    state = samebits.elastic.TorchState(
        weights, step=0, checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=2)
    )
    live = [one.detach() for one in weights.parameters()]
    copies = [torch.zeros_like(one, device="cpu", pin_memory=device.type == "cuda") for one in live]
    took: dict[str, list[float]] = {name: [] for name in ("fetch", "put", "plain", "saving", "durable", "restore")}

    def timed(name: str, call: Callable[[], object]) -> None:
        torch.accelerator.synchronize()
        began_s = time.monotonic()
        call()
        torch.accelerator.synchronize()
        took[name].append(time.monotonic() - began_s)

    @torch.no_grad()
    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    backends: list[str] = []

    def train(state: samebits.elastic.TorchState) -> None:
        backends.append(dist.get_backend())
        for _ in range(rounds + 2):
            for name in ("plain", "saving"):
                with torch.no_grad():
                    torch._foreach_add_(live, 1.0)
                state.step += 1
                timed(name, state.commit)
            began_s = time.monotonic()
            state.flush()
            took["durable"].append(took["saving"][-1] + time.monotonic() - began_s)
            wanted = [one.cpu() for one in live]
            with torch.no_grad():
                torch._foreach_add_(live, 1.0)
            timed("restore", state.restore)
            if not all(torch.equal(one.cpu(), other) for one, other in zip(live, wanted, strict=True)):
                raise AssertionError("the restored state has other bits")
            timed("fetch", lambda: copy(copies, live))
            timed("put", lambda: copy(live, copies))

    samebits.elastic.run(train)(state)
    medians = {name: statistics.median(seconds[2:]) for name, seconds in took.items()}
    print(json.dumps({"seconds": medians, "backend": backends[0]}))


if __name__ == "__main__":
    main()
