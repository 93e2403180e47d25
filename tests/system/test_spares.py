"""Spares: one takes a lost worker's place at once with the undisturbed bits, and no other worker is restarted."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.store.process_identity import ProcessIdentity
from tests.system.elastic_job import ElasticJob
from tests.system.job import FINISH_S, WAIT_S, JobFolder, is_writer
from tests.system.kill_list import GATE, GATED, MIDDLE, STEPS
from tests.system.processes import WarmStarter

pytestmark = pytest.mark.system

TRAINED = ("--steps", str(STEPS), "--interval", "1000")  # only memory to resume from
LEFT_BY_SIGTERM = 143


class GatedJob(ElasticJob):
    """A job that waits at a gate until the test lets it finish."""

    def start(self) -> None:
        super().start()
        self.open_gates(0)

    def finish(self, timeout_s: float = FINISH_S) -> str:
        self.open_gates(GATE)
        return super().finish(timeout_s)


@pytest.fixture
def new_job(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Callable[..., ElasticJob]:
    def make(
        *args: str, spares: int = 1, cool_down_s: float = 3600, lease_s: float | None = None, **options: object
    ) -> ElasticJob:
        settings = {"REGISTER_COOLDOWN": str(cool_down_s)}
        if lease_s is not None:
            settings |= {"NODE_TIMEOUT": str(lease_s), "HEARTBEAT_INTERVAL": "0.5"}
        job = GatedJob(tmp_path, warm, args=(*TRAINED, *GATED, *args), spares=spares, settings=settings, **options)
        watched(job)
        return job

    return make


def steps(job: ElasticJob, node: int) -> list[int]:
    return [step.number for step in job.steps(node)]


def require_no_step_lost_or_repeated(job: ElasticJob, *survivors: int, losses: int = 1) -> None:
    """Check that a rank one step behind at the loss was given that step and did not compute it."""
    every = set(range(1, STEPS + 1))
    taken = {node: steps(job, node) for node in survivors}
    for node, numbers in taken.items():
        assert numbers == sorted(set(numbers)), f"node {node} took a step twice: {numbers}"
        assert len(every - set(numbers)) <= losses, f"node {node} lacks {every - set(numbers)}"
    assert set().union(*taken.values()) == every


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_spare_takes_over_without_a_step_lost_or_repeated(
    rank: int, new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]
) -> None:
    job = new_job()
    job.start()
    job.wait_warm(4)
    waiting = writers_of(job, 4)
    assert len(waiting) == 1, "a spare's writer exists before its slot"
    job.wait_for_step(MIDDLE, rank=1)
    job.kill(rank)
    job.wait_for_step(GATE, rank=1)
    assert writers_of(job, 4) == waiting
    assert job.finish() == undisturbed(*TRAINED)
    survivors = {0, 1, 2, 3} - {rank}
    require_no_step_lost_or_repeated(job, *survivors)
    assert job.seated_once(*survivors, 4)
    first = steps(job, 4)[0]
    assert steps(job, 4) == list(range(first, STEPS + 1))
    assert steps(job, rank)[-1] in (first - 1, first - 2)  # it may have died before it could print its last step
    job.wait_for("scheduler", rf"spare 4 .* takes slot {rank} of worker {rank}")


def writers_of(job: ElasticJob, node: int) -> list[int]:
    """Return the pids of this node's checkpoint writers."""
    threads = Path(f"/proc/{job.worker(node).pid}/task").iterdir()
    children = [ProcessIdentity.of(int(pid)) for one in threads for pid in (one / "children").read_text().split()]
    return [child.pid for child in children if child is not None and is_writer(child)]


def test_two_losses_at_once_and_two_spares(new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]) -> None:
    job = new_job(spares=2)
    job.start()
    job.wait_warm(4, 5)
    job.wait_for_step(MIDDLE)
    job.kill(1, 3)
    assert job.finish() == undisturbed(*TRAINED)
    assert job.seated_once(0, 2, 4, 5)
    require_no_step_lost_or_repeated(job, 0, 2)


def test_dead_node_returns_as_a_spare_and_takes_the_next_place(
    new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]
) -> None:
    job = new_job(cool_down_s=0.5)
    job.start()
    job.wait_warm(4)
    job.wait_for_step(10)
    job.kill(1)
    job.wait_generation(2, [0, 4, 2, 3])
    job.start_worker(1)
    job.wait_for(1, "seated: a spare, start 2")
    job.wait_warm(1)
    job.kill(4)
    job.wait_for("scheduler", r"spare 1 .* takes slot 1 of worker 4")
    assert job.finish() == undisturbed(*TRAINED)
    assert job.seated_once(0, 2, 3)
    require_no_step_lost_or_repeated(job, 0, 2, 3, losses=2)


