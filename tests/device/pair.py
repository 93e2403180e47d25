"""``python pair.py RANK FILE``: two ranks form a group with the device's own backend and add up.

If they see only one device, both use it. NCCL may refuse that; whether this device's backend does decides how
``tests.device`` connects its jobs.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from samebits.training.group import device as devices

RANKS = 2
TIMEOUT_S = 20.0


def main() -> None:
    rank, file = int(sys.argv[1]), sys.argv[2]
    device = devices.choose_device(None, rank)
    torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        devices.backend_of(device),
        init_method=f"file://{file}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    rows = torch.full((4,), rank + 1.0, device=device)
    dist.all_reduce(rows)
    assert rows.tolist() == [3.0] * 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
