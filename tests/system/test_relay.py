"""Ranks behind a relay: the relay's death or stop costs no step, and losses behind it are noticed as without one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
def relay_of(
    job: Job, warm: WarmStarter, script: Path | None = None, *, name: str = "relay", **more: str
) -> Iterator[Running]:
    """Start the relay that the job's SCHED_HOST names, or another ``script`` in its place."""
    words = ("relay",) if script is None else ()
    relay = warm.start(Command(script, words, job.environment(**more), job.folder, job.log(name)))
    job.wait_for(name, "listening on")
    try:
        yield relay
    finally:
        relay.signal(signal.SIGCONT)
        relay.signal(signal.SIGKILL)
        relay.wait(WAIT_S)


def behind_relay(**more: str) -> dict[str, str]:
    return {"SCHED_HOST": f"relay:127.0.0.1:{free_port()},127.0.0.1", **more}


def behind_inner(**more: str) -> dict[str, str]:
    return {"SCHED_HOST": f"relay:127.0.0.1:{free_port()},relay:127.0.0.1:{free_port()},127.0.0.1", **more}


@contextmanager
def inner_of(job: Job, warm: WarmStarter, script: Path | None = None) -> Iterator[Running]:
    """Start the inner relay that the job's SCHED_HOST names, and then the relay of the workers."""
    _, above = job.settings["SCHED_HOST"].split(",", 1)
    with relay_of(job, warm, script, name="inner", SCHED_HOST=above) as inner, relay_of(job, warm):
        yield inner


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


@pytest.mark.parametrize(
    ("number", "secret"), [(signal.SIGKILL, SECRET), (signal.SIGSTOP, "")], ids=["killed-secret", "stopped"]
)
def test_inner_relays_death_or_stop_costs_no_step(
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
    warm: WarmStarter,
    number: signal.Signals,
    secret: str,
) -> None:
    job = new_job(*TRAINED, *GATED, settings=behind_inner(CLUSTER_SECRET=secret))
    with inner_of(job, warm) as inner:
        job.start()
        job.open_gates(0)
        job.wait_for_step(15)
        job.wait_for("relay", "the scheduler is reachable through the relay at")
        inner.signal(number)
        job.wait_for("relay", "the scheduler is reachable directly")
        for rank in job.ranks:
            job.wait_for(rank, AWAY)
            job.wait_for(rank, BACK)
        inner.signal(signal.SIGCONT)
        job.open_gates(40)
        assert job.wait_finished() == undisturbed(*TRAINED)
    assert_no_new_round(job)
    for rank in job.ranks:
        assert [step.number for step in job.steps(rank)] == list(range(1, STEPS + 1)), "a step was repeated"


def test_losses_behind_an_inner_relay_are_noticed_and_repaired(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], warm: WarmStarter
) -> None:
    _lose_a_worker_and_the_scheduler(new_job, undisturbed, warm, behind_inner(CLUSTER_SECRET=SECRET), inner_of)


def test_losses_behind_a_relay_are_noticed_and_repaired(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], warm: WarmStarter
) -> None:
    _lose_a_worker_and_the_scheduler(new_job, undisturbed, warm, behind_relay(CLUSTER_SECRET=SECRET), relay_of)


def _lose_a_worker_and_the_scheduler(
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
    warm: WarmStarter,
    settings: dict[str, str],
    relays_of: Callable[[Job, WarmStarter], AbstractContextManager[Running]],
) -> None:
    job = new_job(*TRAINED, *GATED, settings=settings)
    with relays_of(job, warm):
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


@contextmanager
def chain(
    new_job: Callable[..., Job], warm: WarmStarter, **more: str
) -> Iterator[tuple[Job, list[Running], list[dict[str, str]]]]:
    """Start a job, and one relay after another, which attach below each other by themselves."""
    job = new_job(*TRAINED, *GATED, settings=more, script=PROBE.with_name("narrow_tree.py"))
    settings = [behind_relay() for _ in job.ranks]
    relays = []
    with ExitStack() as stack:
        job.start_scheduler()
        for number, where in enumerate(settings):
            relays.append(stack.enter_context(relay_of(job, warm, name=f"relay_{number}", **where)))
            above = settings[number - 1]["SCHED_HOST"].split(",")[0].removeprefix("relay:")
            job.wait_for(f"relay_{number}", f"reachable through the relay at {above}" if number else "is reachable")
        for rank, where in zip(job.ranks, settings, strict=True):
            job.start_worker(rank, **where)
        job.open_gates(0)
        job.wait_for_step(15)
        yield job, relays, settings


