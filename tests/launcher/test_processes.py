"""Processes by pid and start time: reading their exit, and signalling exactly them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.launcher.processes import (
    Death,
    end,
    is_own_child,
    is_stopped,
    last_line,
    node_of,
    process_names,
    read_pid_files,
    reap,
    send_signal,
    spoken,
    watch,
)
from samebits.store.process_identity import ProcessIdentity

WAIT_S = 30.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    return identity


def wait_readable(descriptor: int) -> None:
    assert select.select([descriptor], [], [], WAIT_S)[0]


def test_names() -> None:
    assert process_names("01") == ["scheduler", "worker_0", "worker_1"]
    assert [node_of(name) for name in process_names("01")] == [None, "0", "1"]
    assert [spoken(name) for name in process_names("0")] == ["the scheduler", "worker 0"]


def test_pid_files_are_read_whether_or_not_their_process_lives(tmp_path: Path) -> None:
    mine = ProcessIdentity.current()
    (tmp_path / "scheduler.pid").write_text(mine.to_line())
    (tmp_path / "worker_1.pid").write_text(ProcessIdentity(1, 0).to_line())
    (tmp_path / "worker_9.pid").write_text(mine.to_line())  # of an earlier, larger job
    found = read_pid_files(tmp_path, process_names("01"))
    assert found == {"scheduler": mine, "worker_1": ProcessIdentity(1, 0)}
    (tmp_path / "worker_0.pid").write_text("not a pid\n")
    with pytest.raises(StoreError, match=r"worker_0\.pid"):
        read_pid_files(tmp_path, process_names("01"))


@pytest.mark.parametrize(
    ("program", "death"),
    [
        ("import sys; sys.exit(3)", Death(status=3)),
        ("pass", Death(status=0)),
        ("import os; os.kill(os.getpid(), 9)", Death(signal=9)),
    ],
)
def test_childs_end_is_seen_and_its_status_read(program: str, death: Death) -> None:
    with subprocess.Popen([sys.executable, "-c", f"input()\n{program}"], stdin=subprocess.PIPE) as process:
        identity = identity_of(process)
        descriptor = watch(identity)
        assert descriptor is not None
        assert is_own_child(identity)
        assert reap(identity) is None
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        wait_readable(descriptor)
        os.close(descriptor)
        assert reap(identity) == death


def test_ended_child_is_still_watched_so_that_its_status_is_not_lost(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identity_of(sleeper)
    assert send_signal(identity, signal.SIGKILL)
    assert identity.wait_for_exit(WAIT_S)
    descriptor = watch(identity)
    assert descriptor is not None
    wait_readable(descriptor)
    os.close(descriptor)
    assert reap(identity) == Death(signal=9)
    assert not is_own_child(identity)
    assert watch(identity) is None
    assert reap(identity) == Death()


def test_process_of_another_parent_ends_without_a_status(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("cpu_times") is not None:
        pytest.skip("with --cpu-times this process is the parent of orphans, too")
    program = (
        "import subprocess as s; quiet = dict(stdout=s.DEVNULL, stderr=s.DEVNULL, start_new_session=True); "
        "print(s.Popen(['sleep', '600'], **quiet).pid, flush=True)"
    )
    pid = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=WAIT_S).stdout)
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    descriptor = watch(identity)
    assert descriptor is not None
    assert not is_own_child(identity)
    assert reap(identity) is None
    end(identity, WAIT_S)
    wait_readable(descriptor)
    os.close(descriptor)
    assert reap(identity) == Death()


def test_other_process_with_the_same_pid_is_never_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    stranger = ProcessIdentity(sleeper.pid, identity_of(sleeper).started_at + 1)
    assert not send_signal(stranger, signal.SIGKILL)
    assert watch(stranger) is None
    end(stranger, WAIT_S)
    assert sleeper.poll() is None


def test_process_our_scripts_cannot_have_started_is_never_signalled() -> None:
    """A process that leads no session, or belongs to another user, is left alone even if the start time matches."""
    with subprocess.Popen(["sleep", "600"]) as mine:
        assert not send_signal(identity_of(mine), signal.SIGKILL)
        end(identity_of(mine), grace_s=WAIT_S)
        assert mine.poll() is None
        mine.kill()
    if os.geteuid() == 0:  # which may signal any process
        with subprocess.Popen(["sleep", "600"], start_new_session=True, user=65534) as others:
            assert not send_signal(identity_of(others), signal.SIGKILL)
            assert others.poll() is None
            others.kill()


def test_stopped_process_is_killed_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identity_of(sleeper)
    assert not is_stopped(identity)
    assert send_signal(identity, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_stopped(identity)
    end(identity, grace_s=3600)
    assert sleeper.wait(WAIT_S) == -signal.SIGKILL
    assert not is_stopped(identity)


def test_process_that_ignores_sigterm_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as deaf:
        assert deaf.stdout is not None
        assert deaf.stdout.readline() == b"deaf\n"
        end(identity_of(deaf), grace_s=0.2)
        assert deaf.wait(WAIT_S) == -signal.SIGKILL
    end(identity_of(sleeper), grace_s=WAIT_S)
    assert sleeper.wait(WAIT_S) == -signal.SIGTERM


def test_last_meaningful_line(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    assert last_line(log) == ""
    log.write_text("x" * 100_000 + "\nValueError: no number\n\n  \n")
    assert last_line(log) == "ValueError: no number"
    log.write_bytes(b"\xff\xfe broken" + b"y" * 1000)
    assert len(last_line(log)) == 300 and "…" in last_line(log)
    log.write_text(f"samebits: {'z' * 1000}. Fix: do this\n")
    assert last_line(log) == f"{'z' * 1000}. Fix: do this"
