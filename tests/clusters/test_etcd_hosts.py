"""A job whose etcd's members are on hosts of their own: a minority cut off, a full disk, a host lost with a member."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samebits.etcd_place import EtcdAccess, EtcdPlace
from samebits.store.etcd.etcd_journal import CHUNK_BYTES, JOURNALS, EtcdClaim, EtcdJournal, read_etcd_journal
from samebits.store.etcd.gateway import EtcdGateway
from samebits.store.journal import read_journal
from tests.clusters.hosts import HostsJob
from tests.clusters.namespaces import Host, Switch, cut_off, mend
from tests.store.etcd.etcd_cluster import ETCD, EtcdCluster, cluster_in

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(ETCD is None, reason="no etcd is installed (apt-get install etcd-server)"),
]

CUT, MENDED = 20, 40
TRAINED = ("--steps", "60", "--interval", "10")
GATES = ("--gates", str(CUT))
QUICK = {"NODE_TIMEOUT": "2", "HEARTBEAT_INTERVAL": "0.5"}
DISK_MIB = 160
"""An etcd reserves two files of 64 MB for its log in advance."""


@contextmanager
def etcd_on(switch: Switch, folder: Path) -> Iterator[EtcdCluster]:
    """Run an etcd on all hosts of the switch but the first."""
    with cluster_in(folder, hosts=switch.hosts[1:]) as cluster:
        yield cluster


def started(new_hosts_job: Callable[..., HostsJob], switch: Switch, cluster: EtcdCluster) -> HostsJob:
    """Start a job whose processes are all on the first host; return it once it has reached the step ``CUT``."""
    settings = QUICK | {"RECOVERY_PATH": str(cluster.place())}
    job = new_hosts_job(*TRAINED, *GATES, switch=switch, settings=settings)
    job.place = dict.fromkeys(job.place, switch.hosts[0])
    job.start()
    job.open_gates(0)
    job.wait_for_step(CUT)
    return job


def require_whole(job: HostsJob, cluster: EtcdCluster) -> None:
    """The journal in the etcd is the one that the scheduler has written, without a record twice or missing."""
    gateway = EtcdGateway(cluster.place(), EtcdAccess())
    found = cluster.inside[-1].submit(read_etcd_journal, gateway, JOURNALS[0]).result()
    written = read_journal(job.disk_of(job.place["scheduler"]) / "recovery")
    assert written is not None
    assert found == written.payloads
    for rank in job.ranks:
        numbers = [step.number for step in job.steps(rank)]
        if rank not in job.restarted:
            assert numbers == list(range(1, 61)), f"rank {rank} repeated or lost a step: {numbers}"


@pytest.mark.parametrize("reached_by", ["the scheduler", pytest.param("nothing", marks=pytest.mark.thorough)])
def test_job_recovers_while_etcds_leader_is_cut_off(
    reached_by: str,
    tmp_path: Path,
    new_switch: Callable[..., Switch],
    new_hosts_job: Callable[..., HostsJob],
    undisturbed: Callable[..., str],
) -> None:
    """The scheduler may still talk to the leader, which knows no majority any more."""
    switch = new_switch("head", "x", "y", "z")
    head, *members = switch.hosts
    with etcd_on(switch, tmp_path / "etcd") as cluster:
        job = started(new_hosts_job, switch, cluster)
        leader = cluster.leader()
        assert leader is not None
        others = [host for host in members if host is not members[leader]]
        cut_off(members[leader], others if reached_by == "the scheduler" else [head, *others])
        job.kill(1)
        job.start_worker(1)
        job.open_gates(CUT)
        job.wait_for_step(MENDED)  # the round of the replacement is in the journal
        mend(members[leader], [head, *others])
        job.kill(2)
        job.start_worker(2)
        job.open_gates(MENDED, 60)
        assert job.wait_finished() == undisturbed(*TRAINED, workers=3)
        require_whole(job, cluster)


def test_job_recovers_while_the_disk_of_etcds_leader_is_full(
    tmp_path: Path,
    new_switch: Callable[..., Switch],
    new_hosts_job: Callable[..., HostsJob],
    undisturbed: Callable[..., str],
) -> None:
    """Such a member ends with an error. It returns with its data once there is room."""
    switch = new_switch("head", "x", "y", "z")
    _, *members = switch.hosts
    disks = [tmp_path / "etcd" / f"m{number}" for number in range(len(members))]
    for member, disk in zip(members, disks, strict=True):
        disk.mkdir(parents=True)
        on_files_of(member, "mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "small", str(disk))
    with etcd_on(switch, tmp_path / "etcd") as cluster:
        job = started(new_hosts_job, switch, cluster)
        leader = cluster.leader()
        assert leader is not None
        filler = disks[leader] / "filler"
        on_files_of(members[leader], "sh", "-c", f"! cat /dev/zero >{filler}")
        cluster.inside[leader].submit(write_much, cluster.place("/jobs/other")).result()
        cluster.wait(leader)
        job.kill(1)
        job.start_worker(1)
        job.open_gates(CUT)
        job.wait_for_step(MENDED)
        on_files_of(members[leader], "rm", str(filler))
        cluster.start(leader)
        cluster.wait_ready()
        job.kill(2)
        job.start_worker(2)
        job.open_gates(MENDED, 60)
        assert job.wait_finished() == undisturbed(*TRAINED, workers=3)
        require_whole(job, cluster)


def on_files_of(host: Host, *words: str) -> None:
    """Run a command with the host's mounts."""
    subprocess.run(["nsenter", "--target", str(host.pid), "--mount", *words], check=True, capture_output=True)


def write_much(place: EtcdPlace) -> None:
    """Be another job that writes more than the space that a database of an etcd has in reserve."""
    log, _ = EtcdJournal.load(EtcdClaim.take(EtcdGateway(place, EtcdAccess()), b"another job"), "journal")
    log.append([bytes(CHUNK_BYTES)] * 4)


def test_standby_takes_over_from_a_host_lost_with_a_member_of_the_etcd(
    tmp_path: Path,
    new_switch: Callable[..., Switch],
    new_hosts_job: Callable[..., HostsJob],
    undisturbed: Callable[..., str],
) -> None:
    """The standby's connections to the scheduler and to that member do not end."""
    switch = new_switch("head", "a", "b")
    head, second, _ = switch.hosts
    with cluster_in(tmp_path / "etcd", hosts=list(switch.hosts)) as cluster:
        settings = QUICK | {"RECOVERY_PATH": str(cluster.place())}
        job = new_hosts_job(*TRAINED, *GATES, switch=switch, standbys=1, settings=settings)
        job.place |= dict.fromkeys(job.ranks, second)
        job.start()
        job.open_gates(0)
        job.wait_for_step(CUT)
        since = job.count("scheduler")
        job.move_scheduler(second)
        job.wait_for("scheduler", "this scheduler stands by", since=since)
        head.unplug()
        cluster.signal(0, signal.SIGKILL)
        job.lose(head)
        job.wait_for("scheduler", "resumes, term 2", since=since)
        job.kill(1)
        job.start_worker(1)
        job.open_gates(CUT, MENDED, 60)
        assert job.wait_finished() == undisturbed(*TRAINED, workers=3)
        require_whole(job, cluster)