def direct(job: Job, *relays: str) -> list[str]:
    """Return those of the relays that are attached to the scheduler itself, by their last line about it."""
    ways = {name: job.matches(name, r"the scheduler is (unreachable|reachable through|reachable)") for name in relays}
    return [name for name, found in ways.items() if found and found[-1][1] == "reachable"]


@pytest.mark.parametrize(
    ("number", "secret"), [(signal.SIGKILL, SECRET), (signal.SIGSTOP, "")], ids=["killed-secret", "stopped"]
)
def test_relays_that_chose_their_places_choose_others_without_losing_a_step(
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
    warm: WarmStarter,
    number: signal.Signals,
    secret: str,
) -> None:
    with chain(new_job, warm, CLUSTER_SECRET=secret) as (job, relays, _):
        relays[1].signal(number)
        job.wait_for("relay_2", "the scheduler is reachable directly")
        job.wait_until(lambda: len(direct(job, "relay_0", "relay_2", "relay_3")) == 1 or None, "tree of one root")
        for rank in job.ranks[1:]:
            job.wait_for(rank, BACK)
        relays[1].signal(signal.SIGCONT)
        job.open_gates(40)
        assert job.wait_finished() == undisturbed(*TRAINED)
    assert_no_new_round(job)
    for rank in job.ranks:
        assert [step.number for step in job.steps(rank)] == list(range(1, STEPS + 1)), "a step was repeated"


def test_killed_worker_scheduler_and_upgraded_relay_in_a_tree_that_chose_itself(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], warm: WarmStarter
) -> None:
    with chain(new_job, warm, CLUSTER_SECRET=SECRET) as (job, relays, settings):
        job.kill(3)
        job.wait_for("scheduler", r"worker 3 \(pid \d+ on \S+\) is lost: its (process|connection)")
        job.start_worker(3, **settings[3])
        for rank in job.ranks:
            job.wait_for(rank, f"generation 2: rank {rank} of 4")
        job.scheduler.kill()
        for rank in job.ranks:
            job.wait_for(rank, AWAY)
        job.start_scheduler()
        for rank in job.ranks:
            job.wait_for(rank, BACK)
        relays[0].signal(signal.SIGTERM)
        relays[0].wait(WAIT_S)
        with relay_of(job, warm, name="relay_again", **settings[0]):
            job.wait_for("relay_again", "the scheduler is reachable")
            now = ("relay_again", "relay_1", "relay_2", "relay_3")
            job.wait_until(lambda: len(direct(job, *now)) == 1 or None, "tree of one root")
            job.open_gates(40)
            assert job.wait_finished() == undisturbed(*TRAINED)
    assert len(job.matches("scheduler", r"round \S+ opened")) == 2, job.tails()


@pytest.mark.parametrize("is_inner", [False, True], ids=["host", "inner"])
def test_lying_relay_hides_no_loss_and_is_reported(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], warm: WarmStarter, *, is_inner: bool
) -> None:
    """It withholds the closed connection, and repeats and changes the ranks' messages, heartbeats and joins included.

    The scheduler cannot see the process, so it depends on another rank's report or on the end of the lease.
    """
    start, lying = (inner_of if is_inner else relay_of), PROBE.with_name("lying_relay.py")
    settings = (behind_inner if is_inner else behind_relay)(CLUSTER_SECRET=SECRET, NODE_TIMEOUT="3")
    job = new_job(*TRAINED, *GATED, settings=settings, script=PROBE.with_name("on_host.py"))
    elsewhere = {HOST: "elsewhere"}
    with start(job, warm, lying):
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
