"""Save as a rank does until killed: ``python -m tests.store.killed_trainer MEMORY ROOT HOW N``.

``save``: save step N + 1, print the writer's pid, then keep saving and print each step that is durable. ``seal``: save
step 1, stop the writer, seal step 2 without telling it, print the writer's pid, and kill itself.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

from samebits.core.point import Point
from samebits.store.checkpoint import MemoryRoom, Writer, rank_directory
from samebits.store.lock import DirectoryLock
from tests.store.points import JOB
from tests.store.slots import fill_numbered

COUNT = 500_000


def main(base: Path, root: Path, how: str, newest: int) -> None:
    lock = DirectoryLock(rank_directory(root, 0), "worker 0")
    lock.acquire()
    room = MemoryRoom(base, JOB, 0)
    writer = Writer(root, room, lock.descriptor)

    def save(step: int) -> None:
        name, sequence = fill_numbered(room, step, count=COUNT, chunk_bytes=64 * 1024)
        writer.submit(name, sequence, Point(step, 1))
        outcome = writer.outcome(wait=True)
        assert outcome is not None and outcome.problem is None, outcome

    if how == "seal":
        save(1)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGSTOP)
        fill_numbered(room, 2, count=COUNT, chunk_bytes=64 * 1024)
        print(writer.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    save(newest + 1)
    print(writer.pid, flush=True)
    for step in itertools.count(newest + 2):
        save(step)
        print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
