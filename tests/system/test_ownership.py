"""Promise j: who ends a job's processes, and that nothing of it is left or harmed by mistake."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from runtime.errors import JobStoppedError, SchedulerUnreachableError, ScriptFailedError
from tests.system.job import WAIT_S, Job
from tests.system.processes import free_port
from tests.system.scripted import SCHEDULER, ScriptJob

pytestmark = pytest.mark.system

TRAINED = ("--steps", "150", "--interval", "10")
PACE = ("--pause-ms", "40")


@pytest.mark.parametrize("seated", [False, True], ids=["before its seat", "while it trains"])
def test_an_orphaned_worker_leaves_by_itself(seated: bool, new_job: Callable[..., Job]) -> None:
    job = new_job("--steps", "10000", workers=2, settings={"TOPO_TIMEOUT": "5"})
    if seated:
        job.start()
        job.wait_for_step(15)
        job.scheduler.kill()
        job.kill(1)
    else:
        job.start_worker(0)
    orphaned_at = time.monotonic()
    assert job.worker(0).wait(12.0) == SchedulerUnreachableError.exit_code
    assert time.monotonic() - orphaned_at <= 10.0
    job.wait_for(0, r"worker 0: no scheduler answered after 5 s \(TOPO_TIMEOUT\)")


@pytest.mark.parametrize(
    "late",
    [pytest.param((), marks=pytest.mark.thorough, id="all at once"), pytest.param(("--late-rank", "0"), id="one late")],
)
def test_an_error_in_every_rank_ends_the_job_with_its_text(
    late: tuple[str, ...], script_job: Callable[..., ScriptJob]
) -> None:
    job = script_job("--steps", "60", "--fail-at", "30", "--pause-ms", "30", *late, workers=3)
    run = job.run()
    job.wait_for_step(29, rank=2)
    failed_at = time.monotonic()
    status = run.wait(17.0)
    assert time.monotonic() - failed_at <= 15.0
    assert status == ScriptFailedError.exit_code
    assert not job.processes()
    text = "ValueError: the probe was told to fail at step 30"
    assert text in job.wait_said(run, "the job was ended by its script")
    assert text in job.wait_for(SCHEDULER, "the job ends: ").string
    failed = [rank for rank in job.ranks if job.matches(rank, f"^{text}$")]
    assert len(failed) >= 2, "one may have been torn out of its step before; the traceback is the user's"


@pytest.mark.thorough
def test_a_follower_may_die_and_ctrl_c_ends_everything(
    script_job: Callable[..., ScriptJob], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(*TRAINED, workers=2)
    # The default cool-down: whoever was stopped on purpose does not wait for it.
    job = script_job(*TRAINED, *PACE, workers=2, settings={"REGISTER_COOLDOWN": ""})
    run = job.run()
    job.wait_for_step(15)
    before = job.pids()
    run.kill()
    follower = job.recover()
    job.wait_said(follower, "training")
    assert job.pids() == before
    assert all(identity.is_alive() for identity in before.values())

    press_and_see_all_end(job, follower.press_ctrl_c)
    assert follower.wait(WAIT_S) == JobStoppedError.exit_code
    stopped_at = job.steps(0)[-1].number
    assert stopped_at < 140, "the job was nearly through"

    again = job.recover()
    assert job.finished(again) == expected
    assert not any(job.matches(rank, "free again in") for rank in job.ranks)
    restored = job.wait_for(0, r"generation 2: rank 0 of 2 goes on from step (\d+)\b")
    assert int(restored[1]) >= stopped_at, "told to end, it saves its last commit"
    assert [job.seatings(rank) for rank in job.ranks] == [2, 2]
    nothing = job.recover()
    assert nothing.wait() == 0
    assert "nothing to do" in nothing.text()


@pytest.mark.thorough
def test_a_second_run_is_refused_and_so_is_an_unfinished_job(script_job: Callable[..., ScriptJob]) -> None:
    job = script_job(*TRAINED, *PACE, workers=2)
    run = job.run()
    job.wait_for_step(15)
    other = {"SCHED_PORT": str(free_port()), "RECOVERY_PATH": str(job.folder / "elsewhere")}
    second = job.run(**other)
    assert second.wait() != 0
    said = second.text()
    assert str(job.recovery) in said
    assert "elsewhere" in said
    assert f"pid {job.process(SCHEDULER).pid}" in said
    assert run.is_running()

    press_and_see_all_end(job, run.press_ctrl_c)
    assert run.wait(WAIT_S) == JobStoppedError.exit_code
    assert "recover.sh" in run.text()

    refused = job.run()
    assert refused.wait() != 0
    assert "recover.sh" in refused.text()
    assert "--fresh" in refused.text()
    assert not job.processes()
    fresh = job.run("--fresh", "--detach")
    assert fresh.wait() == 0
    job.wait_for(SCHEDULER, "job finished", timeout_s=60.0)
    job.wait_until(lambda: None if job.processes() else True, "end of all processes")
    assert len(list(job.folder.glob("recovery*/journal"))) == 2, "the unfinished job's journal is gone"
    job.sha256()


def press_and_see_all_end(job: ScriptJob, press: Callable[[], None]) -> None:
    """Ctrl-C: within ten seconds no process of the job is left."""
    pressed_at = time.monotonic()
    press()
    job.wait_until(lambda: None if job.processes() else True, "end of all processes", 12.0)
    assert time.monotonic() - pressed_at <= 11.0
