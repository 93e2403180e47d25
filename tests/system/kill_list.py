"""The kill list: what is killed, when, and in which order; each entry must end with the undisturbed run's bits.

An entry disturbs a job that the caller has made and leaves it running towards its end; whoever was killed has been
started again, nobody else. What is checked afterwards is the same for all of them and lives with the callers: the test
(once each) and ``python -m tests.system`` (many times).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.system.job import Job

STEPS = 80
INTERVAL = 10
MIDDLE = 25  # no multiple of the interval


@dataclass(frozen=True, slots=True)
class Case:
    """One way to disturb a job.

    Args:
        disturb: called with a job that has not been started.
        kills: kills that processes of the job do to themselves, see ``kill_points``.
        args: of the probe, besides; they change what is computed.
        pause_ms: slept in every step; changes nothing that is computed.
    """

    name: str
    disturb: Callable[[Job], None]
    kills: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    pause_ms: int = 10

    @property
    def trained(self) -> tuple[str, ...]:
        """The probe's arguments that decide which bits come out."""
        return ("--steps", str(STEPS), "--interval", str(INTERVAL), *self.args)

    @property
    def arguments(self) -> tuple[str, ...]:
        """All of the probe's arguments."""
        kills = [word for kill in self.kills for word in ("--kill", kill)]
        return (*self.trained, "--pause-ms", str(self.pause_ms), *kills)


def kill_workers(*ranks: int) -> Callable[[Job], None]:
    """These workers at the same moment, in the middle of training."""

    def disturb(job: Job) -> None:
        job.start()
        job.wait_for_step(MIDDLE)
        job.kill(*ranks)
        for rank in ranks:
            job.start_worker(rank)

    return disturb


def replace(*ranks: int) -> Callable[[Job], None]:
    """Workers that kill themselves, one after the other: each is started again as soon as it is gone."""

    def disturb(job: Job) -> None:
        job.start()
        for rank in ranks:
            job.wait_killed(rank)
            job.start_worker(rank)

    return disturb


def worker_and_scheduler(job: Job) -> None:
    job.start()
    job.wait_for_step(MIDDLE)
    job.scheduler.signal(signal.SIGKILL)
    job.kill(2)
    job.scheduler.wait(10.0)
    job.start_scheduler()
    job.start_worker(2)


def scheduler_then_worker(job: Job) -> None:
    job.start()
    job.wait_for_step(4)
    job.scheduler.kill()
    time.sleep(5.0)  # what the promise says: a worker 5 s later
    job.kill(1)
    job.wait_for(3, "left the generation at step")
    job.start_scheduler()
    job.start_worker(1)


def another_while_recovering(job: Job) -> None:
    job.start()
    job.wait_for_step(MIDDLE)
    job.kill(2)
    for rank in (0, 1, 3):
        job.wait_for(rank, "left the generation at step")
    job.start_worker(2)
    job.kill(1)
    job.start_worker(1)


def scheduler_while_recovering(job: Job) -> None:
    job.start()
    job.wait_for_step(MIDDLE)
    job.kill(2)
    job.wait_for(0, "left the generation at step")
    job.scheduler.kill()
    job.start_scheduler()
    job.start_worker(2)


def three_in_a_row(job: Job) -> None:
    job.start()
    for generation, rank in enumerate((2, 0, 3), start=1):
        job.wait_for(1, rf"generation {generation}: rank 1 of")
        job.wait_for_step(INTERVAL * generation + 3, rank=1)
        job.kill(rank)
        job.start_worker(rank)


CASES = {
    case.name: case
    for case in (
        Case("worker and scheduler together", worker_and_scheduler),
        Case("scheduler, a worker 5 s later", scheduler_then_worker, pause_ms=80),
        Case("two workers", kill_workers(1, 3)),
        Case("two workers, gradients reduced by hand", kill_workers(1, 3), args=("--model", "by-hand")),
        Case("two workers, batch norm", kill_workers(0, 2), args=("--model", "batch-norm")),
        Case("two workers, saved RNG", kill_workers(1, 3), args=("--rng", "saved")),
        Case("rank 0", kill_workers(0)),
        Case("while it writes a checkpoint", replace(2), kills=("2:saving:30",)),
        Case("while it writes a checkpoint, saved RNG", replace(2), kills=("2:saving:30",), args=("--rng", "saved")),
        Case("when its checkpoint has its name", replace(0), kills=("0:saved:30",)),
        Case("during the first formation", replace(1), kills=("1:forming:1",)),
        Case("during another formation", replace(2, 1), kills=("2:committed:25", "1:forming:2")),
        Case("while it takes over the restore point", replace(2, 0), kills=("2:committed:25", "0:restoring:2")),
        Case("a newcomer while it receives the state", replace(2, 2), kills=("2:committed:25", "2:receiving:2")),
        Case("after the optimizer's step, before the commit", replace(2), kills=("2:stepped:25",)),
        Case("before the first checkpoint", replace(2), kills=("2:committed:5",)),
        Case("while the initial state is saved", replace(0), kills=("0:saving:0",)),
        Case("while the initial state is saved, saved RNG", replace(2), kills=("2:saving:0",), args=("--rng", "saved")),
        Case("between the first and the second step", replace(2), kills=("2:committed:1",)),
        Case("between steps 1 and 2, saved each step", replace(0), kills=("0:committed:1",), args=("--interval", "1")),
        Case("in the backward pass of the last step", replace(2), kills=(f"2:backward:{STEPS}",)),
        Case("after the optimizer's last step", replace(2), kills=(f"2:stepped:{STEPS}",)),
        Case("when its function returns", replace(2), kills=("2:function_returned",)),
        Case("between the return of train and exit", replace(2), kills=("2:train_returned",)),
        Case("rank 0 between the return of train and exit", replace(0), kills=("0:train_returned",)),
        Case("another while others recover", another_while_recovering),
        Case("the scheduler while others recover", scheduler_while_recovering),
        Case("three in a row", three_in_a_row),
    )
}
