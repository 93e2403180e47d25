from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.store import process_identity
from samebits.store.process_identity import ProcessIdentity, read_pid_file


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that lives until its standard input is closed."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    return identity


def test_this_process_is_alive_and_has_its_pid() -> None:
    identity = ProcessIdentity.current()
    assert identity.pid == os.getpid()
    assert identity.is_alive()
    assert ProcessIdentity.of(os.getpid()) == identity


def test_zombie_counts_as_dead(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child)
    assert identity.is_alive()
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped
    assert Path(f"/proc/{child.pid}").exists()
    assert not identity.is_alive()
    assert not identity.is_ending()
    assert ProcessIdentity.of(child.pid) is None


def test_stopped_process_is_alive(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert identity_of(child).is_alive()
    assert not identity_of(child).is_ending()


def test_killed_process_is_ending_until_it_has_ended(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    identity = identity_of(child)
    os.kill(child.pid, signal.SIGKILL)
    while identity.is_alive():
        assert identity.is_ending() or not identity.is_alive()
    assert not identity.is_ending()


def test_other_process_with_the_same_pid_is_not_alive() -> None:
    current = ProcessIdentity.current()
    assert not ProcessIdentity(current.pid, current.started_at - 1).is_alive()
    assert ProcessIdentity(current.pid, current.started_at - 1).wait_for_exit(60.0)


def test_unused_pid() -> None:
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert ProcessIdentity.of(nobody) is None
    assert ProcessIdentity(nobody, 1).wait_for_exit(60.0)


def test_command_name_with_blanks_and_parentheses_is_parsed(repository: Path) -> None:
    script = (
        "import os; open('/proc/self/comm', 'w').write('a) Z 1 (b')\n"
        "from samebits.store.process_identity import ProcessIdentity\n"
        "print(ProcessIdentity.current().to_line())"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=True)
    assert ProcessIdentity.from_line(result.stdout).started_at >= ProcessIdentity.current().started_at


def refuse(pid: int) -> int:
    """Refuse, as a sandbox does."""
    raise PermissionError(errno.EPERM, "not here")


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_waiting_ends_with_the_process(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:
        monkeypatch.setattr(process_identity.os, "pidfd_open", refuse)
    identity = identity_of(child)
    assert not identity.wait_for_exit(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert identity.wait_for_exit(60.0)
    assert not identity.is_alive()


def test_killed_process_is_dead_before_it_is_reaped(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child)
    assert identity.is_alive()
    assert not ProcessIdentity(identity.pid, identity.started_at + 100).is_alive()
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive()
    child.wait()
    assert not identity.is_alive()


def test_line_round_trip() -> None:
    identity = ProcessIdentity(4711, 123456)
    assert identity.to_line() == "4711 123456\n"
    assert ProcessIdentity.from_line("4711 123456\n") == identity


@pytest.mark.parametrize("line", ["", "4711", "4711 12 13", "-1 5", "0 5", "x 5", "4711 1.5", "４ 5"])
def test_invalid_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        ProcessIdentity.from_line(line)


def test_pid_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "worker_0.pid"
    assert read_pid_file(path) is None
    path.write_text(ProcessIdentity.current().to_line())
    assert read_pid_file(path) == ProcessIdentity.current()
    assert path.read_text().split()[0] == str(os.getpid())


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff\xfe", b"1 2 3", b"9" * 10_000])
def test_foreign_pid_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "worker_0.pid"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"worker_0\.pid is not a pid file"):
        read_pid_file(path)
