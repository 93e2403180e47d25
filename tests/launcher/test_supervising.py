"""The supervisor: what it starts under which name, and what it leaves for the next supervisor."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from samebits import config
from samebits.config import Settings
from samebits.core.causes.restarts import OWN_ERROR_WAIT_S, Loss, Sort
from samebits.errors import ListenError, ScriptFailedError, SettingsError, StoreError
from samebits.launcher import job_spec
from samebits.launcher.job_outcome import verdict_of
from samebits.launcher.job_spec import JobSpec
from samebits.launcher.processes import read_pid_files
from samebits.launcher.spawning import Program, StartLock
from samebits.launcher.supervising import Dead, Started, Supervisor
from samebits.store import owner
from samebits.store.owner import claim_folder
from samebits.store.process_identity import ProcessIdentity

JOB = "job-1"
GONE = ProcessIdentity(1 << 22, 1)
KILLED = Loss(Sort.OUTSIDE)


class Folder:
    """A log folder of a job of three nodes. Every started node is this process under another name."""

    def __init__(self, path: Path, **settings: str) -> None:
        self.log_dir = path / "device"
        environment = {"WORKER_NUM": "3", "ENABLE_RECOVERY": "1", "MAX_RESTARTS": "3", "LOG_DIR": str(self.log_dir)}
        environment |= settings
        self.settings: Settings = replace(config.read(environment, role_required=False)[0], log_dir=self.log_dir)
        job_spec.keep(self.log_dir, JobSpec(path, "/usr/bin/python3", "train.py", (), environment))
        self.spawned: list[str] = []
        self.commands: list[list[str]] = []
        self.supervisor = self.new_supervisor()
        assert self.supervisor.try_to_hold()

    def new_supervisor(self) -> Supervisor:
        return Supervisor(self.settings, spawn_worker=self._spawn)

    def _spawn(self, program: Program, name: str, log: int) -> int:
        self.spawned.append(name)
        self.commands.append(program.words(name))
        return ProcessIdentity.current().pid

    def begin(self) -> None:
        """Let the launcher leave its token and a worker get a seat."""
        owner.make_token(self.log_dir)
        claim_folder(self.log_dir, JOB, "train.py")

    def dies(self, name: str, loss: Loss = KILLED, now: float = 0.0, status: int | None = None) -> None:
        identity = read_pid_files(self.log_dir, [name]).get(name, GONE)
        self.supervisor.died(Dead(name, identity, f"{name} died", status, loss), now)

    def start(self, now: float = 0.0, job: str = JOB) -> list[Started]:
        return self.supervisor.start_due(now, job=lambda: job)

    @property
    def nodes(self) -> tuple[str, ...]:
        return job_spec.nodes_of(self.log_dir, self.settings)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    found = Folder(tmp_path)
    yield found
    found.supervisor.let_go()


def test_dead_worker_is_replaced_by_a_new_node(folder: Folder) -> None:
    folder.begin()
    folder.dies("worker_1")
    assert folder.start() == [Started("worker_1", "worker_1.1")]
    assert folder.spawned == ["worker_1.1"] and folder.nodes == ("0", "1.1", "2")
    assert set(read_pid_files(folder.log_dir, ["worker_1.1"])) == {"worker_1.1"}
    folder.dies("worker_1.1")
    assert folder.start() == [Started("worker_1.1", "worker_1.2")]
    assert folder.nodes == ("0", "1.2", "2") and not (folder.log_dir / "worker_1.1.pid").exists()


@pytest.mark.parametrize("lacks", ["a token", "an owner", "its own job"])
def test_without_a_proof_the_node_itself_is_restarted(folder: Folder, lacks: str) -> None:
    if lacks != "a token":
        owner.make_token(folder.log_dir)
    if lacks != "an owner":
        claim_folder(folder.log_dir, "job-0" if lacks == "its own job" else JOB, "train.py")
    folder.dies("worker_1")
    assert folder.start() == [Started("worker_1", "worker_1")]
    assert folder.nodes == ("0", "1", "2")


def test_restart_limit_counts_for_the_place_whatever_the_node_is_called(folder: Folder) -> None:
    folder.begin()
    for name in ("worker_1", "worker_1.1", "worker_1.2", "worker_1.3"):
        folder.dies(name)
        folder.start(1e6)
    given_up = folder.supervisor.given_up()
    assert given_up is not None and given_up.dead.name == "worker_1.3"
    assert len(folder.spawned) == 3
    assert "MAX_RESTARTS=3" in verdict_of(given_up).cause and verdict_of(given_up).exit_code == 77


def test_scheduler_whose_port_is_taken_stays_due(folder: Folder) -> None:
    folder.begin()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        folder.settings = replace(folder.settings, sched_port=port)
        folder.supervisor.let_go()
        folder.supervisor = folder.new_supervisor()
        assert folder.supervisor.try_to_hold()
        folder.dies("scheduler")
        with pytest.raises(ListenError, match=f"SCHED_PORT={port}"):
            folder.start()
        assert folder.supervisor.is_at_it()


def test_script_error_waits_briefly_and_the_second_one_ends_the_job(folder: Folder) -> None:
    error = Loss(Sort.OWN, "ValueError: x", 7)
    folder.dies("worker_1", error, status=1)
    assert folder.start(OWN_ERROR_WAIT_S / 2) == []
    assert folder.supervisor.wake_at() == OWN_ERROR_WAIT_S and folder.supervisor.is_at_it()
    assert len(folder.start(OWN_ERROR_WAIT_S)) == 1 and not folder.supervisor.is_at_it()
    folder.dies("worker_1", error, 9.0, status=1)
    given_up = folder.supervisor.given_up()
    assert given_up is not None and verdict_of(given_up).exit_code == ScriptFailedError.exit_code


def test_hopeless_failure_ends_with_its_own_status(folder: Folder) -> None:
    folder.dies("worker_1", Loss(Sort.HOPELESS), status=SettingsError.exit_code)
    given_up = folder.supervisor.given_up()
    assert given_up is not None and verdict_of(given_up).exit_code == SettingsError.exit_code


def test_process_restarted_or_removed_meanwhile_is_left_alone(folder: Folder) -> None:
    folder.dies("worker_1")
    folder.dies("worker_2")
    (folder.log_dir / "worker_1.pid").write_text(ProcessIdentity.current().to_line())
    kept = job_spec.read(folder.log_dir)
    assert kept is not None
    job_spec.keep(folder.log_dir, replace(kept, nodes=("0", "1")))
    assert folder.start() == [] and folder.spawned == []


def test_spare_is_first_started_once_its_memory_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, SPARE_NUM="1")
    folder.begin()
    monkeypatch.setattr("samebits.launcher.supervising.available_bytes", lambda: 199 << 20)
    said = folder.supervisor.add_spares(100 << 20, 0.0)
    assert said.startswith("no spare is kept, because 199 MiB of memory are available and a rank uses 100 MiB: ")
    assert folder.supervisor.add_spares(100 << 20, 0.0) == "" and folder.start() == []
    monkeypatch.setattr("samebits.launcher.supervising.available_bytes", lambda: 200 << 20)
    assert folder.supervisor.add_spares(100 << 20, 0.0) == ""
    assert folder.start() == [Started("worker_3", "worker_3")], "it replaces nothing, so it keeps its name"
    assert folder.supervisor.add_spares(100 << 20, 0.0) == "" and folder.start() == [], "it was started already"
    folder.dies("worker_3")
    assert folder.start() == [Started("worker_3", "worker_3.1")]
    folder.supervisor.let_go()


def test_supervisor_retries_soon_while_another_process_starts_some(folder: Folder) -> None:
    folder.dies("worker_1")
    with StartLock(folder.log_dir):
        assert folder.start() == []
    at = folder.supervisor.wake_at()
    assert at is not None and at > 0
    assert len(folder.start(at)) == 1


def test_one_supervisor_at_a_time_and_the_next_takes_over(folder: Folder) -> None:
    other = folder.new_supervisor()
    assert not other.try_to_hold()
    other.died(Dead("worker_1", GONE, "", None, KILLED), 0.0)
    assert not other.is_at_it(), "that is for the other to do"
    folder.supervisor.let_go()
    assert other.try_to_hold() and other.holds
    other.let_go()


def test_failed_start_leaves_the_nodes_unchanged_and_is_retried(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.begin()
    for name in ("worker_1", "worker_2"):
        folder.dies(name)
    spawn = folder._spawn

    def fails_at_the_second(program: Program, name: str, log: int) -> int:
        if name == "worker_2.1":
            raise StoreError("no room")
        return spawn(program, name, log)

    monkeypatch.setattr(folder.supervisor, "_spawn_worker", fails_at_the_second)
    with pytest.raises(StoreError):
        folder.start()
    assert folder.nodes == ("0", "1.1", "2")
    monkeypatch.setattr(folder.supervisor, "_spawn_worker", spawn)
    at = folder.supervisor.wake_at()
    assert at is not None
    assert folder.start(at) == [Started("worker_2", "worker_2.1")]
    assert folder.nodes == ("0", "1.1", "2.1")


def test_start_that_keeps_failing_is_retried_less_often_and_reported_once(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.begin()
    folder.dies("worker_1")
    spawn, attempts, told = folder._spawn, 0, 0

    def fails(_program: Program, _name: str, _log: int) -> int:
        nonlocal attempts
        attempts += 1
        raise StoreError("no space left")

    monkeypatch.setattr(folder.supervisor, "_spawn_worker", fails)
    now = 0.0
    while now < 60.0:
        try:
            assert folder.start(now) == []
        except StoreError:
            told += 1
        at = folder.supervisor.wake_at()
        assert at is not None and at > now
        now = at
    assert (told, attempts) == (1, 12)
    monkeypatch.setattr(folder.supervisor, "_spawn_worker", spawn)
    assert folder.start(now) == [Started("worker_1", "worker_1.1")]
    monkeypatch.setattr(folder.supervisor, "_spawn_worker", fails)
    folder.dies("worker_2", now=now)
    with pytest.raises(StoreError):
        folder.start(now)


def test_token_that_others_may_have_written_is_refused(folder: Folder) -> None:
    folder.begin()
    (folder.log_dir / owner.TOKEN_FILE).chmod(0o666)
    with pytest.raises(StoreError, match="other users can write to this file"):
        owner.read_token(folder.log_dir)
    for text in ("", "00" * 31, "00" * 33, "zz" * 32):
        (folder.log_dir / owner.TOKEN_FILE).unlink()
        (folder.log_dir / owner.TOKEN_FILE).write_text(text)
        (folder.log_dir / owner.TOKEN_FILE).chmod(0o600)
        with pytest.raises(StoreError, match="Fix:"):
            owner.read_token(folder.log_dir)


def test_replacement_is_started_on_the_dead_workers_host(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begin()
    kept = job_spec.read(folder.log_dir)
    assert kept is not None
    environment = {**kept.environment, "HOST_LAUNCH": "ssh {host} {command}"}
    hosts = {"0": "localhost", "1": "b", "2": "b"}
    job_spec.keep(folder.log_dir, replace(kept, environment=environment, nodes=("0", "1", "2"), hosts=hosts))
    folder.dies("worker_1")
    folder.start()
    assert folder.spawned == ["worker_1.1"]
    assert folder.commands[0][:2] == ["ssh", "b"] and "NODE_ID=1.1" in folder.commands[0][2]
    after = job_spec.read(folder.log_dir)
    assert after is not None and after.hosts == {"0": "localhost", "1.1": "b", "2": "b"}
