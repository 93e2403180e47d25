"""``python -m tests.torch_versions.jobs FOLDER``: run three jobs of ``samebits run`` with this interpreter's torch.

One is undisturbed, one loses a worker and has a spare, one loses a worker and has none. For each, one line of JSON: its
sha256, or what was wrong. Both kills happen in the middle of training, at a gate that opens only when the job was
disturbed, so the machine's speed does not matter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.system.kill_list import GATE, GATED, MIDDLE, TRAINED
from tests.system.scripted import Called, ScriptJob

LOST = 2
SPARE = 4
REPLACEMENT = f"worker_{LOST}.1"
"""The log of the process that ``samebits run`` starts for the lost one: its line's second node."""
GOES_ON = rf"generation 2: rank {LOST} of 4 continues from step ([1-9]\d*)"


class RunJob(ScriptJob):
    """A job that ``samebits run`` starts and supervises."""

    def begin(self, *options: str) -> Called:
        """Start it; every rank then waits at its first gate."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "samebits",
            "run",
            "-n",
            str(self.workers),
            *(options or ("--spares", "0")),
            *self._words,
        ]
        words = ["-c", 'exec "$@"', "run", *command]
        return Called.script(words, self.folder, self.environment(), self.folder / "run.out")

    def require_survivors(self) -> None:
        """Check that only the lost worker was seated twice."""
        again = [rank for rank in self.ranks if rank != LOST and self.seatings(rank) != 1]
        assert not again, f"survivors {again} were seated again\n{self.tails()}"


def undisturbed(job: RunJob) -> str:
    called = job.begin()
    job.open_gates(0, GATE)
    return job.finished(called)


def kill_with_a_spare(job: RunJob) -> str:
    called = job.begin("--spares", "1")
    job.wait_for(SPARE, "this spare is warm")
    job.open_gates(0)
    job.wait_for_step(MIDDLE, rank=1)
    job.kill(LOST)
    job.wait_for(SPARE, GOES_ON)
    job.open_gates(GATE)
    sha256 = job.finished(called)
    job.require_survivors()
    return sha256


def kill_with_a_restart(job: RunJob) -> str:
    called = job.begin()
    job.open_gates(0)
    job.wait_for_step(MIDDLE, rank=1)
    job.kill(LOST)
    job.wait_for(REPLACEMENT, GOES_ON)
    job.open_gates(GATE)
    sha256 = job.finished(called)
    job.require_survivors()
    return sha256


JOBS: tuple[Callable[[RunJob], str], ...] = (undisturbed, kill_with_a_spare, kill_with_a_restart)


def main() -> int:
    folder, failed = Path(sys.argv[1]), False
    for run in JOBS:
        place = folder / run.__name__
        place.mkdir(parents=True)
        job = RunJob(place, args=(*TRAINED, *GATED))
        told = {"job": run.__name__}
        try:
            told["sha256"] = run(job)
        except AssertionError as error:
            told["problem"] = str(error)
            failed = True
        finally:
            job.end()
        print(json.dumps(told), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
