"""Promise h: with ENABLE_RECOVERY=0 a death ends the whole job, with its cause, and blocks nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.scripted import SCHEDULER, ScriptJob

pytestmark = pytest.mark.system

ENDLESS = ("--steps", "100000", "--pause-ms", "30")  # only a death ends it


def test_dead_worker_ends_every_process_and_is_named_by_each(script_job: Callable[..., ScriptJob]) -> None:
    job = script_job(*ENDLESS, workers=2, settings={"ENABLE_RECOVERY": "0"})
    run = job.run()
    job.wait_for_step(5)
    killed = job.process(1)
    job.kill(1)
    assert run.wait() != 0
    assert not job.processes()
    cause = (
        r"(its connection closed.*|was killed by signal 9 \(SIGKILL\))"  # behind a relay, the launcher reports first
    )
    for name in (SCHEDULER, 0):
        job.wait_for(name, rf"worker 1 \(pid {killed.pid} on \S+\) is lost: {cause} \(ENABLE_RECOVERY=0")
    assert "worker 1 " in job.wait_said(run, "was killed by signal 9 (SIGKILL)")
    assert "recover.sh" not in run.text(), "there is nothing to recover"


@pytest.mark.thorough  # → test_run_sh, with workers that need no torch
def test_dead_scheduler_ends_every_process_too(script_job: Callable[..., ScriptJob]) -> None:
    job = script_job(*ENDLESS, workers=2, settings={"ENABLE_RECOVERY": "0"})
    run = job.run()
    job.wait_for_step(5)
    job.kill(SCHEDULER)
    assert run.wait() != 0
    assert not job.processes()
    assert "the scheduler" in job.wait_said(run, "was killed by signal 9 (SIGKILL)")
