"""The driver: what it records, starts and drains as hosts come and go, and how another driver continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from samebits import config
from samebits.account.job_view import JobView, PresenceState
from samebits.config import Settings
from samebits.hosts.discovery import (
    LAUNCHER_FAILED,
    LAUNCHER_GRACE_S,
    TOLD_TO_LEAVE,
    Discovery,
    Turn,
    discovery_for,
    name_for,
)
from samebits.launcher import job_spec
from samebits.launcher.job_spec import JobSpec
from samebits.launcher.processes import read_pid_files
from samebits.launcher.spawning import Program, StartLock
from samebits.launcher.supervising import Supervisor
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.views import view, worker

NOBODY = ProcessIdentity(1 << 22, 1)


class Folder:
    """A job of two workers on this machine whose script prints the file ``hosts``. Every started worker is this
    process.
    """

    def __init__(self, path: Path, **more: str) -> None:
        self.path, self.log_dir = path, path / "device"
        environment = {
            "WORKER_NUM": "2",
            "MIN_WORKER_NUM": "1",
            "MAX_WORKER_NUM": "5",
            "ENABLE_RECOVERY": "1",
            "LOG_DIR": str(self.log_dir),
            "HOST_DISCOVERY_SCRIPT": "cat hosts",
            "HOST_LAUNCH": "ssh {host} {command}",
            **more,
        }
        self.settings: Settings = replace(config.read(environment, role_required=False)[0], log_dir=self.log_dir)
        start = JobSpec(path, "/usr/bin/python3", "train.py", (), environment, nodes=("0", "1"))
        job_spec.keep(self.log_dir, replace(start, hosts={"0": "localhost", "1": "localhost"}))
        for node in "01":
            (self.log_dir / f"worker_{node}.pid").write_text(ProcessIdentity.current().to_line())
        self.started: list[tuple[str, list[str]]] = []
        self.drivers: list[Discovery] = []
        self.view: JobView = changed(
            view(), workers=(worker(0), worker(1)), min_world_size=1, max_world_size=5, wanted_size=2
        )

    def driver(self) -> Discovery:
        self.drivers.append(Discovery(self.settings, self._spawn))
        self.drivers[-1].start(self.path)
        return self.drivers[-1]

    def _spawn(self, program: Program, name: str, log: int) -> int:
        self.started.append((name, program.words(name)[:2]))
        return os.getpid()

    def says(self, text: str) -> None:
        (self.path / "hosts.new").write_text(text)
        (self.path / "hosts.new").rename(self.path / "hosts")

    def until(self, driver: Discovery, is_so: Callable[[Turn], bool], now: float = 0.0) -> Turn:
        """Run the driver until a turn has the wanted result; return that turn and all messages so far."""
        deadline, said = time.monotonic() + 60, Turn()
        while True:
            turn = driver.turn(self.view, now)
            said.lines += turn.lines
            said.decisions += turn.decisions
            said.started += turn.started
            if is_so(said):
                return said
            assert time.monotonic() < deadline, said
            time.sleep(0.01)

    def identity(self, name: str) -> ProcessIdentity:
        return read_pid_files(self.log_dir, [name]).get(name, NOBODY)

    @property
    def kept(self) -> JobSpec:
        found = job_spec.read(self.log_dir)
        assert found is not None
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    found = Folder(tmp_path)
    yield found
    for driver in found.drivers:
        driver.close()


def test_new_host_gets_workers_started_by_the_template(folder: Folder) -> None:
    folder.says("localhost:2\n")
    driver = folder.driver()
    folder.says("localhost:2\nb:2\n")
    turn = folder.until(driver, lambda turn: bool(turn.started))
    assert turn.started == ["worker_2", "worker_3"]
    assert folder.started == [("worker_2", ["ssh", "b"]), ("worker_3", ["ssh", "b"])]
    assert (folder.kept.nodes, folder.kept.hosts["3"]) == (("0", "1", "2", "3"), "b")
    assert [one.text for one in turn.decisions] == turn.lines
    assert turn.lines[-1] == "starting 2 on b: 4 workers, and there is room for 4, at most 5"
    assert set(read_pid_files(folder.log_dir, turn.started)) == {"worker_2", "worker_3"}


def test_removed_host_is_drained_through_the_scheduler_until_it_is_gone(folder: Folder) -> None:
    job_spec.keep(folder.log_dir, replace(folder.kept, nodes=("0", "2"), hosts={"0": "localhost", "2": "b", "1": "b"}))
    folder.view = changed(folder.view, workers=(worker(0), worker(1), worker(2)))
    for node in "12":
        (folder.log_dir / f"worker_{node}.pid").write_text(ProcessIdentity.current().to_line())
    folder.says("localhost:1\n")
    driver = folder.driver()
    turn = folder.until(driver, lambda turn: bool(turn.decisions))
    assert turn.decisions[0].drain == ("2",) and turn.decisions[0].text.endswith("host b is gone")
    assert turn.decisions[1].drain == ("1",), "the previous request has not expired at another driver's time"
    assert (folder.kept.nodes, set(folder.kept.hosts)) == (("0",), {"0", "1", "2"})
    assert driver.turn(folder.view, 1.0).decisions == []
    assert driver.turn(folder.view, 2.5).decisions[0].drain in [("1", "2"), ("2", "1")]
    (folder.log_dir / "worker_2.pid").write_text(NOBODY.to_line())
    driver.turn(folder.view, 3.0)
    assert set(folder.kept.hosts) == {"0", "1"} and not (folder.log_dir / "worker_2.pid").exists()


def test_local_worker_is_drained_by_one_signal(folder: Folder) -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (folder.path / "leads").touch()
        signal.pause()
    wait_until((folder.path / "leads").exists)
    (folder.log_dir / "worker_1.pid").write_text(ProcessIdentity.of_child(child).to_line())
    folder.says("localhost:1\n")
    turn = folder.until(folder.driver(), lambda turn: bool(turn.decisions))
    assert turn.decisions[0].drain == (), "the scheduler need not ask"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_process_that_holds_on_to_a_vacated_seat_is_ended(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[signal.Signals] = []
    monkeypatch.setattr("samebits.hosts.discovery.send_signal", lambda _, number: sent.append(number))
    job_spec.keep(folder.log_dir, replace(folder.kept, nodes=("0",), hosts={"0": "localhost", "1": "b"}))
    left = changed(folder.view, workers=(worker(0),), retired=(worker(1, PresenceState.LEFT, slot=None),))
    folder.says("localhost:1\n")
    driver = folder.driver()
    folder.until(driver, lambda turn: bool(turn.decisions))
    for after_s in (0.1, 0.5, 1.5, 2.5):
        driver.turn(left, after_s * LAUNCHER_GRACE_S)
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    sent.clear()
    folder.view = left
    newer = folder.driver()
    folder.until(newer, lambda turn: bool(turn.decisions))
    newer.turn(left, 9 * LAUNCHER_GRACE_S)
    assert sent == [], "it may not have joined yet, and its predecessor may be the one that left"


def test_unrecorded_worker_is_asked_to_leave(folder: Folder) -> None:
    """The worker's host was cut off and given up, and has returned."""
    folder.view = changed(folder.view, workers=(worker(0), worker(1), worker(3)))
    folder.says("localhost:2\n")
    driver = folder.driver()
    turn = folder.until(driver, lambda turn: bool(turn.decisions))
    (decision,) = turn.decisions
    assert decision.drain == ("3",) and decision.text == turn.lines[-1]
    assert driver.turn(folder.view, 1.0).decisions == []
    assert [(one.text, one.drain) for one in driver.turn(folder.view, 2.5).decisions] == [("", ("3",))]


