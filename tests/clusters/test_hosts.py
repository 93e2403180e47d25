"""A job over several hosts, each with its own address, pids, memory and disk, ends with one machine's bits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.core import records
from samebits.core.records import TermStarted
from samebits.store.journal import read_journal
from tests.clusters.hosts import HostsJob
from tests.clusters.namespaces import Switch
from tests.system.job import PROBE, WAIT_S
from tests.system.probe import gate_of
from tests.system.processes import Command, Running, WarmStarter
from tests.system.test_scheduler_away import assert_no_new_round

pytestmark = pytest.mark.system

INTERVAL = 10
TRAINED = ("--steps", "60", "--interval", str(INTERVAL))
WORKERS = 3
MIDDLE = 25  # no multiple of the interval
GATE = 30  # the job waits here until it was disturbed
QUICK = {"NODE_TIMEOUT": "2", "HEARTBEAT_INTERVAL": "0.5"}
FREE_OF_TRAINING_BYTES = 20_000
"""Bytes sent by an interface without training: neighbour discovery and the like."""


def journaled(recovery: Path) -> list[records.Record]:
    contents = read_journal(recovery)
    assert contents is not None
    return [records.SCHEMA.unpack(payload) for payload in contents.payloads]


def test_lost_host_is_replaced_and_no_bit_changes(
    new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """The host is lost as in a power cut: no connection is closed, and its memory and disk are gone."""
    job = new_hosts_job(*TRAINED, "--gates", str(GATE), settings=QUICK)
    job.start()
    job.open_gates(0)
    job.wait_for_step(MIDDLE)
    lost = job.place[1]
    job.lose(lost)
    job.open_gates(GATE)
    job.replace(lost, "b2")
    job.start_worker(1)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)


def test_relays_that_listen_on_loopback_form_a_tree_across_hosts(
    new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str], warm: WarmStarter
) -> None:
    """Each states the address at which the others reach its host; the death of one costs no step."""
    job = new_hosts_job(*TRAINED, "--gates", str(GATE), script=PROBE.with_name("narrow_tree.py"))
    behind = {"SCHED_HOST": f"relay:127.0.0.1:8119,{job.settings['SCHED_HOST']}"}
    job.start_scheduler()
    relays: list[Running] = []
    for rank, host in enumerate(job.switch.hosts):
        name, folder = f"relay_{rank}", job.disk_of(host)
        folder.mkdir(exist_ok=True)
        order = Command(None, ("relay",), job.environment(**behind), folder, job.log(name), inside=host.pid)
        relays.append(warm.start(order))
        if rank:
            above = job.switch.hosts[rank - 1].address()
            job.wait_for(name, f"the scheduler is reachable through the relay at {above}:8119")
        else:
            job.wait_for(name, "the scheduler is reachable")
        job.start_worker(rank, **behind)
    job.open_gates(0)
    job.wait_for_step(MIDDLE)
    relays[1].signal(signal.SIGKILL)
    job.wait_for("relay_2", "the scheduler is reachable directly")
    job.open_gates(GATE)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)
    assert_no_new_round(job)
    for relay in relays:
        relay.signal(signal.SIGKILL)
        relay.wait(WAIT_S)


@pytest.mark.thorough
def test_hosts_with_equal_names_are_distinguished(
    new_switch: Callable[..., Switch], new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """Pids are equal as well: every host counts from 1, as machines and containers do."""
    job = new_hosts_job(*TRAINED, switch=new_switch("node", "node", "node"))
    job.start()
    job.wait_for_step(MIDDLE)
    job.kill(2)
    job.start_worker(2)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)
    assert {
        match[1] for rank in (1, 2) for match in job.matches("scheduler", rf"worker {rank} \(pid (\d+) on node\) has")
    }


@pytest.mark.thorough
def test_hosts_whose_clocks_differ_by_weeks(
    new_switch: Callable[..., Switch], new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """A scheduler on another host cannot tell from the journal how long ago a worker was heard, and does not try to."""
    switch = new_switch("a")
    for name, up_s in (("b", 3_000_000), ("c", -int(time.clock_gettime(time.CLOCK_BOOTTIME) // 2))):
        switch.host(name, up_s=up_s)
    job = new_hosts_job(*TRAINED, switch=switch, shared=True, standbys=2, settings=QUICK | {"REGISTER_COOLDOWN": "2"})
    job.start()
    job.wait_for_step(MIDDLE)
    job.kill(2)
    job.scheduler.signal(signal.SIGKILL)
    job.scheduler.wait(WAIT_S)
    job.move_scheduler(switch.hosts[1])
    job.start_worker(2)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)
    history = journaled(job.folder / "shared" / "recovery")
    boots = {record.boot_id for record in history if isinstance(record, TermStarted)}
    assert len(boots) == 2, f"the two schedulers take each other's clock for their own: {boots}"


@pytest.mark.thorough
def test_hosts_that_use_ipv6(new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]) -> None:
    job = new_hosts_job(*TRAINED, family="IPv6")
    job.start()
    job.wait_for_step(MIDDLE)
    job.kill(1)
    job.start_worker(1)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)
    job.wait_for("scheduler", r"listening on fd00:99:0::1|listening on fd00:99::1")


@pytest.mark.thorough
def test_all_traffic_uses_the_network_of_sched_host(
    new_switch: Callable[..., Switch], new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """Includes gradients, restored states and copies. The hosts' first network is slow and carries none of them."""
    switch = new_switch("a", "b", "c", networks=2)
    for host in switch.hosts:
        host.slow_down("64kbit")
    job = new_hosts_job(*TRAINED, switch=switch, network=1)
    job.start()
    job.wait_for_step(MIDDLE)
    job.kill(2)
    job.start_worker(2)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)
    for host in switch.hosts:
        assert host.bytes_sent(0) < FREE_OF_TRAINING_BYTES < host.bytes_sent(1)


