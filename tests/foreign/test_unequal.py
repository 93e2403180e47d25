"""Ranks with different states end the job with a message and its own status; allowed differences do not.

Each script is the tutorial's with one mistake, run as real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import ScriptFailedError, UnequalError, UsageError
from tests.system.job import Job

SCRIPT = Path(__file__).with_name("unequal_script.py")
NOT_EQUAL = r"ranks are not equal (?:after|at the end,) step (\d+): rank (\S+) differs from rank (\S+), first in (.*)"


@pytest.fixture
def recipe(new_job: Callable[..., Job]) -> Callable[..., Job]:
    """Start a job of two workers that run the script."""

    def begin(wrong: str, *args: str) -> Job:
        job = new_job("--wrong", wrong, *args, script=SCRIPT, workers=2)
        job.start()
        return job

    return begin


def ended_unequal(job: Job) -> list[str]:
    """Check every process's status and message; return the text after "the ranks are not equal"."""
    statuses = job.wait_ended()
    assert set(statuses.values()) == {UnequalError.exit_code}, f"{statuses}\n{job.tails()}"
    (scheduler,) = {match[0] for match in job.matches("scheduler", NOT_EQUAL)}
    for rank in job.ranks:
        assert {match[0] for match in job.matches(rank, NOT_EQUAL)} == {scheduler}
        assert not job.finals_of(job.log(rank)), "no rank returns from elastic.run"
    assert not job.matches("scheduler", "training is finished")
    print(scheduler)
    return [*job.matches("scheduler", NOT_EQUAL)[0].groups()]


@pytest.mark.system
def test_recipe_without_ddp_ends_within_three_steps(recipe: Callable[..., Job]) -> None:
    step, odd, alike, rest = ended_unequal(recipe("no-ddp"))
    assert int(step) <= 3
    assert (odd, alike) == ("1", "0")
    assert rest.startswith("model.linear.weight and ")
    assert "most likely no DistributedDataParallel is in use" in rest
    assert "as in expert parallelism, make these parameters DTensors" in rest
    assert "Fix: wrap the model in DistributedDataParallel before samebits.elastic.run" in rest


@pytest.mark.system
def test_manually_moved_sampler_ends_the_job(recipe: Callable[..., Job]) -> None:
    step, _, _, rest = ended_unequal(recipe("sampler"))
    assert int(step) <= 3
    assert rest.startswith("sampler (seed 1, epoch 0, 64 consumed on rank 0, seed 1, epoch 0, 72 consumed on rank 1)")
    assert "the ranks took different numbers of batches, or code outside the state has moved a sampler. Fix: " in rest


@pytest.mark.system
def test_parameter_outside_the_optimizer_ends_the_job(recipe: Callable[..., Job]) -> None:
    step, _, _, rest = ended_unequal(recipe("outside"))
    assert int(step) <= 3
    assert rest.startswith("model.scale: most likely this parameter is in no optimizer of the state")
    assert "Fix: " in rest


@pytest.mark.system
def test_later_difference_is_found_at_the_next_save(recipe: Callable[..., Job]) -> None:
    step, _, _, rest = ended_unequal(recipe("outside", "--wrong-from", "6", "--save-every", "10"))
    assert step == "10"
    assert rest.startswith("model.scale")


@pytest.mark.system
def test_difference_after_the_last_save_is_found_at_the_end(recipe: Callable[..., Job]) -> None:
    step, _, _, rest = ended_unequal(recipe("outside", "--wrong-from", "30", "--epochs", "4", "--save-every", "1000"))
    assert step == "32"
    assert rest.startswith("model.scale")


@pytest.mark.system
def test_framework_that_counts_epochs_itself_is_refused_by_its_line(recipe: Callable[..., Job]) -> None:
    """The framework's counter restarts with the process, while the state is epochs ahead."""
    job = recipe("set-epoch", "--epochs", "1000", "--pause-ms", "5")
    job.wait_for_step(20)
    job.kill(1)
    job.start_worker(1)
    assert job.worker(1).wait() == UsageError.exit_code
    (refusal,) = job.matches(
        1, r"unequal_script\.py:\d+ calls sampler\.set_epoch\(0\), but the state's sampler is in epoch"
    )
    print(refusal.string)
    statuses = job.wait_ended()
    assert statuses["scheduler"] == statuses[0] == ScriptFailedError.exit_code
    assert not job.finals_of(job.log(0))


@pytest.mark.system
def test_batch_statistics_may_differ_and_are_named_once(recipe: Callable[..., Job]) -> None:
    job = recipe("batch-norm")
    assert set(job.wait_ended().values()) == {0}
    (said,) = job.matches("scheduler", "rank 1 differs from rank 0 in (.*) after step 1. Training continues")
    print(said.string)
    assert said[1] == "model.norm.running_mean, model.norm.running_var"
    job.sha256()


@pytest.mark.system
def test_job_that_is_killed_and_recovered_stays_equal(recipe: Callable[..., Job]) -> None:
    undisturbed = recipe("nothing", "--epochs", "8").wait_finished()
    job = recipe("nothing", "--epochs", "8", "--pause-ms", "10", "--save-every", "10", "--gate", "50")
    job.wait_for_step(15)
    job.kill(1)
    job.start_worker(1)
    job.wait_for_step(35)
    job.kill_everything()
    job.open_gates(50)
    job.start()
    job.restarted.update(job.ranks)
    assert job.wait_finished() == undisturbed
    assert not job.matches("scheduler", "differs from")


@pytest.mark.system
def test_code_after_the_last_commit_is_compared_with_itself(recipe: Callable[..., Job]) -> None:
    """The last step is saved, then the sampler advances to the next epoch, on one rank later than on the other."""
    job = recipe("nothing", "--epochs", "2", "--save-every", "16", "--late-s", "0.5")
    job.wait_finished()
    assert not job.matches("scheduler", "differs from")
