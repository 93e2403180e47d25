"""A bit flip in one replica is found within K steps and named, and all roll back to the undisturbed bits.

Each job has real processes, and none is killed: each runs from the first step to the last.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.account.event_log import read_events
from samebits.errors import UnequalError
from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("flip_script.py")
EVERY = 5
COMPARED = {"CONSISTENCY": f"majority:{EVERY}", "REGISTER_COOLDOWN": "0"}
NAMED = (
    r"rank (\d) \(worker \d, pid \d+ on .*\) differs from ranks? .* after step (\d+), first in (.*?), since .*"
    r" roll back to step"
)


def repaired(job: Job, rank: int, step: int, what: str) -> None:
    """Check that the flip was found within EVERY steps, named by rank, tensor and step, and repaired in process."""
    (said,) = job.matches("scheduler", NAMED)
    print(said.string)
    assert int(said[1]) == rank and step < int(said[2]) <= step + EVERY
    assert said[3] == "model.0.weight" + (" and 1 more" if what == "moment" else ""), "a moment has changed its weight"


@pytest.mark.parametrize(
    ("workers", "rank", "what"),
    [
        pytest.param(
            *(workers, rank, what),
            marks=() if (workers, rank, what) == (3, 1, "weight") else pytest.mark.thorough,
        )
        for workers, what in itertools.product((3, 4), ("weight", "moment"))
        for rank in range(workers)
    ],
)
def test_flipped_bit_is_named_and_the_result_is_undisturbed(
    workers: int, rank: int, what: str, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--what", what, "--flip", f"{rank}:17", script=SCRIPT, workers=workers, settings=COMPARED)
    job.start()
    end = job.wait_finished()
    assert len(job.matches(rank, "flipped a bit")) == 1
    repaired(job, rank, 17, what)
    assert end == undisturbed(script=SCRIPT, workers=workers)
    (event,) = [one for one in read_events(job.recovery) if one.kind == "rolled back"]
    assert event.more["suspects"] == [str(rank)] and event.more["back_to"] == 15


def test_first_steps_are_no_anomaly_when_a_rollback_repeats_them(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    settings = {**COMPARED, "CONSISTENCY": "majority:40", "LOSS_ANOMALY": "stop"}
    job = new_job("--falling", "--flip", "1:8", script=SCRIPT, workers=3, settings=settings)
    job.start()
    end = job.wait_finished()
    (event,) = [one for one in read_events(job.recovery) if one.kind == "rolled back"]
    assert event.more["back_to"] <= 8 and event.more["seen_at"] >= 40
    assert end == undisturbed(script=SCRIPT, workers=3)


def test_weight_that_is_not_a_number_is_named_before_all_ranks_are_equal_again(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    """The next step makes every weight of every rank not a number, and their digests equal."""
    job = new_job("--what", "exponent", "--flip", "1:17", script=SCRIPT, workers=3, settings=COMPARED)
    job.start()
    end = job.wait_finished()
    (said,) = job.matches("scheduler", NAMED)
    print(said.string)
    assert said[1] == "1" and said[2] == "17" and said[3] == "model.0.weight"
    assert end == undisturbed(script=SCRIPT, workers=3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("workers", "flipped", "groups"), [(2, (1,), (" 0 differs", " 1")), (4, (1, 3), ("s 0 and 2 differ", "s 1 and 3"))]
)
def test_without_a_majority_all_roll_back_and_the_result_is_undisturbed(
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
    workers: int,
    flipped: tuple[int, ...],
    groups: tuple[str, str],
) -> None:
    flips = [word for rank in flipped for word in ("--flip", f"{rank}:17")]
    job = new_job(*flips, script=SCRIPT, workers=workers, settings=COMPARED)
    job.start()
    assert job.wait_finished() == undisturbed(script=SCRIPT, workers=workers)
    assert job.matches("scheduler", f"rank{groups[0]} from rank{groups[1]} .* without a majority it is unknown which")


@pytest.mark.thorough
def test_of_two_replicas_the_leader_is_trusted_on_request(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    settings = {**COMPARED, "CONSISTENCY": f"leader:{EVERY}"}
    job = new_job("--what", "moment", "--flip", "0:17", script=SCRIPT, workers=2, settings=settings)
    job.start()
    assert job.wait_finished() == undisturbed(script=SCRIPT, workers=2)
    assert len(job.matches("scheduler", NAMED)) == 1


@pytest.mark.thorough
def test_script_that_repeats_the_difference_ends_the_job(new_job: Callable[..., Job]) -> None:
    job = new_job("--flip", "1:17", "--always", script=SCRIPT, workers=3, settings=COMPARED)
    job.start()
    assert set(job.wait_ended().values()) == {UnequalError.exit_code}, job.tails()
    (said,) = job.matches("scheduler", "the job ends: .*the same difference appeared again after the rollback")
    print(said.string)
    assert not any(job.finals_of(job.log(rank)) for rank in job.ranks)


@pytest.mark.parametrize(
    "flips",
    [pytest.param(("--flip", "1:17", "--flip", "1:32"), marks=pytest.mark.thorough), ("--flip", "1:17", "--always")],
    ids=["twice", "stuck"],
)
def test_rank_that_differs_again_is_replaced_by_a_spare(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], flips: tuple[str, ...]
) -> None:
    """The spare's process does not flip bits, as another device does not."""
    job = new_job(*flips, script=SCRIPT, workers=3, settings={**COMPARED, "SPARE_NUM": "1"})
    job.start()
    job.start_worker(3)
    statuses = job.wait_ended()
    assert {name: status for name, status in statuses.items() if status} == {1: 143}, job.tails()
    assert job.matches(
        "scheduler", "worker 1('s state differed from the others' 2 times| differed again).*: it is asked"
    )
    assert job.sha256() == undisturbed(script=SCRIPT, workers=3)