@pytest.mark.thorough
def test_slow_lossy_network_changes_no_bit(
    new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    job = new_hosts_job(*TRAINED)
    for host in job.switch.hosts:
        host.slow_down("20mbit")
        host.lose_packets(2)
    job.start()
    job.wait_for_step(MIDDLE)
    job.kill(1)
    job.start_worker(1)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)


@pytest.mark.thorough
@pytest.mark.parametrize("ways", ["one way", "both ways"])
def test_worker_cut_off_from_the_scheduler_returns(
    ways: str, new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """The worker is cut off for longer than its lease, so it loses its seat while its process lives."""
    job = new_hosts_job(*TRAINED, settings=QUICK)
    job.start()
    job.wait_for_step(MIDDLE)
    scheduler, cut = job.place["scheduler"], job.place[2]
    cut.cut_towards(scheduler)
    if ways == "both ways":
        scheduler.cut_towards(cut)
    job.wait_for("scheduler", r"worker 2 .* is lost")
    cut.mend_towards(scheduler)
    scheduler.mend_towards(cut)
    statuses = job.wait_ended()
    assert set(statuses.values()) == {0}, job.tails()
    assert job.sha256() == undisturbed(*TRAINED, workers=WORKERS)


@pytest.mark.thorough
@pytest.mark.parametrize("ways", ["one way", "both ways"])
def test_workers_cut_off_from_each_other_but_not_from_the_scheduler(
    ways: str, new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """No worker may be lost: TCP retransmits, so the interrupted collective continues."""
    job = new_hosts_job(*TRAINED, settings=QUICK)
    job.start()
    job.wait_for_step(MIDDLE)
    one, other = job.place[1], job.place[2]
    one.cut_towards(other)
    if ways == "both ways":
        other.cut_towards(one)
    felt = other.segments_sent_again() + one.segments_sent_again() + 3
    job.wait_until(
        lambda: True if other.segments_sent_again() + one.segments_sent_again() >= felt else None, "lost segments"
    )
    one.mend_towards(other)
    other.mend_towards(one)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)


@pytest.mark.thorough
def test_schedulers_host_is_lost_and_its_address_moves(
    new_switch: Callable[..., Switch], new_hosts_job: Callable[..., HostsJob], undisturbed: Callable[..., str]
) -> None:
    """The journal is lost with the host; the new scheduler rebuilds it from the workers' reports."""
    job = new_hosts_job(*TRAINED, "--gates", "30", switch=new_switch("head", "a", "b", "c"))
    lost = job.place["scheduler"]
    job.place |= {rank: job.switch.hosts[1 + rank] for rank in job.ranks}
    job.start()
    gate_of(job.folder, 0).touch()
    for rank in job.ranks:
        job.wait_for(rank, "waits at the gate of step 30")
    job.lose(lost)
    job.replace(lost, "head2", number=lost.number)
    job.start_scheduler()
    job.wait_for("scheduler", "rebuilt|resumes")
    gate_of(job.folder, 30).touch()
    assert job.wait_finished() == undisturbed(*TRAINED, workers=WORKERS)


@pytest.mark.thorough
@pytest.mark.parametrize("kill", ["backward", "stepped", "committed"])
def test_ranks_generators_are_fetched_from_the_host_where_it_died(
    kill: str,
    new_switch: Callable[..., Switch],
    new_hosts_job: Callable[..., HostsJob],
    undisturbed: Callable[..., str],
) -> None:
    """Rank 0 on the same host sends the dead rank's page; there are no checkpoints."""
    trained = ("--steps", "40", "--interval", "1000", "--rng", "saved")
    job = new_hosts_job(*trained, "--kill", f"2:{kill}:{MIDDLE}", switch=new_switch("a", "b"))
    job.start()
    job.wait_killed(2)
    assert job.place[2] is job.place[0]
    job.place[2] = job.place[1]
    job.start_worker(2)
    assert job.wait_finished() == undisturbed(*trained, workers=WORKERS)
    assert job.matches(
        "scheduler", r"the generators of ranks? [0-9, and]*2[0-9, and]* are restored from pages in memory"
    )
    for rank in (0, 1):
        numbers = [step.number for step in job.steps(rank)]
        assert numbers == sorted(set(numbers)), f"rank {rank} took a step twice: {numbers}"
