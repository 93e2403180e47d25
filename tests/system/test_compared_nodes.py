"""Node check before the first generation: a slow or wrong node is named and gives its seat to a spare."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import PreflightError
from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("compared_script.py")
ENDS_S = 60.0


def started(new_job: Callable[..., Job], workers: int, sick: dict[int, str], **settings: str) -> Job:
    job = new_job(script=SCRIPT, workers=workers, settings={"HEALTH": "preflight", "SPARE_NUM": "1", **settings})
    job.start_scheduler()
    for node in range(workers):
        job.start_worker(node, SICK=sick.get(node, ""))
    return job


@pytest.mark.parametrize(
    ("sickness", "why"),
    [
        ("wrong", "together with worker [0-3] their sum is wrong, and worker [0-3] works well with other nodes"),
        *(
            pytest.param(sickness, why, marks=pytest.mark.thorough)
            for sickness, why in (
                ("slow", r"it is slow \(computes: 500 ms, the others 50 ms\)"),
                ("silent", "together with worker [0-3] they get no answer from each other"),
            )
        ),
    ],
)
def test_slow_or_wrong_node_is_named_and_a_spare_gets_its_seat(
    new_job: Callable[..., Job], sickness: str, why: str
) -> None:
    job = started(new_job, 4, {2: sickness}, CLUSTER_SECRET="7" * 32 if sickness == "wrong" else "")
    assert job.worker(2).wait(ENDS_S) == PreflightError.exit_code
    assert job.matches(2, f"the pre-flight compared 2 with the other nodes: {why}")
    job.start_worker(4)
    assert set(job.wait_ended().values()) == {0, PreflightError.exit_code}
    assert job.sha256(4)
    assert all(job.seatings(node) == 1 for node in (0, 1, 3)), "only the faulty one is named"


@pytest.mark.thorough
def test_without_a_spare_the_node_trains_only_on_another_machine(
    new_job: Callable[..., Job],
) -> None:
    job = started(new_job, 3, {2: "slow"}, SPARE_NUM="0")
    assert job.worker(2).wait(ENDS_S) == PreflightError.exit_code
    assert job.wait_for(
        "scheduler", "worker 2 .* is lost: the pre-flight rejected it: it is slow .*Fix: start this node on "
    )
    job.start_worker(2)
    assert job.worker(2).wait(ENDS_S) == PreflightError.exit_code, "though it is as fast as all, this time"
    assert len(job.matches(2, "the pre-flight compared 2 with the other nodes: it is slow")) == 2
    job.start_worker(2, MACHINE="another")
    job.wait_finished()


@pytest.mark.parametrize("end", ["dies", pytest.param("stops", marks=pytest.mark.thorough)])
def test_lost_node_does_not_delay_the_comparison_and_blames_no_node(new_job: Callable[..., Job], end: str) -> None:
    job = started(new_job, 4, {2: end}, ROUND_S="4")
    job.wait_for("scheduler", "pre-flight: the node of slot 2 did not report in time and was not compared")
    job.start_worker(4)  # only now: one that takes the seat earlier is compared in place of worker 2
    job.wait_for("scheduler", "spare 4 .* takes slot 2 of worker 2")
    if end == "stops":
        job.kill(2)
    statuses = job.wait_ended()
    assert {name for name, status in statuses.items() if status} == {2}
    assert job.sha256(4)


@pytest.mark.thorough
def test_scheduler_death_does_not_disturb_the_comparison(
    new_job: Callable[..., Job],
) -> None:
    job = started(new_job, 2, {1: "waits"})
    job.wait_until(lambda: (job.folder / "meets").exists() or None, "pair that meets")
    job.scheduler.signal(signal.SIGKILL)
    job.scheduler.wait(ENDS_S)
    job.start_scheduler()
    (job.folder / "may-meet").touch()
    job.wait_finished()
    assert not job.matches("scheduler", "pre-flight")


@pytest.mark.thorough
def test_node_that_was_slow_only_once_trains(new_job: Callable[..., Job]) -> None:
    job = started(new_job, 3, {1: "slow-once"})
    job.wait_finished()
    assert [job.seatings(node) for node in range(3)] == [1, 1, 1]
    assert not job.matches("scheduler", "pre-flight")


@pytest.mark.thorough
def test_of_two_nodes_with_a_wrong_sum_neither_trains_and_the_reason_is_given(new_job: Callable[..., Job]) -> None:
    job = started(new_job, 2, {1: "wrong"})
    assert [job.worker(node).wait(ENDS_S) for node in range(2)] == [PreflightError.exit_code] * 2
    for node in range(2):
        assert job.matches(node, "their sum is wrong, and no other pair shows which of the two is at fault. Fix: ")
    job.scheduler.wait(ENDS_S)
    assert job.matches("scheduler", "their sum is wrong")
