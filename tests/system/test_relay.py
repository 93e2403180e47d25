"""Ranks behind a relay: the relay's death or stop costs no step, and losses behind it are noticed as without one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.job import PROBE, WAIT_S, Job
from tests.system.lying_relay import LIES
from tests.system.on_host import HOST
from tests.system.processes import Command, Running, WarmStarter, free_port
from tests.system.test_scheduler_away import GATED, STEPS, TRAINED, assert_no_new_round

pytestmark = pytest.mark.system

SECRET = "a secret of the test, long enough"
AWAY, BACK = r"the scheduler is unreachable", r"the scheduler is reachable again"


@contextmanager
def relay_of(job: Job, warm: WarmStarter, script: Path | None = None) -> Iterator[Running]:
    """Start the relay that the job's SCHED_HOST names, or another ``script`` in its place."""
    words = ("relay",) if script is None else ()
    relay = warm.start(Command(script, words, job.environment(), job.folder, job.log("relay")))
    job.wait_for("relay", "listening on")
    try:
        yield relay
    finally:
        relay.signal(signal.SIGCONT)
        relay.signal(signal.SIGKILL)
        relay.wait(WAIT_S)


def behind_relay(**more: str) -> dict[str, str]:
    return {"SCHED_HOST": f"relay:127.0.0.1:{free_port()},127.0.0.1", **more}


@pytest.mark.parametrize(
    ("number", "secret"), [(signal.SIGKILL, ""), (signal.SIGSTOP, SECRET)], ids=["killed", "stopped-secret"]
)
def test_relays_death_or_stop_costs_no_step(
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
    warm: WarmStarter,
    number: signal.Signals,
    secret: str,
) -> None:
    job = new_job(*TRAINED, *GATED, settings=behind_relay(CLUSTER_SECRET=secret))
    with relay_of(job, warm) as relay:
        job.start()
        job.open_gates(0)
        job.wait_for_step(15)
        relay.signal(number)
        for rank in job.ranks:
            job.wait_for(rank, AWAY)
            job.wait_for(rank, BACK)
        relay.signal(signal.SIGCONT)
        job.open_gates(40)
        assert job.wait_finished() == undisturbed(*TRAINED)
    assert_no_new_round(job)
    for rank in job.ranks:
        assert [step.number for step in job.steps(rank)] == list(range(1, STEPS + 1)), "a step was repeated"


def test_losses_behind_a_relay_are_noticed_and_repaired(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], warm: WarmStarter
) -> None:
    job = new_job(*TRAINED, *GATED, settings=behind_relay(CLUSTER_SECRET=SECRET))
    with relay_of(job, warm):
        job.start()
        job.open_gates(0)
        job.wait_for_step(15)
        job.kill(2)
        job.wait_for("scheduler", r"worker 2 \(pid \d+ on \S+\) is lost: its (process|connection)")
        job.start_worker(2)
        for rank in job.ranks:
            job.wait_for(rank, f"generation 2: rank {rank} of 4")
        job.scheduler.kill()
        for rank in job.ranks:
            job.wait_for(rank, AWAY)
        job.start_scheduler()
        for rank in job.ranks:
            job.wait_for(rank, BACK)
        job.open_gates(40)
        assert job.wait_finished() == undisturbed(*TRAINED)
    assert len(job.matches("scheduler", r"round \S+ opened")) == 2, job.tails()


def test_lying_relay_hides_no_loss_and_is_reported(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], warm: WarmStarter
) -> None:
    """It withholds the closed connection, and repeats and changes the ranks' messages, heartbeats and joins included.

    The scheduler cannot see the process, so it depends on another rank's report or on the end of the lease.
    """
    settings = behind_relay(CLUSTER_SECRET=SECRET, NODE_TIMEOUT="3")
    job = new_job(*TRAINED, *GATED, settings=settings, script=PROBE.with_name("on_host.py"))
    elsewhere = {HOST: "elsewhere"}
    with relay_of(job, warm, PROBE.with_name("lying_relay.py")):
        job.start_scheduler()
        for rank in job.ranks:
            job.start_worker(rank, **elsewhere)
        job.open_gates(0)
        job.wait_for_step(15)
        (job.folder / LIES).touch()
        job.wait_for("scheduler", r"dropped.*(repeated|forged)")
        job.kill(2)
        job.wait_for("scheduler", r"worker 2 \(pid \d+ on elsewhere\) is lost")
        job.start_worker(2, **elsewhere)
        job.open_gates(40)
        assert job.wait_finished() == undisturbed(*TRAINED)
    assert len(job.matches("scheduler", r"scheduler: worker \d .* is lost")) == 1, job.tails()
    for rank in set(job.ranks) - job.restarted:
        assert [step.number for step in job.steps(rank)] == list(range(1, STEPS + 1)), "a step was repeated"
