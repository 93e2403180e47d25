"""``python -m tests.checkpoint_kills [--kills 500] [--seed 1]``: kill -9 a rank that loads, saves, copies and deletes.

Prints what was killed during which action, and finally the violations; the status is 1 if there are any. The points are
stored below the current folder, or ``--directory``, and the memory slots in ``/dev/shm``; both are removed afterwards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.checkpoint_kills.campaign import Campaign
from tests.checkpoint_kills.victim import Place

SAY_EVERY = 50


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoint_kills", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn; the moments also depend on the machine")
    parser.add_argument("--directory", type=Path, default=Path())
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a victim is a fork, and a thread pool does not survive a fork
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-kills-", dir=arguments.directory) as folder,
        tempfile.TemporaryDirectory(prefix="samebits-kills-", dir="/dev/shm") as memory,
    ):
        place = Place(Path(folder).resolve() / "points", Path(memory, "here"), Path(memory, "elsewhere"))
        campaign = Campaign(place, arguments.seed)
        found = campaign.found
        try:
            while found.kills < arguments.kills and not found.problems:
                campaign.kill_once()
                if found.kills % SAY_EVERY == 0 or found.kills == arguments.kills:
                    print(f"[{time.monotonic() - began_s:6.1f} s] {found.kills} kills", flush=True)
        finally:
            campaign.keeper.kill()
    for problem in found.problems:
        print(problem)
    print(f"killed: {dict(found.killed)}; last said before: {dict(found.doing)}")
    print(f"{found.unproven} points in memory ignored, and logged, because their writers were killed before hashing")
    print(f"{found.copies} times a copy on the other host was found whole and right")
    print(
        f"{found.kills} kills, seed {arguments.seed}: {len(found.unloadable)} unloadable, {len(found.wrong)} silently "
        f"wrong, {len(found.lost)} lost, {len(found.failures)} other failures, never fewer than {found.least_verified} "
        "verified global points once there was one"
    )
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
