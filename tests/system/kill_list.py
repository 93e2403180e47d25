"""The kill list: what is killed, when and in which order; each entry must end with the undisturbed run's bits.

An entry disturbs a job that the caller has made and leaves it running towards its end, with exactly the killed
processes restarted. The check afterwards is common to all and is done by the callers: the test (once each) and ``python
-m tests.system`` (many times).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.system.job import Job

STEPS = 40
INTERVAL = 10
MIDDLE = 15  # no multiple of the interval
GATE = 30  # the job waits here until the test has disturbed it
TRAINED = ("--steps", str(STEPS), "--interval", str(INTERVAL))
EACH_STEP = ("--steps", "20", "--interval", "1")
GATED = ("--gates", str(GATE))


@dataclass(frozen=True, slots=True)
class Case:
    """One way to disturb a job.

    Args:
        disturb: called with a job that has not been started.
        kills: kills that the job's processes do to themselves, see ``kill_points``.
        args: further arguments of the probe, which change what is computed.
        gates: steps between two gates; 0: there are none.
    """

    name: str
    disturb: Callable[[Job], None]
    kills: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    gates: int = 0

    @property
    def trained(self) -> tuple[str, ...]:
        """The probe's arguments that decide the bits."""
        return (*TRAINED, *self.args)

    @property
    def arguments(self) -> tuple[str, ...]:
        """All of the probe's arguments."""
        kills = [word for kill in self.kills for word in ("--kill", kill)]
        gates = ("--gates", str(self.gates)) if self.gates else ()
        return (*self.trained, *gates, *kills)


def start(job: Job) -> None:
    """Start everything; return when rank 0 is in the middle of training."""
    job.start()
    job.open_gates(0)
    job.wait_for_step(MIDDLE)


def kill_workers(*ranks: int) -> Callable[[Job], None]:
    """Kill these workers at the same time in the middle of training."""

    def disturb(job: Job) -> None:
        start(job)
        job.kill(*ranks)
        job.open_gates(GATE)
        for rank in ranks:
            job.start_worker(rank)

    return disturb


def replace(*ranks: int) -> Callable[[Job], None]:
    """Restart workers that kill themselves one after the other, each as soon as it is gone."""

    def disturb(job: Job) -> None:
        job.start()
        for rank in ranks:
            job.wait_killed(rank)
            job.start_worker(rank)

    return disturb


def worker_and_scheduler(job: Job) -> None:
    start(job)
    job.scheduler.signal(signal.SIGKILL)
    job.kill(2)
    job.open_gates(GATE)
    job.scheduler.wait()
    job.start_scheduler()
    job.start_worker(2)


def scheduler_then_worker(job: Job) -> None:
    start(job)
    job.scheduler.kill()
    time.sleep(5.0)  # as promised: a worker 5 s later
    job.kill(1)
    job.open_gates(GATE)
    job.wait_for(3, "left the generation at step")
    job.start_scheduler()
    job.start_worker(1)


def another_while_recovering(job: Job) -> None:
    start(job)
    job.kill(2)
    job.open_gates(GATE)
    for rank in (0, 1, 3):
        job.wait_for(rank, "left the generation at step")
    job.start_worker(2)
    job.kill(1)
    job.start_worker(1)


def scheduler_while_recovering(job: Job) -> None:
    start(job)
    job.kill(2)
    job.open_gates(GATE)
    job.wait_for(0, "left the generation at step")
    job.scheduler.kill()
    job.start_scheduler()
    job.start_worker(2)


def three_in_a_row(job: Job) -> None:
    job.start()
    job.open_gates(0)
    for generation, rank in enumerate((2, 0, 3), start=1):
        job.wait_for(1, rf"generation {generation}: rank 1 of")
        job.wait_for_step(INTERVAL * generation - 7, rank=1)
        job.kill(rank)
        job.open_gates(INTERVAL * generation)
        job.start_worker(rank)


CASES = {
    case.name: case
    for case in (
        Case("worker and scheduler together", worker_and_scheduler, gates=GATE),
        Case("scheduler, a worker 5 s later", scheduler_then_worker, gates=GATE),
        Case("two workers", kill_workers(1, 3), gates=GATE),
        Case("two workers, gradients reduced by hand", kill_workers(1, 3), gates=GATE, args=("--model", "by-hand")),
        Case("two workers, batch norm", kill_workers(0, 2), gates=GATE, args=("--model", "batch-norm")),
        Case("two workers, saved RNG", kill_workers(1, 3), gates=GATE, args=("--rng", "saved")),
        Case("rank 0", kill_workers(0), gates=GATE),
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
        Case("between steps 1 and 2, saved each step", replace(0), kills=("0:committed:1",), args=EACH_STEP),
        Case("in the backward pass of the last step", replace(2), kills=(f"2:backward:{STEPS}",)),
        Case("after the optimizer's last step", replace(2), kills=(f"2:stepped:{STEPS}",)),
        Case("when its function returns", replace(2), kills=("2:function_returned",)),
        Case("between the return of train and exit", replace(2), kills=("2:train_returned",)),
        Case("rank 0 between the return of train and exit", replace(0), kills=("0:train_returned",)),
        Case("another while others recover", another_while_recovering, gates=GATE),
        Case("the scheduler while others recover", scheduler_while_recovering, gates=GATE),
        Case("three in a row", three_in_a_row, gates=INTERVAL),
    )
}
