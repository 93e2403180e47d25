"""Starting processes: environment, working folder, pid files, and no process without a record."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.commands.recover import program_of, start_again
from samebits.errors import StoreError
from samebits.launcher import spawning
from samebits.launcher.interrupts import Signals
from samebits.launcher.job_spec import JobSpec
from samebits.launcher.processes import Death, process_names, read_pid_files, reap
from samebits.launcher.recovering import LostProcess, RecoveryPlan
from samebits.launcher.spawning import Program, StartLock, launch, reserved
from samebits.store.process_identity import ProcessIdentity

WAIT_S = 30.0
AWKWARD = "a 'b' \"c\" $HOME `id` $(id) \\ * \n!é"
SHOW = "import json, os, sys; print(json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ)]))"
SLEEP = "import time; time.sleep(600)"


def program(folder: Path, text: str, *args: str, environment: dict[str, str] | None = None) -> Program:
    (folder / "script.py").write_text(text)
    shared = {**os.environ, **(environment or {})}
    return Program(folder, sys.executable, "script.py", args, shared, {"REBUILD": "0"})


def started(log_dir: Path, what: Program, *names: str) -> list[ProcessIdentity]:
    identities: list[ProcessIdentity] = []
    with reserved(log_dir, names) as berths:
        launch(berths, what, identities)
    return identities


def ended(identity: ProcessIdentity) -> Death:
    """Wait for the end and return its status."""
    assert identity.wait_for_exit(WAIT_S)
    death = reap(identity)
    assert death is not None
    return death


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[ProcessIdentity]:
    """Return a process that was started as worker 0 in the folder ``logs``."""
    (identity,) = started(tmp_path / "logs", program(tmp_path, SLEEP), "worker_0")
    yield identity
    if identity.is_alive():
        os.kill(identity.pid, signal.SIGKILL)
        ended(identity)


def test_process_gets_the_jobs_arguments_and_environment_byte_for_byte(tmp_path: Path) -> None:
    folder, logs = tmp_path / 'it\'s a "folder"', tmp_path / "logs"
    folder.mkdir()
    what = program(folder, SHOW, "", AWKWARD, "--x=1", os.fsdecode(b"caf\xe9"), environment={"DATA_PATH": AWKWARD})
    (identity,) = started(logs, what, "worker_3")
    assert ended(identity) == Death(status=0)
    cwd, words, environment = json.loads((logs / "worker_3.log").read_text())
    assert (cwd, words) == (str(folder), ["", AWKWARD, "--x=1", "caf\udce9"])
    assert (environment["DATA_PATH"], environment["ROLE"], environment["NODE_ID"]) == (AWKWARD, "worker", "3")
    assert "REBUILD" not in environment
    assert read_pid_files(logs, ["worker_3"]) == {"worker_3": identity}
    assert {path.name: path.stat().st_mode & 0o777 for path in logs.iterdir()} == {
        "worker_3.log": 0o600,
        "worker_3.pid": 0o600,
    }
    assert logs.stat().st_mode & 0o777 == 0o700


def test_scheduler_gets_no_node_id_from_the_shell(tmp_path: Path) -> None:
    leaked = {"MS_ROLE": "MS_SCHED", "MS_NODE_ID": "sched", "NODE_ID": "7", "ROLE": "bogus"}
    what = program(tmp_path, SHOW, environment=leaked)
    assert what.words("scheduler") == [sys.executable, "-P", "-m", "samebits", "scheduler"]
    environment = what.environment_of("scheduler")
    assert {name: environment.get(name) for name in (*leaked, "REBUILD")} == {
        **dict.fromkeys(leaked),
        "ROLE": "scheduler",
        "REBUILD": "0",
    }


def test_process_leads_its_session_and_ignores_terminal_signals(tmp_path: Path) -> None:
    (identity,) = started(tmp_path / "logs", program(tmp_path, "print(open('/proc/self/status').read())"), "worker_0")
    assert ended(identity) == Death(status=0)
    text = (tmp_path / "logs" / "worker_0.log").read_text()
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    assert int(fields["NSsid"].split()[-1]) == int(fields["Pid"]) == identity.pid
    ignored = int(fields["SigIgn"], 16)
    assert ignored & 1 << (signal.SIGINT - 1)
    assert ignored & 1 << (signal.SIGHUP - 1)
    assert int(fields["SigBlk"], 16) == 0


def test_program_that_cannot_run_is_reported_in_its_log(tmp_path: Path) -> None:
    what = Program(tmp_path, str(tmp_path / "no python"), "script.py", (), dict(os.environ), {})
    (identity,) = started(tmp_path / "logs", what, "worker_0")
    assert ended(identity) == Death(status=127)
    log = (tmp_path / "logs" / "worker_0.log").read_text()
    assert log == f"samebits: {tmp_path}/no python in {tmp_path} cannot be run: No such file or directory\n"


def test_current_environment_does_not_affect_a_restarted_job(tmp_path: Path) -> None:
    kept = JobSpec(tmp_path, "/v/python", "train.py", ("x",), {"OMP_NUM_THREADS": "1"})
    today = {
        "OMP_NUM_THREADS": "7",
        "MS_WORKER_NUM": "9",
        "CLUSTER_SECRET": "of another job",
        "HOME": "/home/me",
        "TERM": "dumb",
    }
    made = program_of(kept, today, {})
    assert dict(made.environment) == {"OMP_NUM_THREADS": "1", "HOME": "/home/me", "TERM": "dumb"}
    assert dict(program_of(kept, today, {"CLUSTER_SECRET": "ours"}).environment)["CLUSTER_SECRET"] == "ours"
    assert (made.folder, made.interpreter, made.script, made.args) == (tmp_path, "/v/python", "train.py", ("x",))


def test_start_that_cannot_be_recorded_changes_nothing(
    tmp_path: Path, sleeping: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start fails as on a full disk: the old process keeps running, and no new one remains."""

    def full(*_: object, **__: object) -> Path:
        raise StoreError("no space left")

    logs = tmp_path / "logs"
    recovery = RecoveryPlan(start=("worker_0", "worker_1"), end=(LostProcess("worker_0", sleeping, "is lost"),))
    with monkeypatch.context() as patch:
        patch.setattr(spawning.durable, "write_temporary", full)
        with pytest.raises(StoreError, match="no space left"):
            start_again(logs, recovery, program(tmp_path, SLEEP))
    assert sleeping.is_alive()
    assert read_pid_files(logs, process_names("01")) == {"worker_0": sleeping}


