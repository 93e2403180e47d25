"""A host lost with memory and disk: its ranks resume elsewhere from the copies their buddies keep."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.store.checkpoint import points_in_memory, rank_directory, scan
from samebits.store.checkpoint.memory_room import RoomKind
from samebits.store.owner import read_owner
from tests.system.job import PROBE, WAIT_S, Job, JobFolder, is_writer
from tests.system.kill_list import INTERVAL
from tests.system.on_host import HOST, MEMORY
from tests.system.processes import WarmStarter, signal_process

pytestmark = pytest.mark.system

TRAINED = ("--steps", "60", "--interval", str(INTERVAL), "--rng", "saved")
SAVED = 2 * INTERVAL
SECRET = "a secret of more than sixteen bytes"


class Hosts(Job):
    """A job on two hosts: ranks 0 and 1 on ``a``, the others on ``b``."""

    def __init__(self, folder: Path, starter: WarmStarter, *, settings: Mapping[str, str] | None = None) -> None:
        args = (*TRAINED, "--gates", str(INTERVAL))
        super().__init__(folder, starter, script=PROBE.with_name("on_host.py"), args=args, settings=settings)

    def start_workers(self, host: str, *ranks: int) -> None:
        """Start workers with the memory and disk of their host."""
        self.memory_of(host).mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            self.start_worker(
                rank,
                **{HOST: host, MEMORY: str(self.memory_of(host)), "CHECKPOINT_PATH": str(self.disk_of(host))},
            )

    def memory_of(self, host: str) -> Path:
        return self.folder / host / "memory"

    def disk_of(self, host: str) -> Path:
        return self.folder / host / "disk"

    def lose(self, host: str) -> None:
        """Remove everything of a host: its workers are gone already, their writers end now."""
        mark = os.fsencode(self.memory_of(host))
        for identity in self.processes():
            if is_writer(identity, of=mark):
                signal_process(identity, signal.SIGKILL)
                assert identity.wait_for_exit(WAIT_S)
        shutil.rmtree(self.folder / host)

    def wait_for_gate(self, step: int) -> None:
        for rank in self.ranks:
            self.wait_for(rank, f"gate of step {step}")

    def copies(self, host: str, slot: int) -> list[Point]:
        """Return what that host keeps for the slot's rank elsewhere."""
        owner = read_owner(rank_directory(self.disk_of("b"), 2))
        assert owner is not None
        found, problems = points_in_memory(self.memory_of(host), owner.job, slot, kind=RoomKind.COPIED)
        assert problems == []
        return [one.point for one in found]

    def wait_for_copies(self, step: int) -> None:
        for slot, host in {0: "b", 1: "b", 2: "a", 3: "a"}.items():
            self.wait_until(
                lambda host=host, slot=slot: [one for one in self.copies(host, slot) if one.step == step] or None,
                f"copy of slot {slot} on host {host}",
            )


@pytest.fixture
def hosts(
    tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None], request: pytest.FixtureRequest
) -> Iterator[Hosts]:
    """Return a job at the gate after step 20, which all ranks have saved and copied."""
    job = Hosts(tmp_path, warm, settings=getattr(request, "param", {}))
    watched(job)
    job.start_scheduler()
    job.start_workers("a", 0, 1)
    job.start_workers("b", 2, 3)
    job.open_gates(0, INTERVAL)
    job.wait_for_gate(SAVED)
    job.wait_for_copies(SAVED)
    yield job


def assert_everything_is_given_back(job: Hosts) -> None:
    for host in ("b", "c"):
        assert [path for path in job.memory_of(host).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param({}, marks=pytest.mark.thorough, id="no secret"),
        pytest.param({"CLUSTER_SECRET": SECRET}, id="a secret"),
    ],
    indirect=True,
)
def test_lost_ranks_load_the_copies_of_the_survivors(hosts: Hosts, undisturbed: Callable[..., str]) -> None:
    hosts.kill(0, 1)
    hosts.lose("a")
    hosts.start_workers("c", 0, 1)
    hosts.open_gates(*range(SAVED, 60, INTERVAL))
    assert hosts.wait_finished() == undisturbed(*TRAINED)
    for rank in hosts.ranks:
        hosts.wait_for(rank, rf"generation 2: .* from step {SAVED}\b.*from copies of ranks 0 and 1 on ranks 2 and 3")
    assert_everything_is_given_back(hosts)


