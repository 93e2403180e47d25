"""A script for torchrun, not ported: it steps until a file tells it to end, or one of its ranks to fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    dist.init_process_group("gloo")
    rank, restart = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    ends, fails = torch.zeros(1), torch.zeros(1)
    dist.barrier()
    print(f"begins as {rank} of {dist.get_world_size()}, restart {restart}, pid {os.getpid()}", flush=True)
    while not ends:
        ends.fill_(Path("end").exists())
        fails.fill_(Path("fail").exists())
        dist.all_reduce(ends)
        dist.all_reduce(fails)
        if rank == 1 and fails:
            raise ValueError("the loss is not a number")
        time.sleep(0.05)
    print(f"ends as {rank}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
