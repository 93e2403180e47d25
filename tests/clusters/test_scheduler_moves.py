"""Scheduler failover to another host: the first is lost, or lives behind a partition without effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebits.errors import SupersededError
from tests.clusters.hosts import HostsJob
from tests.clusters.namespaces import Family, Switch, cut_off, mend
from tests.system.job import WAIT_S

pytestmark = pytest.mark.system

TRAINED = ("--steps", "60", "--interval", "10")
GATE = 30
QUICK = {"NODE_TIMEOUT": "2", "HEARTBEAT_INTERVAL": "0.5"}
NOBODY_LOST = r"worker \d .* is lost"


@pytest.fixture
def on_four(new_switch: Callable[..., Switch], new_hosts_job: Callable[..., HostsJob]) -> Callable[..., HostsJob]:
    """Return a factory of jobs whose scheduler has the first host alone and may move to the second; each rank has its
    own.
    """

    def make(*args: str, settings: dict[str, str] | None = None, **options: object) -> HostsJob:
        switch = new_switch("head", "a", "b", "c")
        job = new_hosts_job(
            *TRAINED,
            "--gates",
            str(GATE),
            *args,
            switch=switch,
            shared=True,
            settings=QUICK | (settings or {}),
            **options,
        )
        job.place |= {rank: switch.hosts[1 + rank] for rank in job.ranks}
        return job

    return make


def test_another_host_takes_over_from_the_lost_scheduler(
    on_four: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """No address moves: SCHED_HOST names both hosts, and the journal is visible to both."""
    job = on_four(standbys=1)
    job.start()
    job.open_gates(0)
    job.wait_for_step(10)
    job.lose(job.place["scheduler"])
    job.open_gates(GATE)
    job.wait_for_step(GATE + 1)
    job.move_scheduler(job.place[0])
    for rank in job.ranks:
        job.wait_for(rank, r"the scheduler is reachable again after .* s, term 2, at 10\.99\.0\.2:")
    assert job.wait_finished() == undisturbed(*TRAINED, workers=3)
    assert not job.matches("scheduler", NOBODY_LOST), "all workers found it in time"


@pytest.mark.thorough
def test_host_of_the_scheduler_and_a_rank_is_lost(
    new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """The host's disk is lost too: the rank resumes on a new host from a peer's memory, under a new scheduler."""
    job = new_hosts_job(*TRAINED, "--gates", str(GATE), shared=True, standbys=1, settings=QUICK)
    job.start()
    job.open_gates(0)
    job.wait_for_step(10)
    lost = job.place["scheduler"]
    assert job.ranks_on(lost) == [0]
    job.lose(lost)
    job.move_scheduler(job.switch.hosts[0])
    job.open_gates(GATE)
    job.replace(lost, "a2")
    job.start_worker(0)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=3)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("hears", ["nobody", "one worker"])
def test_superseded_scheduler_behind_a_partition_has_no_effect(
    hears: str, family: Family, on_four: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """The lock is lost, as on a file system without locks; only the claim of the term distinguishes them."""
    job = on_four(standbys=1, family=family)
    job.start()
    job.open_gates(0)
    job.wait_for_step(10)
    old, head, workers = job.scheduler, job.place["scheduler"], [job.place[rank] for rank in job.ranks]
    cut = workers if hears == "nobody" else workers[:-1]
    cut_off(head, cut)
    job.wait_for("scheduler", r"worker \d .* is lost")  # the old one writes, correctly so far
    since = job.count("scheduler")
    (job.folder / "shared" / "recovery" / "lock").unlink()
    job.move_scheduler(job.place[0])
    assert old.wait(WAIT_S) == SupersededError.exit_code
    job.wait_for("scheduler", r"has claimed term 2, so this scheduler, of term 1, has stopped", since=since)
    mend(head, cut)
    job.open_gates(GATE)
    statuses = job.wait_ended()
    assert set(statuses.values()) == {0}, job.tails()
    assert job.sha256() == undisturbed(*TRAINED, workers=3)
    for rank in job.ranks:
        numbers = [step.number for step in job.steps(rank)]
        assert numbers[-1] == 60 and set(numbers) == set(range(1, 61)), f"rank {rank}: {numbers}"


@pytest.mark.thorough
def test_scheduler_stopped_and_replaced_sends_nothing_when_it_continues(
    on_four: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """Like a paused virtual machine, it wakes up with all connections as they were."""
    job = on_four(standbys=1)
    job.start()
    job.open_gates(0)
    job.wait_for_step(10)
    old = job.scheduler
    old.signal(19)
    (job.folder / "shared" / "recovery" / "lock").unlink()
    job.move_scheduler(job.place[0])
    for rank in job.ranks:
        job.wait_for(rank, r"the scheduler is reachable again after .* s, term 2")
    old.signal(18)
    assert old.wait(WAIT_S) == SupersededError.exit_code
    job.open_gates(GATE)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=3)


@pytest.mark.thorough
def test_file_names_the_schedulers_address(on_four: Callable[..., HostsJob], undisturbed: Callable[..., str]) -> None:
    """The file is rewritten while the job runs, at first incompletely."""
    job = on_four()
    hosts = job.folder / "hosts"
    job.settings["SCHED_HOST"] = f"file:{hosts}"
    hosts.write_text(f"{job.place['scheduler'].address()}\n")
    job.start()
    job.open_gates(0)
    job.wait_for_step(10)
    job.lose(job.place["scheduler"])
    hosts.write_text("10.99")
    job.wait_for(0, r"hosts, which SCHED_HOST names, cannot be used: its last line has no line break")
    hosts.write_text(f"{job.place[0].address()}:{job.port}\n")
    job.move_scheduler(job.place[0])
    for rank in job.ranks:
        job.wait_for(rank, r"the scheduler is reachable again after .* s, term 2, at 10\.99\.0\.2:")
    job.open_gates(GATE)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=3)