def test_process_whose_pid_cannot_be_recorded_is_ended(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    identities: list[ProcessIdentity] = []
    before = children()  # starters of other tests, for example
    with reserved(logs, ["worker_0", "worker_1"]) as berths:
        (logs / "worker_1.pid").mkdir()
        with pytest.raises(StoreError, match=r"worker_1\.pid"):
            launch(berths, program(tmp_path, SLEEP), identities)
    assert len(identities) == 1
    (second,) = set(children()) - {*before, identities[0].pid}
    assert os.waitpid(second, 0)[1] != 0
    os.kill(identities[0].pid, signal.SIGKILL)
    assert ended(identities[0]) == Death(signal=9)
    assert sorted(path.name for path in logs.iterdir()) == [
        "worker_0.log",
        "worker_0.pid",
        "worker_1.log",
        "worker_1.pid",
    ]


def children() -> list[int]:
    """Return the children of this thread, including ended ones (proc(5))."""
    return [int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]


@pytest.mark.parametrize("name", ["worker_0.log", "start.lock"])
def test_planted_link_is_not_followed(tmp_path: Path, name: str) -> None:
    logs, victim = tmp_path / "logs", tmp_path / "victim"
    logs.mkdir(mode=0o700)
    victim.write_text("mine\n")
    (logs / name).symlink_to(victim)
    refused = pytest.raises(StoreError, match=rf"{name} is a link or a pipe; expected a file. Fix: remove it")
    with refused, StartLock(logs):
        started(logs, program(tmp_path, SLEEP), "worker_0")
    assert victim.read_text() == "mine\n"


def test_one_process_starts_others_at_a_time(tmp_path: Path) -> None:
    text = (
        "import sys; from pathlib import Path; from samebits.launcher.spawning import StartLock\n"
        "with StartLock(Path(sys.argv[1])): print('in', flush=True)"
    )
    with StartLock(tmp_path / "logs") as lock:
        second = subprocess.Popen(
            [sys.executable, "-c", text, str(tmp_path / "logs")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert second.stderr is not None
        assert "is starting processes here; waiting" in second.stderr.readline()
        assert second.poll() is None
        lock.release()
        assert second.communicate(timeout=WAIT_S)[0] == "in\n"


def test_pid_file_that_others_may_write_names_no_process(tmp_path: Path, sleeping: ProcessIdentity) -> None:
    (tmp_path / "logs" / "worker_1.pid").write_text(sleeping.to_line())
    (tmp_path / "logs" / "worker_1.pid").chmod(0o666)
    with pytest.raises(StoreError, match=r"worker_1\.pid: other users can write to this file \(mode 0666\)"):
        read_pid_files(tmp_path / "logs", ["worker_1"])


@pytest.mark.parametrize("by_another_thread", [False, True])
def test_signal_that_arrives_while_listening_begins_wakes_the_follower(
    monkeypatch: pytest.MonkeyPatch, by_another_thread: bool
) -> None:
    """A signal between the handler's check and the poll must not be missed, or the job would survive a Ctrl-C."""
    listen = signal.set_wakeup_fd

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def late(descriptor: int, *, warn_on_full_buffer: bool = True) -> int:
        monkeypatch.setattr(signal, "set_wakeup_fd", listen)
        if by_another_thread:
            taker = threading.Thread(target=interrupt)
            taker.start()
            taker.join()
        else:
            interrupt()
        return listen(descriptor, warn_on_full_buffer=warn_on_full_buffer)

    monkeypatch.setattr(signal, "set_wakeup_fd", late)
    with Signals() as signals:
        assert select.select([signals], [], [], WAIT_S)[0]
        assert signals.take() == ["Ctrl-C"]


STARTER = """
import os, sys
from pathlib import Path
from samebits.launcher.spawning import Program, launch, reserved
folder = Path(sys.argv[1])
started = []
with reserved(folder / "logs", ["worker_0"]) as berths:
    launch(berths, Program(folder, sys.executable, "script.py", (), dict(os.environ), {}), started)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("dies", [False, True])
def test_processes_die_with_their_starter_on_request(dies: bool, tmp_path: Path) -> None:
    program(tmp_path, SLEEP)
    environment = {**os.environ, "DIE_WITH_ME": str(int(dies))}
    words = [sys.executable, "-c", STARTER, str(tmp_path)]
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == b"started\n"
        (identity,) = read_pid_files(tmp_path / "logs", ["worker_0"]).values()
        starter.kill()
    try:
        assert identity.wait_for_exit(WAIT_S if dies else 0.0) is dies
    finally:
        if identity.is_alive():
            os.kill(identity.pid, signal.SIGKILL)
