"""Promise f: a worker that wakes up after its seat was taken leaves without touching the job."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from samebits.errors import FencedError
from tests.system.job import WAIT_S, Job
from tests.system.kill_list import GATE, GATED, MIDDLE, TRAINED

pytestmark = pytest.mark.system


def test_worker_that_was_stopped_too_long_is_fenced(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(*TRAINED, *GATED, settings={"HEARTBEAT_INTERVAL": "0.5", "NODE_TIMEOUT": "3"})
    job.start()
    job.open_gates(0)
    job.wait_for_step(MIDDLE)
    zombie = job.worker(2)
    zombie.signal(signal.SIGSTOP)
    job.start_worker(2)
    job.wait_for(2, rf"worker 2 is held by pid {zombie.pid} on \S+, whose lease ends in \d\.\d s of silence")
    job.wait_for("scheduler", rf"worker 2 \(pid {zombie.pid} on \S+\) is lost: silent for 3 s \(NODE_TIMEOUT\)")
    job.wait_for(2, "seated: slot 2 of 4, start 2")
    job.wait_for(2, rf"locked by worker 2 \(pid {zombie.pid} on")
    assert zombie.is_alive()

    job.open_gates(GATE)
    zombie.signal(signal.SIGCONT)
    assert zombie.wait(WAIT_S) == FencedError.exit_code
    job.wait_for("scheduler", rf"fenced.*seat .*is now held by pid {job.worker(2).pid} on")
    job.wait_for(2, r"the seat of worker 2 is now held by pid \d+ .*must not touch the job again")
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert job.restarted == {2}
