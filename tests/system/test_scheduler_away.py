"""Promise c: training does not depend on the scheduler; its death or pause changes nothing."""

from __future__ import annotations

import itertools
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.system.job import Job, JobFolder, Step

pytestmark = pytest.mark.system

SCHEDULER = "scheduler"

STEPS = 60
GATE = 40  # the job waits here for the test to disturb its scheduler
TRAINED = ("--steps", str(STEPS), "--interval", "1000")
GATED = ("--gates", str(GATE))
FIRST_STEPS = 10  # slower than the others: DDP arranges its buckets, memory is touched for the first time
AWAY_S = 20.0
PAUSED_S = 4.0


def test_schedulers_death_costs_no_step(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    job = new_job(*TRAINED, *GATED)
    job.start()
    job.open_gates(0)
    job.wait_for_step(15)
    job.scheduler.kill()
    for rank in job.ranks:
        job.wait_for_step(GATE, rank)
    assert "is unreachable (step" in job.wait_for(0, "the scheduler is unreachable").string
    job.start_scheduler()
    job.wait_for(0, r"the scheduler is reachable again after \d+\.\d s, term 2")
    job.open_gates(GATE)
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_no_new_round(job)
    for rank in job.ranks:
        assert [step.number for step in job.steps(rank)] == list(range(1, STEPS + 1)), "a step was repeated"


@pytest.mark.thorough
def test_twenty_seconds_without_a_scheduler_make_no_step_longer(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    trained = ("--steps", "270", "--interval", "1000")
    expected = undisturbed(*trained, "--pause-ms", "5")
    job = new_job(*trained, "--pause-ms", "100", "--say-queued")
    job.start()
    job.wait_for_step(15)
    job.scheduler.kill()
    killed_at = time.monotonic()
    time.sleep(AWAY_S)
    recovered_at = time.monotonic()
    job.start_scheduler()
    job.wait_for(0, r"the scheduler is reachable again after \d+\.\d s, term 2")
    assert job.wait_finished() == expected
    assert_no_new_round(job)
    assert "is unreachable (step" in job.wait_for(0, "the scheduler is unreachable").string
    steps = [job.steps(rank) for rank in job.ranks]
    for own in steps:
        assert [step.number for step in own] == list(range(1, 271)), "a step was repeated"
        assert sum(killed_at < step.at_s < recovered_at for step in own) >= 100
    lasted = durations(steps)
    percentile_99_s = statistics.quantiles([one.lasted_s for one in lasted], n=100)[98]
    longest_s = max(one.lasted_s - one.queued_s for one in lasted if killed_at < one.end_s < recovered_at)
    assert longest_s <= percentile_99_s + 0.050


def test_paused_scheduler_loses_no_worker(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    job = new_job(*TRAINED, *GATED, settings={"HEARTBEAT_INTERVAL": "0.5", "NODE_TIMEOUT": "2"})
    job.start()
    job.open_gates(0)
    job.wait_for_step(15)
    job.scheduler.signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    for rank in job.ranks:
        job.wait_for_step(GATE, rank)  # training continues without it
    time.sleep(max(0.0, stopped_at + PAUSED_S - time.monotonic()))  # the pause must exceed a lease
    job.scheduler.signal(signal.SIGCONT)
    job.wait_for(SCHEDULER, r"was paused for \d+\.\d s; no lease expires because of it")
    job.open_gates(GATE)
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_no_new_round(job)


def test_lost_journal_is_rebuilt_from_the_workers(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    job = new_job(*TRAINED, *GATED)
    job.start()
    job.open_gates(0)
    job.wait_for_step(15)
    job.scheduler.kill()
    shutil.rmtree(job.folder / "recovery")
    job.start_scheduler()
    job.wait_for(
        SCHEDULER, rf"is rebuilt from {job.workers} of {job.workers} members of generation 1, which agree; term 1002"
    )
    job.open_gates(GATE)
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_no_new_round(job)


def assert_no_new_round(job: JobFolder) -> None:
    """Check that all are still in the first generation."""
    assert len(job.matches(SCHEDULER, r"round \S+ opened")) == 1, job.tails()
    for rank in job.ranks:
        assert len(job.matches(rank, r"generation \d+: rank")) == 1
        assert job.matches(rank, f"generation 1: rank {rank} of {job.workers}")


@dataclass(frozen=True, slots=True)
class Duration:
    """One step of the whole job: its end, its duration, and how long one of its processes waited for a CPU."""

    end_s: float
    lasted_s: float
    queued_s: float


def durations(steps: list[list[Step]]) -> list[Duration]:
    """Return the median over the ranks of the time between two steps, since a long step is long on all of them.

    CPU waits come from the machine's other work, so they are recorded separately and subtracted when the longest step
    is judged.
    """
    found = []
    for begin, end in itertools.pairwise(list(zip(*steps, strict=True))[FIRST_STEPS:]):
        begin_s, end_s = (statistics.median(step.at_s for step in together) for together in (begin, end))
        queued_s = max(late.queued_s - early.queued_s for early, late in zip(begin, end, strict=True))
        found.append(Duration(end_s, end_s - begin_s, queued_s))
    return found
