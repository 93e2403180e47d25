"""Promise h: with ENABLE_RECOVERY=0 a death ends the whole job, quickly and with its cause, and blocks nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.system.scripted import SCHEDULER, ScriptJob

pytestmark = pytest.mark.system

GONE_WITHIN_S = 10.0
TRAINED = ("--steps", "60", "--pause-ms", "30")


def test_a_dead_worker_ends_every_process_and_is_named_by_each(script_job: Callable[..., ScriptJob]) -> None:
    job = script_job(*TRAINED, workers=2, settings={"ENABLE_RECOVERY": "0"})
    run = job.run()
    job.wait_for_step(20)
    killed = job.process(1)
    killed_at = time.monotonic()
    job.kill(1)
    assert run.wait(GONE_WITHIN_S + 2.0) != 0
    assert not job.processes()
    assert time.monotonic() - killed_at <= GONE_WITHIN_S
    for name in (SCHEDULER, 0):
        job.wait_for(
            name, rf"worker 1 \(pid {killed.pid} on \S+\) is lost: its connection closed.* \(ENABLE_RECOVERY=0"
        )
    assert "worker 1 " in job.wait_said(run, "was killed by signal 9 (SIGKILL)")
    assert "recover.sh" not in run.text(), "there is nothing to recover"


def test_a_dead_scheduler_ends_every_process_too(script_job: Callable[..., ScriptJob]) -> None:
    job = script_job(*TRAINED, workers=2, settings={"ENABLE_RECOVERY": "0"})
    run = job.run()
    job.wait_for_step(20)
    killed_at = time.monotonic()
    job.kill(SCHEDULER)
    assert run.wait(GONE_WITHIN_S + 2.0) != 0
    assert not job.processes()
    assert time.monotonic() - killed_at <= GONE_WITHIN_S
    assert "the scheduler" in job.wait_said(run, "was killed by signal 9 (SIGKILL)")