def test_rollback_uses_a_checkpoint_that_is_newer_than_the_copies_in_memory(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    settings = {**COMPARED, "CONSISTENCY": "majority:50"}
    job = new_job(
        "--flip", "2:45", "--save-every", "20", "--pause-ms", "30", script=SCRIPT, workers=3, settings=settings
    )
    job.start()
    assert job.wait_finished() == undisturbed(script=SCRIPT, workers=3)
    (said,) = job.matches("scheduler", r"differs from ranks 0 and 1 after step 50, .* roll back to step (\d+)")
    assert said[1] in ("20", "40"), "the newest save that was on every disk"
    for rank in job.ranks:
        assert job.matches(rank, f"generation 2: rank {rank} of 3 continues from step {said[1]},"), job.tails()


@pytest.mark.thorough
def test_flip_after_the_last_comparison_is_found_at_the_end(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    settings = {**COMPARED, "CONSISTENCY": "majority:25"}
    job = new_job("--what", "moment", "--flip", "2:58", script=SCRIPT, workers=3, settings=settings)
    job.start()
    assert job.wait_finished() == undisturbed(script=SCRIPT, workers=3)
    (said,) = job.matches("scheduler", r"differs from ranks 0 and 1 at the end, step 60, .* roll back to step 50")
    print(said.string)


@pytest.mark.thorough
def test_flip_while_the_scheduler_is_dead_is_found_afterwards(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--flip", "1:17", "--pause-ms", "50", script=SCRIPT, workers=3, settings=COMPARED)
    job.start()
    job.wait_for_step(17)
    job.scheduler.signal(signal.SIGKILL)
    job.scheduler.wait()
    job.wait_for_step(22)
    job.start_scheduler()
    assert job.wait_finished() == undisturbed(script=SCRIPT, workers=3)
    assert len(job.matches("scheduler", NAMED)) == 1


@pytest.mark.parametrize(
    ("workers", "rank", "lost", "at", "what", "has_spare"),
    [
        (3, 1, 2, 17, "weight", False),  # found when the survivors meet
        *(
            pytest.param(*where, what, has_spare, marks=pytest.mark.thorough)
            for where in ((3, 1, 2, 17), (3, 0, 2, 18), (4, 0, 3, 18), (4, 2, 1, 18), (3, 2, 0, 17))
            for what in ("weight", "moment")
            for has_spare in (False, True)
            if (*where, what, has_spare) != (3, 1, 2, 17, "weight", False)
        ),
    ],
)
def test_flip_is_found_if_another_rank_is_killed_before_the_comparison(
    workers: int,
    rank: int,
    lost: int,
    at: int,
    what: str,
    has_spare: bool,
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
) -> None:
    """A newcomer has no copy to roll back to, and its state may be the one with the flip."""
    settings = {**COMPARED, "SPARE_NUM": str(int(has_spare))}
    flaws = ("--what", what, "--flip", f"{rank}:17", "--die", f"{lost}:{at}")
    job = new_job(*flaws, script=SCRIPT, workers=workers, settings=settings)
    job.start()
    if has_spare:
        job.start_worker(workers)
    job.wait_killed(lost)
    if not has_spare:
        job.start_worker(lost)
    statuses = job.wait_ended()
    assert {name: status for name, status in statuses.items() if status} == ({lost: -9} if has_spare else {})
    assert len(job.matches(rank, "flipped a bit")) == 1
    (said,) = job.matches("scheduler", r"differ.* after step (\d+), .* all ranks roll back to step (\d+),")
    print(said.string)
    assert 17 <= int(said[1]) <= at + 1 and int(said[2]) == 15
    assert job.sha256() == undisturbed(script=SCRIPT, workers=workers)
