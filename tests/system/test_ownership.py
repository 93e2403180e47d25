"""Promise j: which command ends a job's processes, and that nothing is left or harmed by mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebits.errors import JobStoppedError, SchedulerUnreachableError, ScriptFailedError
from tests.system.job import FINISH_S, WAIT_S, Job, JobFolder
from tests.system.processes import free_port
from tests.system.scripted import SCHEDULER, ScriptJob

pytestmark = pytest.mark.system

TRAINED = ("--steps", "150", "--interval", "10")
PACE = ("--pause-ms", "40")
FAILED = "ValueError: the probe was told to fail at step 30"


@pytest.mark.parametrize("seated", [False, True], ids=["before its seat", "while it trains"])
def test_orphaned_worker_leaves_by_itself(seated: bool, new_job: Callable[..., Job]) -> None:
    job = new_job("--steps", "10000", workers=2, settings={"TOPO_TIMEOUT": "10" if seated else "5"})
    if seated:
        job.start()
        job.wait_for_step(15)
        job.scheduler.kill()
        job.kill(1)
    else:
        job.start_worker(0)
    assert job.worker(0).wait(WAIT_S) == SchedulerUnreachableError.exit_code
    job.wait_for(0, r"worker 0: no scheduler answered after (5|10) s \(TOPO_TIMEOUT\)")


def test_error_in_every_rank_ends_the_job(new_job: Callable[..., Job]) -> None:
    """With the scripts' messages: below, and tests/launcher with workers that need no torch."""
    job = new_job("--steps", "60", "--fail-at", "30", "--late-rank", "0", workers=3)
    job.start()
    statuses = job.wait_ended()
    assert statuses.pop("scheduler") == ScriptFailedError.exit_code
    assert 0 not in statuses.values()
    assert FAILED in job.wait_for(SCHEDULER, "the job ends: ").string
    assert_two_failed(job)


@pytest.mark.thorough
@pytest.mark.parametrize("late", [(), ("--late-rank", "0")], ids=["all at once", "one late"])
def test_error_in_every_rank_ends_the_job_with_its_text(
    late: tuple[str, ...], script_job: Callable[..., ScriptJob]
) -> None:
    job = script_job("--steps", "60", "--fail-at", "30", "--pause-ms", "30", *late, workers=3)
    run = job.run()
    assert run.wait() == ScriptFailedError.exit_code
    assert not job.processes()
    assert FAILED in job.wait_said(run, "the job was ended by its script")
    assert FAILED in job.wait_for(SCHEDULER, "the job ends: ").string
    assert_two_failed(job)


def assert_two_failed(job: JobFolder) -> None:
    """Check the tracebacks of two ranks; one may have been interrupted in its step before."""
    assert len([rank for rank in job.ranks if job.matches(rank, f"^{FAILED}$")]) >= 2, job.tails()


@pytest.mark.thorough
def test_follower_may_die_and_ctrl_c_ends_everything(
    script_job: Callable[..., ScriptJob], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(*TRAINED, workers=2)
    # The default cool-down, which a worker stopped on purpose does not wait for.
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
    assert stopped_at < 140, "the job was nearly finished"

    again = job.recover()
    assert job.finished(again) == expected
    assert not any(job.matches(rank, "free again in") for rank in job.ranks)
    restored = job.wait_for(0, r"generation 2: rank 0 of 2 continues from step (\d+)\b")
    assert int(restored[1]) >= stopped_at, "when told to end, it saves its last commit"
    assert [job.seatings(rank) for rank in job.ranks] == [2, 2]
    nothing = job.recover()
    assert nothing.wait() == 0
    assert "nothing to do" in nothing.text()


@pytest.mark.thorough
def test_second_run_is_refused_and_so_is_an_unfinished_job(script_job: Callable[..., ScriptJob]) -> None:
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
    assert run.wait() == JobStoppedError.exit_code
    assert "recover.sh" in run.text()

    refused = job.run()
    assert refused.wait() != 0
    assert "recover.sh" in refused.text()
    assert "--fresh" in refused.text()
    assert not job.processes()
    fresh = job.run("--fresh", "--detach")
    assert fresh.wait() == 0
    job.wait_for(SCHEDULER, "job finished", timeout_s=FINISH_S)
    job.wait_until(lambda: None if job.processes() else True, "end of all processes")
    assert len(list(job.folder.glob("recovery*/journal"))) == 2, "the unfinished job's journal is gone"
    job.sha256()


def press_and_see_all_end(job: ScriptJob, press: Callable[[], None]) -> None:
    """Press Ctrl-C and wait until no process of the job is left."""
    press()
    job.wait_until(lambda: None if job.processes() else True, "end of all processes")