def test_death_of_an_older_process_with_the_name_is_ignored(folder: Folder) -> None:
    folder.says("localhost:2\n")
    driver = folder.driver()
    assert driver.takes("worker_1", NOBODY, 1, 1.0, has_joined=False)
    assert folder.kept.nodes == ("0", "1"), "the current holder of the name stays"


def test_failing_script_is_reported_once_and_changes_nothing(folder: Folder) -> None:
    folder.says("localhost:2\n")
    driver = folder.driver()
    (folder.path / "hosts").unlink()
    turn = folder.until(driver, lambda turn: bool(turn.lines))
    assert turn.lines[0].startswith("the discovery script: cat ended with status 1: cat: hosts: No such file")
    folder.says("localhost:2\n")
    turn = folder.until(driver, lambda turn: bool(turn.lines))
    assert turn.lines == ["the discovery script answers again"]
    assert folder.kept.nodes == ("0", "1") and folder.started == []


def test_unreachable_host_is_reported_once_and_not_used(folder: Folder) -> None:
    folder.settings = replace(folder.settings, host_launch=None)
    folder.says("localhost:3\nb\n")
    turn = folder.until(folder.driver(), lambda turn: bool(turn.started))
    assert turn.started == ["worker_2"]
    assert sum("host b is not this machine" in line and "Fix: --launch" in line for line in turn.lines) == 1


