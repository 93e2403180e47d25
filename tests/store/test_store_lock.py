from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.errors import LockedError, StoreError
from samebits.store.lock import DirectoryLock, is_locked, read_holder
from samebits.store.process_identity import ProcessIdentity
from tests.store.disk_faults import NO_SPACE, Disk, interposed

HOLDER = """
import sys
from pathlib import Path
from samebits.store.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), "scheduler")
lock.acquire()
print("locked", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture
def holder(tmp_path: Path, repository: Path) -> Iterator[subprocess.Popen[str]]:
    """Return another process that holds the lock until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=repository,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_second_process_learns_the_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(LockedError) as caught:
        DirectoryLock(tmp_path, "second scheduler").acquire()
    assert str(tmp_path) in str(caught.value)
    assert f"scheduler (pid {holder.pid} on " in str(caught.value)
    noted = read_holder(tmp_path)
    assert noted is not None
    assert noted.identity == ProcessIdentity.of(holder.pid)


def test_held_lock_is_seen_without_taking_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert is_locked(tmp_path)
    holder.kill()
    holder.wait()
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path / "no such folder")


def test_kill_9_frees_the_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lock = DirectoryLock(tmp_path, "replacement")
    lock.acquire()
    noted = read_holder(tmp_path)
    assert noted is not None
    assert noted.identity == ProcessIdentity.current()
    lock.release()


def test_holder_that_was_just_killed_is_awaited(tmp_path: Path, repository: Path) -> None:
    large = HOLDER.replace("import sys\n", "import sys\nmuch = b'x' * (512 << 20)\n")  # the kernel frees that first
    with subprocess.Popen(
        [sys.executable, "-c", large, str(tmp_path)], cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        os.kill(process.pid, signal.SIGKILL)
        lock = DirectoryLock(tmp_path, "replacement")
        lock.acquire()
        lock.release()


@pytest.mark.parametrize("how", ["killed", "released"])
def test_replacement_waits_for_the_holder_and_names_it(tmp_path: Path, holder: subprocess.Popen[str], how: str) -> None:
    said: list[str] = []

    def end_the_holder(text: str) -> None:
        said.append(text)
        if how == "killed":
            os.kill(holder.pid, signal.SIGKILL)
        else:
            assert holder.stdin is not None
            holder.stdin.close()

    lock = DirectoryLock(tmp_path, "replacement")
    lock.acquire(wait_s=60.0, on_wait=end_the_holder)
    assert lock.is_held
    lock.release()
    assert f"scheduler (pid {holder.pid} on " in said[0]


def test_waiting_ends_with_an_error_and_is_announced_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    said: list[str] = []
    with pytest.raises(LockedError, match=f"pid {holder.pid}"):
        DirectoryLock(tmp_path, "replacement").acquire(wait_s=0.5, on_wait=said.append)
    assert len(said) == 1


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path, "first"), DirectoryLock(tmp_path, "second")
    with first:
        with pytest.raises(LockedError, match="by this process itself, as first"):
            second.acquire()
        with pytest.raises(LockedError, match="already holds the lock"):
            first.acquire()
        assert first.is_held
    assert read_holder(tmp_path) is None
    with second:
        assert second.is_held
    second.release()


def test_lock_belongs_to_the_process_not_to_a_thread(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path, "first")
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    assert lock.is_held
    lock.release()
    DirectoryLock(tmp_path, "second").acquire()


def test_forked_child_neither_holds_nor_keeps_it(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path, "parent")
    lock.acquire()
    release_child, child_may_end = os.pipe()
    child = os.fork()
    if child == 0:  # it stays alive with every inherited descriptor
        os.close(child_may_end)
        os.read(release_child, 1)
        os._exit(int(lock.is_held))
    os.close(release_child)
    lock.release()
    try:
        with DirectoryLock(tmp_path, "next"):
            pass
    finally:
        os.close(child_may_end)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_holder_without_a_note_is_still_a_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for content in (b"", b"null", b'{"pid": "x"}', b"\xff", b"[" * 5000):
        (tmp_path / "lock.holder").write_bytes(content)
        with pytest.raises(LockedError, match="an unknown process"):
            DirectoryLock(tmp_path, "second").acquire()
    (tmp_path / "lock.holder").unlink()
    with pytest.raises(LockedError, match="an unknown process"):
        DirectoryLock(tmp_path, "second").acquire()


def test_dead_holders_note_is_not_taken_for_the_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    note = (tmp_path / "lock.holder").read_text()
    started_at = ProcessIdentity.current().started_at
    noted = read_holder(tmp_path)
    assert noted is not None
    (tmp_path / "lock.holder").write_text(
        note.replace(f'"pid": {noted.identity.pid}', f'"pid": {os.getpid()}').replace(
            f'"started_at": {noted.identity.started_at}', f'"started_at": {started_at - 1}'
        )
    )
    with pytest.raises(LockedError, match="is gone"):
        DirectoryLock(tmp_path, "second").acquire()


def test_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StoreError, match="has no locks"):
        DirectoryLock(tmp_path, "first").acquire()


def test_lock_is_released_without_space_for_the_note(tmp_path: Path) -> None:
    first = DirectoryLock(tmp_path, "first")
    disk = Disk(fail_at=0, failure=NO_SPACE, only=("write",))
    with interposed(disk, tmp_path), pytest.raises(StoreError, match="ENOSPC"):
        first.acquire()
    assert not first.is_held
    with DirectoryLock(tmp_path, "second"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_file_system_without_locks_is_accepted_if_no_lock_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with DirectoryLock(tmp_path, "scheduler", is_needed=False) as lock:
        assert lock.is_unknown_here
        assert not lock.is_held


def test_note_of_the_next_holder_is_left_alone(tmp_path: Path) -> None:
    old, new = DirectoryLock(tmp_path, "old"), DirectoryLock(tmp_path, "new")
    old.acquire()
    (tmp_path / "lock").unlink()
    new.acquire()
    old.release()
    holder = read_holder(tmp_path)
    assert holder is not None
    assert holder.role == "new"
    new.release()
    assert read_holder(tmp_path) is None
