"""Do one thing to a folder and die by SIGKILL at the n-th disk call, otherwise print "done".

``python -m tests.store.killed_writer <folder> <action> <n> <whole|half>``: with ``half``, a write call that is killed
has written the first half of its bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from samebits.core.point import Point
from samebits.store.checkpoint import PointHeader, TensorPart, prune, rank_directory, write_point
from samebits.store.journal import Journal
from tests.store.disk_faults import Disk, interposed, kill_this_process
from tests.store.points import JOB

BATCHES = [[b"a" * 20, b"bb"], [b"", b"c" * 33], [b"last" * 5, b"one"]]
SNAPSHOT = [b"snapshot", b"of all" * 7]
CHUNK_BYTES = 64


def save(root: Path, step: int) -> Path:
    """Save a small point of rank 0 whose content follows from the step."""
    header = PointHeader(JOB, Point(step, 1), world_size=2, rank=0, slot=0, node="0")
    tensors = [
        TensorPart("weight", "F32", (8, 3), bytes((step + index) % 256 for index in range(96))),
        TensorPart("bias", "BF16", (3,), bytes(range(6))),
    ]
    return write_point(root, header, tensors, {"lr": 0.1 * step}, ["layout"], chunk_bytes=CHUNK_BYTES)


def _append(folder: Path) -> None:
    journal, _ = Journal.open(folder)
    journal.append(BATCHES[-1])


def _compact(folder: Path) -> None:
    journal, _ = Journal.open(folder)
    journal.compact(SNAPSHOT)


def _prune(folder: Path) -> None:
    prune(rank_directory(folder, 0), JOB, keep=2)


ACTIONS: dict[str, Callable[[Path], object]] = {
    "append": _append,
    "compact": _compact,
    "save": lambda folder: save(folder, step=3),
    "prune": _prune,
}


def main(folder: Path, action: str, fail_at: int, half_writes: bool) -> None:
    disk = Disk(fail_at=fail_at, failure=kill_this_process, half_writes=half_writes)
    with interposed(disk, folder):
        ACTIONS[action](folder)
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "half")
