"""A job over hosts with checkpoints in a bucket: hosts are lost with their disks, one by one and all; same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.clusters.hosts import HostsJob
from tests.clusters.namespaces import Host, Switch, listening_inside
from tests.store.checkpoint.remote.s3_server import BUCKET, S3Server, step_of

pytestmark = [pytest.mark.system, pytest.mark.thorough]

GATES = 20
TRAINED = ("--steps", "80", "--interval", "10")
QUICK = {"NODE_TIMEOUT": "2", "HEARTBEAT_INTERVAL": "0.5"}
INTERRUPTED = 77


@pytest.fixture
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


def newest_in(s3: S3Server, slot: int) -> int:
    """Return the step of the slot's newest complete point in the bucket, or 0."""
    steps = [step_of(name) for name in s3.names() if f"/{slot}/step" in name and name.endswith(".msgpack")]
    return max(steps, default=0)


class BucketJob:
    """Two ranks on separate hosts; the scheduler and the store on another one."""

    def __init__(self, s3: S3Server, switch: Switch, new_hosts_job: Callable[..., HostsJob]) -> None:
        self.s3 = s3
        head, *hosts = switch.hosts
        store = {"CHECKPOINT_PATH": f"s3://{BUCKET}/job", **s3.environment}
        store["AWS_ENDPOINT_URL"] = s3.listen_also(listening_inside(head))
        settings = QUICK | store
        self.job = new_hosts_job(*TRAINED, "--gates", str(GATES), switch=switch, workers=len(hosts), settings=settings)
        self.job.place |= dict(enumerate(hosts))
        self.job.start()
        self.job.open_gates(0)

    def wait_at(self, gate: int) -> None:
        """Wait until every rank waits there and has a point in the bucket, since a save is skipped during another."""
        job = self.job
        for rank in job.ranks:
            job.wait_for(rank, f"waits at the gate of step {gate}")
            job.wait_until(lambda rank=rank: newest_in(self.s3, rank) or None, f"point of rank {rank} in the bucket")

    def lose(self, *ranks: int) -> list[Host]:
        """Lose the hosts of these ranks, with memory and disk."""
        lost = [self.job.place[rank] for rank in ranks]
        for host in lost:
            self.job.lose(host)
        return lost

    def replace(self, *lost: Host) -> None:
        for host in lost:
            self.job.replace(host, f"{host.name}-again")


def test_hosts_are_lost_one_by_one_and_then_all_of_them(
    s3: S3Server,
    new_switch: Callable[..., Switch],
    new_hosts_job: Callable[..., HostsJob],
    undisturbed: Callable[..., str],
) -> None:
    """A single lost rank resumes from the other's memory. When all memory is lost, only the bucket is left."""
    bucket = BucketJob(s3, new_switch("head", "a", "b"), new_hosts_job)
    job = bucket.job
    for rank, gate in ((0, GATES), (1, 2 * GATES)):
        bucket.wait_at(gate)
        bucket.replace(*bucket.lose(rank))
        job.start_worker(rank)
        job.wait_for("scheduler", rf"worker {rank} .* is lost")
        job.open_gates(gate)
    bucket.wait_at(3 * GATES)
    before = job.count(0)
    lost = bucket.lose(*job.ranks)
    held = min(newest_in(s3, rank) for rank in job.ranks)
    assert job.scheduler.wait() == INTERRUPTED, job.tails()
    bucket.replace(*lost)
    job.open_gates(3 * GATES)
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED, workers=len(job.ranks))
    (resumed,) = job.matches(0, r"generation \d+: rank 0 of 2 continues from step (\d+)", since=before)
    assert held <= int(resumed[1]) <= 3 * GATES
    assert not [path for host in job.switch.hosts for path in job.disk_of(host).rglob("*.safetensors")]