@pytest.mark.thorough  # → the matrix's "a spare, then a rank, stop, spare"; taking the next place: the test before
def test_worker_stopped_too_long_returns_as_a_spare_in_its_own_process(
    new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]
) -> None:
    job = new_job(cool_down_s=0.5, lease_s=2)
    job.start()
    job.wait_warm(4)
    job.wait_for_step(10)
    stopped = job.worker(1)
    stopped.signal(signal.SIGSTOP)
    job.wait_generation(2, [0, 4, 2, 3])
    since = job.count(1)
    stopped.signal(signal.SIGCONT)
    job.wait_for(1, "another node has its slot.*this process registers again", since=since)
    job.wait_for(1, "seated: a spare, start 2", since=since)
    job.wait_for(1, "this spare is warm", since=since)
    job.kill(4)
    job.wait_for("scheduler", r"spare 1 .* takes slot 1 of worker 4")
    assert job.finish() == undisturbed(*TRAINED)
    assert job.worker(1) is stopped
    assert job.seated_once(0, 2, 3)
    require_no_step_lost_or_repeated(job, 0, 2, 3, losses=2)


def test_dead_spare_changes_nothing_and_one_that_was_not_needed_runs_no_script(
    new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]
) -> None:
    job = new_job(spares=2)
    job.start()
    job.wait_warm(4, 5)
    job.wait_for_step(MIDDLE)
    job.kill(4)
    job.wait_for("scheduler", r"spare 4 .* is lost")
    assert job.finish() == undisturbed(*TRAINED)
    assert steps(job, 5) == [] and not job.matches(5, "final step=")
    job.wait_for(5, "this spare was not needed: it exits without running the rest of the script")
    for node in (0, 1, 2, 3):
        assert len(job.matches(node, "generation 1:")) == 1
        assert job.matches(node, "generation 2:") == []


def test_worker_asked_to_leave_finishes_its_step_and_a_spare_takes_over(
    new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]
) -> None:
    job = new_job()
    job.start()
    job.wait_warm(4)
    job.wait_for_step(MIDDLE)
    assert job.terminate(2) == LEFT_BY_SIGTERM
    left_at = steps(job, 2)[-1]
    assert job.finish() == undisturbed(*TRAINED)
    job.wait_for("scheduler", r"worker 2 left: it was asked to \(SIGTERM\)")
    assert steps(job, 0) == list(range(1, STEPS + 1))
    assert steps(job, 4)[0] in (left_at + 1, left_at + 2)  # its last commit is no longer printed
    assert job.seated_once(0, 1, 3, 4)


@pytest.mark.thorough  # → the matrix's "scheduler and worker, term, restart"; no cool-down: tests/core, tests/launcher
def test_without_a_spare_the_others_wait_for_it_without_a_cool_down(
    new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]
) -> None:
    job = new_job(spares=0)
    job.start()
    job.wait_for_step(MIDDLE)
    assert job.terminate(2) == LEFT_BY_SIGTERM
    job.wait_for(0, "left the generation at step")
    job.start_worker(2)
    job.wait_for(2, "seated: slot 2 of 4, start 2")
    assert job.finish() == undisturbed(*TRAINED)
    assert steps(job, 0) == list(range(1, STEPS + 1))


@pytest.mark.thorough
def test_worker_with_a_full_disk_leaves_for_a_spare(
    new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]
) -> None:
    job = new_job()
    job.start_scheduler()
    full = {"HEALTH": "disk=drain:0.000001,every=0.2"}
    for node in range(5):
        job.start_worker(node, **(full if node == 1 else {}))
    job.wait_warm(4)
    job.open_gates(0)
    assert job.worker(1).wait(WAIT_S) == LEFT_BY_SIGTERM
    job.gone.add(1)
    job.wait_for(
        "scheduler", "worker 1 is asked to leave at its next commit, and warm spare 4 takes its place: the disk of /"
    )
    assert "asked to leave: the disk of /" in job.wait_for(1, "asked to leave: ").string
    assert job.finish() == undisturbed(*TRAINED)
    assert job.matches(4, r"generation \d+: rank 1 of 4"), "the spare has its rank"
    assert job.seated_once(0, 2, 3, 4)


def test_waiting_process_leaves_at_once(new_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]) -> None:
    """A spare, and a member of a world that waits for another one."""
    job = new_job()
    job.start()
    job.wait_warm(4)
    assert job.terminate(4) == LEFT_BY_SIGTERM
    job.wait_for("scheduler", r"spare 4 left: it was asked to \(SIGTERM\)")
    job.wait_for_step(MIDDLE)
    assert job.terminate(2) == LEFT_BY_SIGTERM
    job.wait_for(0, "left the generation at step")
    assert job.terminate(0) == LEFT_BY_SIGTERM
    for node in (0, 2, 4):
        job.start_worker(node)
    assert job.finish() == undisturbed(*TRAINED)
