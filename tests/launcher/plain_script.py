"""A script without SameBits and torch: it counts, saves a checkpoint, and ends on request."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
saved, enough = Path("step"), Path("enough")
step = int(saved.read_text()) if saved.exists() else 0
where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
assert "ROLE" not in os.environ and int(os.environ["LOCAL_RANK"]) == rank
print(f"begins at {step} as {rank} of {world_size}, store {where}, pid {os.getpid()}", flush=True)
if sys.argv[1:] == ["--fail"]:
    raise ValueError("an error of the script's own")
while not enough.exists():
    time.sleep(0.02)
    step += 1
    if rank == 0:
        saved.with_suffix(".tmp").write_text(str(step))
        saved.with_suffix(".tmp").rename(saved)
print(f"final {rank}", flush=True)