def test_everything_is_killed_and_one_host_is_lost(hosts: Hosts, undisturbed: Callable[..., str]) -> None:
    hosts.kill_everything()
    hosts.lose("a")
    hosts.start_scheduler()
    hosts.start_workers("c", 0, 1)
    hosts.start_workers("b", 2, 3)
    hosts.open_gates(*range(SAVED, 60, INTERVAL))
    assert hosts.wait_finished() == undisturbed(*TRAINED)
    found = hosts.wait_for(
        0, rf"generation 2: .* from step {SAVED}\b.*from copies of ranks 0 and 1 on ranks? ([0-9, and]*)"
    )
    assert set(re.findall(r"\d", found[1])) <= {"2", "3"}
    assert_everything_is_given_back(hosts)


def test_hosts_exchange_copies_if_nothing_else_is_left(hosts: Hosts, undisturbed: Callable[..., str]) -> None:
    """Every rank sends and receives, so the waits must not form a cycle."""
    hosts.kill_everything()
    for host in ("a", "b"):
        shutil.rmtree(hosts.disk_of(host))
        for room in hosts.memory_of(host).glob("*/*/[0-9]"):
            shutil.rmtree(room)
    hosts.start_scheduler()
    hosts.start_workers("a", 0, 1)
    hosts.start_workers("b", 2, 3)
    hosts.open_gates(*range(SAVED, 60, INTERVAL))
    assert hosts.wait_finished() == undisturbed(*TRAINED)
    hosts.wait_for(0, rf"generation 2: .* from step {SAVED}\b.*, from copies of ranks 0, 1, 2 and 3 on rank.*")


@pytest.mark.thorough  # → a damaged copy is skipped by name: tests/store/checkpoint, tests/training/checkpoint
def test_damaged_copy_is_named_and_the_previous_one_is_used(hosts: Hosts, undisturbed: Callable[..., str]) -> None:
    hosts.kill(0, 1)
    hosts.lose("a")
    owner = read_owner(rank_directory(hosts.disk_of("b"), 2))
    assert owner is not None
    (newest, *_), _ = points_in_memory(hosts.memory_of("b"), owner.job, 0, kind=RoomKind.COPIED)
    assert newest.data_offset is not None
    with newest.path.open("r+b") as file:
        file.seek(newest.data_offset + 1000)
        byte = file.read(1)[0]
        file.seek(newest.data_offset + 1000)
        file.write(bytes([byte ^ 1]))
    hosts.start_workers("c", 0, 1)
    hosts.open_gates(*range(SAVED, 60, INTERVAL))
    assert hosts.wait_finished() == undisturbed(*TRAINED)
    hosts.wait_for(0, rf"generation 2: .* from step {INTERVAL}\b.*from copies of ranks 0 and 1 on ranks 2 and 3")
    said = [match for rank in (2, 3) for match in hosts.matches(rank, r"ignored a copy .*0\.copy.*chunk 0")]
    assert len(said) == 1


@pytest.mark.thorough  # → everything is freed after the two losses before, too
def test_copies_are_used_beside_complete_points_on_disk_and_freed_at_the_end(hosts: Hosts) -> None:
    """No rank needs a copy while it has its own point, and none is left when the job is done."""
    hosts.wait_until(
        lambda: [one for one in scan(rank_directory(hosts.disk_of("a"), 0), None) if one.point.step == SAVED] or None,
        f"point of step {SAVED} on the disk of rank 0",
    )
    hosts.open_gates(*range(SAVED, 60, INTERVAL))
    hosts.wait_finished()
    for host in ("a", "b"):
        assert [path for path in hosts.memory_of(host).rglob("*") if path.is_file()] == []