def test_failed_start_moves_to_another_host_after_a_rest(folder: Folder) -> None:
    folder.says("localhost:2\nb:1\nc:1\n")
    driver = folder.driver()
    folder.until(driver, lambda turn: len(turn.started) == 2)
    (folder.log_dir / "worker_2.pid").write_text(NOBODY.to_line())
    assert driver.takes("worker_2", folder.identity("worker_2"), LAUNCHER_FAILED, 1.0, has_joined=True)
    assert folder.kept.nodes == ("0", "1", "3") and "2" not in folder.kept.hosts
    turn = driver.turn(folder.view, 1.0)
    assert turn.lines == ["host b is not used for 10 s: worker 2: what starts it there ended with status 255"]
    assert turn.started == [] and driver.wake_at(1.0) == 11.0
    assert folder.until(driver, lambda turn: bool(turn.started), now=11.0).started == ["worker_2"]


def test_host_that_asks_its_workers_to_leave_is_about_to_go(folder: Folder) -> None:
    folder.says("localhost:2\nb:1\n")
    driver = folder.driver()
    folder.until(driver, lambda turn: len(turn.started) == 1)
    assert driver.takes("worker_2", folder.identity("worker_2"), TOLD_TO_LEAVE, 1.0, has_joined=True)
    turn = driver.turn(folder.view, 1.0)
    assert turn.lines == ["host b is not used for 10 s: worker 2: it was asked to leave there (SIGTERM)"]
    assert turn.started == []


def test_killed_worker_is_left_to_the_supervisor(folder: Folder) -> None:
    folder.says("localhost:2\n")
    driver = folder.driver()
    assert not driver.takes("worker_1", folder.identity("worker_1"), None, 1.0, has_joined=True)
    assert not driver.takes("worker_9", folder.identity("worker_9"), None, 1.0, has_joined=False), (
        "its state is unknown"
    )
    with StartLock(folder.log_dir):
        assert not driver.takes("worker_1", folder.identity("worker_1"), None, 2.0, has_joined=False), (
            "another process is changing the record"
        )
    assert folder.kept.nodes == ("0", "1")


def test_requested_size_and_drained_hosts_are_read_from_the_folder(folder: Folder) -> None:
    folder.says("localhost:1\nb:3\n")
    folder.view = changed(folder.view, workers=(worker(0),))
    job_spec.keep(
        folder.log_dir,
        replace(folder.kept, nodes=("0",), hosts={"0": "localhost"}, size=3, drained=("b",)),
    )
    driver = folder.driver()
    turn = folder.until(driver, lambda turn: bool(turn.lines))
    assert turn.lines == ["host b is being drained"] and folder.started == []
    job_spec.keep(folder.log_dir, replace(folder.kept, drained=()))
    turn = folder.until(driver, lambda turn: bool(turn.started))
    assert turn.started == ["worker_1", "worker_2"]
    assert turn.lines[-1] == "starting 2 on b: 3 workers, and 3 are wanted, at most 5"


def test_nothing_is_started_for_a_finished_job(folder: Folder) -> None:
    folder.view = changed(folder.view, training_finished=True)
    folder.says("localhost:5\n")
    driver = folder.driver()
    deadline = time.monotonic() + 60
    while driver.turn(folder.view, 0.0) and driver._answer is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert folder.started == []


def test_only_a_job_with_a_script_has_a_driver(folder: Folder) -> None:
    supervisor = Supervisor(folder.settings)
    assert discovery_for(folder.settings, supervisor) is not None
    assert discovery_for(folder.settings, None) is None
    assert discovery_for(replace(folder.settings, host_discovery_script=None), supervisor) is None


def test_number_of_a_lost_process_is_passed_to_its_replacement() -> None:
    gone = (
        worker(1, PresenceState.LOST),
        worker("1.2", PresenceState.LOST, slot=1, pid=5),
        worker(2, PresenceState.LEFT),
    )
    seen = changed(view(), workers=(worker(0), *gone))
    assert [name_for(number, seen) for number in "123"] == ["1.3", "2", "3"]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
