"""Foreign connections at every port of the workers, more than there are descriptors: no effect on the job."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostile.attackers import is_let_in, listening_ports
from tests.system.few_descriptors import SOFT_LIMIT
from tests.system.job import PROBE, Job
from tests.system.kill_list import GATE, GATED, MIDDLE, TRAINED

pytestmark = pytest.mark.system

WORKERS = 3
CALLERS = 300


@contextlib.contextmanager
def callers(addresses: list[tuple[str, int]]) -> Iterator[None]:
    """Open this many silent connections to each port, as far as they are accepted."""
    with contextlib.ExitStack() as stack:
        for address in addresses:
            for _ in range(CALLERS):
                caller = stack.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(address)
        yield


def descriptors(job: Job, rank: int) -> int:
    return len(list(Path(f"/proc/{job.worker(rank).pid}/fd").iterdir()))


def test_strangers_take_no_descriptor_that_a_worker_needs(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    """Tested while the workers wait for the last of them, while they train, and while one is killed and returns."""
    expected = undisturbed(*TRAINED, workers=WORKERS)
    script = PROBE.with_name("few_descriptors.py")
    job = new_job(*TRAINED, *GATED, workers=WORKERS, script=script)
    job.open_gates(0)
    job.start_scheduler()
    waiting = (0, 1)
    for rank in waiting:
        job.start_worker(rank)
    for rank in waiting:
        job.wait_for(rank, r"seated: slot \d of 3")
    with callers([address for rank in waiting for address in listening_ports(job.worker(rank).pid)]):
        for rank in waiting:
            job.wait_until(lambda rank=rank: descriptors(job, rank) > SOFT_LIMIT or None, "flood")  # type: ignore[misc]
        job.start_worker(2)
        job.wait_for_step(MIDDLE)
        with callers([address for rank in job.ranks for address in listening_ports(job.worker(rank).pid)]):
            job.kill(1)
            job.open_gates(GATE)
            job.start_worker(1)
            assert job.wait_finished() == expected


def test_workers_listen_only_on_the_addresses_towards_the_scheduler(new_job: Callable[..., Job]) -> None:
    job = new_job(*TRAINED, *GATED, workers=2)
    job.start()
    job.open_gates(0)
    job.wait_for_step(5)
    pids = [job.scheduler.pid, *(process.pid for process in job.processes())]
    listening = {address for pid in pids for address in listening_ports(pid)}
    assert {host for host, _ in listening} == {"127.0.0.1"}
    assert len(listening) >= 5, "the scheduler, and of each worker gloo and its writer"
    assert not any(is_let_in(("127.0.0.2", port)) for _, port in listening)
    job.open_gates(GATE)
    job.wait_finished()
