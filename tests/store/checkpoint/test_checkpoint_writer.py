"""The writer process: what it makes durable, and what happens if it or its trainer is killed."""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from samebits.core.point import Point
from samebits.errors import LockedError, StoreError
from samebits.store.checkpoint import (
    MemoryRoom,
    SaveOutcome,
    Writer,
    dismiss_waiting,
    memory_buffer,
    points_in_memory,
    rank_directory,
    read,
    scan,
    start_ahead,
    verify,
    writing,
)
from samebits.store.checkpoint.point_store import open_point_store
from samebits.store.checkpoint.pruning import Pruning, Retention
from samebits.store.checkpoint.writer import MAX_MESSAGE_BYTES, message_of
from samebits.store.checkpoint.writer_process import Task, WriterProcess
from samebits.store.lock import DirectoryLock
from samebits.store.process_identity import ProcessIdentity
from tests.store import killed_writer
from tests.store.checkpoint.remote.remote_points import tensors_of
from tests.store.disk_faults import NO_SPACE, Disk, interposed, names_in
from tests.store.points import JOB, JOB_NAME, LAYOUT, change_byte, find, header_of
from tests.store.slots import content_of, fill_numbered

WAIT_S = 60.0
TRAINER = "tests.store.killed_trainer"


class Trainer:
    """A rank's side of its saves, without tensors."""

    def __init__(self, base: Path, root: Path, **options: object) -> None:
        self.lock = DirectoryLock(rank_directory(root, 0), "worker 0")
        self.lock.acquire()
        self.room = MemoryRoom(base, JOB, 0)
        self.writer = Writer(root, self.room, self.lock.descriptor, **options)  # type: ignore[arg-type]

    def submit(self, step: int, *, count: int = 10_000) -> None:
        name, sequence = fill_numbered(self.room, step, count=count)
        self.writer.submit(name, sequence, Point(step, 1))

    def save(self, step: int, *, count: int = 10_000) -> SaveOutcome:
        self.submit(step, count=count)
        outcome = self.writer.outcome(wait=True)
        assert outcome is not None
        return outcome

    def close(self) -> None:
        self.writer.close()
        self.room.close()
        self.lock.release()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "memory"
    base.mkdir()
    return base


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "points"


@pytest.fixture
def trainer(base: Path, root: Path) -> Iterator[Trainer]:
    trainer = Trainer(base, root)
    yield trainer
    trainer.close()


def whole_steps(root: Path) -> list[int]:
    found = scan(rank_directory(root, 0), JOB)
    for one in found:
        verify(one)
    return [one.point.step for one in found]


def steps_in_memory(base: Path) -> list[int]:
    found, _ = points_in_memory(base, JOB, 0)
    for one in found:
        verify(one)
    return [one.point.step for one in found]


def test_sealed_slot_becomes_a_normal_point(trainer: Trainer, base: Path, root: Path) -> None:
    for step in (1, 2, 3):
        assert trainer.save(step) == SaveOutcome(Point(step, 1))
    assert whole_steps(root) == [3, 2, 1]
    assert steps_in_memory(base) == [3, 2]
    loaded = read(find(root, 2))
    assert bytes(loaded.tensors["weight"].data) == content_of(2, 10_000)
    assert loaded.tree["step"] == 2
    path = find(root, 2).path
    assert {entry.stat().st_mode & 0o777 for entry in path.iterdir()} == {0o600}


def test_writer_has_its_own_process_group_and_ends_with_the_trainer(trainer: Trainer) -> None:
    trainer.save(1)
    assert trainer.writer.pid is not None
    assert os.getpgid(trainer.writer.pid) == trainer.writer.pid != os.getpgid(0), (
        "the terminal's Ctrl-C must not reach it"
    )
    assert os.getsid(trainer.writer.pid) == os.getsid(0), "its nice value must take effect"
    assert os.getpriority(os.PRIO_PROCESS, trainer.writer.pid) > os.getpriority(os.PRIO_PROCESS, 0)
    identity = ProcessIdentity.of(trainer.writer.pid)
    assert identity is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(identity.pid, number)
    assert trainer.save(2).problem is None, "a termination signal does not interrupt a save"
    trainer.writer.close()
    assert not identity.is_alive()


def test_existing_point_is_not_written_again(trainer: Trainer, root: Path) -> None:
    trainer.save(1)
    before = (find(root, 1).path / "data.safetensors").stat().st_ino
    assert trainer.save(1).problem is None
    assert (find(root, 1).path / "data.safetensors").stat().st_ino == before
    change_byte(find(root, 1).path / "data.safetensors", 40)
    assert trainer.save(1).problem is None
    verify(find(root, 1))
    assert [name for name in names_in(root / "0") if name.startswith("damaged-1-")]


def test_failing_disk_is_reported_and_the_point_stays_in_memory(trainer: Trainer, base: Path, root: Path) -> None:
    trainer.save(1)
    directory = rank_directory(root, 0)
    directory.rename(root / "aside")
    directory.write_bytes(b"in the way")
    problem = trainer.save(2).problem
    assert problem is not None and str(directory) in problem and "(ENOTDIR)" in problem
    assert 2 in steps_in_memory(base)
    directory.unlink()
    (root / "aside").rename(directory)
    assert trainer.save(3).problem is None
    assert whole_steps(root) == [3, 1]


def test_full_disk_leaves_the_older_point_and_no_trace(base: Path, root: Path) -> None:
    """A file size limit stands in for the full disk: the write fails half way, as it does there."""
    program = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000)); "
    program += "runpy.run_module('samebits.store.checkpoint.writer_process', run_name='__main__', alter_sys=True)"
    trainer = Trainer(base, root, command=(sys.executable, "-c", program))
    try:
        assert trainer.save(1).problem is None
        problem = trainer.save(2, count=3_000_000).problem
        assert problem is not None and "saving the point failed: File too large (EFBIG)" in problem
        assert "Fix: raise the file size limit (see `ulimit -f`), or choose another folder" in problem
        assert whole_steps(root) == [1]
        assert [name for name in names_in(root / "0") if name.startswith(".tmp")] == []
        assert trainer.save(3).problem is None
    finally:
        trainer.close()


# ---- started before there is anything to write


@pytest.fixture
def started_ahead() -> Iterator[int]:
    """Return the waiting writer process."""
    before = set(children())
    start_ahead()
    (pid,) = set(children()) - before
    yield pid
    dismiss_waiting()


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_writer_started_ahead_is_used_next(started_ahead: int, trainer: Trainer, root: Path) -> None:
    start_ahead()  # one is running
    assert trainer.save(1).problem is None
    assert trainer.writer.pid == started_ahead
    assert whole_steps(root) == [1]
    trainer.writer.close()
    assert trainer.save(2).problem is None
    assert trainer.writer.pid != started_ahead


def test_writer_killed_while_it_waits_costs_no_save(started_ahead: int, trainer: Trainer, root: Path) -> None:
    os.kill(started_ahead, signal.SIGKILL)
    identity = ProcessIdentity.of(started_ahead)
    assert identity is None or identity.wait_for_exit(WAIT_S)
    assert trainer.save(1).problem is None
    assert trainer.writer.pid != started_ahead
    assert whole_steps(root) == [1]


def test_unneeded_writer_is_dismissed(started_ahead: int) -> None:
    dismiss_waiting()
    assert started_ahead not in children()


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a child that stays"])
def test_waiting_writer_ends_with_its_trainer(forks: bool) -> None:
    program = "import os, signal; from samebits.store.checkpoint import start_ahead; start_ahead(); "
    program += f"child = {forks} and (os.fork() or signal.pause()); "
    program += "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True); os.kill(os.getpid(), 9)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        writer, *rest = [ProcessIdentity.of(int(pid)) for pid in trainer.stdout.readline().split()]
        assert trainer.wait(WAIT_S) == -signal.SIGKILL
        try:
            assert writer is None or writer.wait_for_exit(WAIT_S)
        finally:
            for child in rest:
                assert child is not None, "it stays until it is ended"
                os.kill(child.pid, signal.SIGKILL)


def write_out(room: MemoryRoom, root: Path, name: str) -> None:
    """Do in this process what the writer process does with a slot."""
    with memory_buffer.hashed(room.path / name, room.descriptor) as point:
        writing.write_prepared(root, point.header, point.manifest_data, point.data)


@pytest.mark.parametrize("beside", [False, True], ids=["hashed before", "hashed beside"])
def test_order_of_a_save_is_the_same_without_a_writer_process(
    base: Path, root: Path, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if beside:
        monkeypatch.setattr(memory_buffer, "BESIDE_BYTES", 0)
    killed_writer.save(root, step=1)
    with interposed(Disk(), root) as disk:
        killed_writer.save(root, step=2)
    expected = [name.partition("step_")[2] or name for name in disk.names() if not name.startswith("write")]
    room = MemoryRoom(base, JOB, 0)
    name, _ = fill_numbered(room, 2)
    shutil.rmtree(find(root, 2).path)
    with interposed(Disk(), root) as disk:
        write_out(room, root, name)
    assert [name.partition("step_")[2] or name for name in disk.names() if not name.startswith("write")] == expected
    room.close()


@pytest.mark.parametrize("half_writes", [False, True])
def test_error_at_any_call_leaves_no_trace_of_the_attempt(base: Path, root: Path, half_writes: bool) -> None:
    room = MemoryRoom(base, JOB, 0)
    name, _ = fill_numbered(room, 2, count=20_000)
    killed_writer.save(root, step=1)
    with interposed(Disk(), root) as counted:
        write_out(room, root, name)
    shutil.rmtree(find(root, 2).path)
    for fail_at in range(len(counted.calls)):
        disk = Disk(fail_at=fail_at, failure=NO_SPACE, half_writes=half_writes)
        with interposed(disk, root), pytest.raises(StoreError, match="ENOSPC"):
            write_out(room, root, name)
        is_last = fail_at == len(counted.calls) - 1  # the folder's fsync: the point exists, but may not be durable
        assert whole_steps(root) == ([2, 1] if is_last else [1])
        assert len(names_in(root / "0")) == (2 if is_last else 1)
    write_out(room, root, name)
    assert whole_steps(root) == [2, 1]
    room.close()


# ---- the writer is killed


def test_killed_writer_is_a_failed_save_and_another_one_takes_over(trainer: Trainer, root: Path) -> None:
    trainer.save(1)
    assert trainer.writer.pid is not None
    identity = ProcessIdentity.of(trainer.writer.pid)
    assert identity is not None
    os.kill(identity.pid, signal.SIGSTOP)
    trainer.submit(2)
    os.kill(identity.pid, signal.SIGKILL)
    outcome = trainer.writer.outcome(wait=True)
    assert outcome is not None and outcome.problem is not None
    assert f"(pid {identity.pid}) ended with status -9" in outcome.problem
    assert trainer.save(3).problem is None
    assert trainer.writer.pid != identity.pid
    assert whole_steps(root) == [3, 1]


def test_writer_killed_between_two_saves_costs_none(trainer: Trainer, root: Path) -> None:
    trainer.save(1)
    assert trainer.writer.pid is not None
    identity = ProcessIdentity.of(trainer.writer.pid)
    assert identity is not None
    os.kill(identity.pid, signal.SIGKILL)
    identity.wait_for_exit(WAIT_S)
    assert trainer.save(2).problem is None
    assert whole_steps(root) == [2, 1]


def test_writer_killed_at_a_random_time_leaves_complete_points_only(trainer: Trainer, base: Path, root: Path) -> None:
    draw = random.Random(5)
    outcomes = set()
    for step in range(1, 13):
        trainer.submit(step, count=2_000_000)
        assert trainer.writer.pid is not None
        identity = ProcessIdentity.of(trainer.writer.pid)
        time.sleep(draw.uniform(0.0, 0.15))  # the time is drawn: no event is waited for
        os.kill(trainer.writer.pid, signal.SIGKILL)
        outcome = trainer.writer.outcome(wait=True)
        assert outcome is not None and identity is not None
        whole = whole_steps(root)
        outcomes.add(outcome.problem is None)
        assert step in whole or outcome.problem is not None, "reported durable, but missing"
        assert set(steps_in_memory(base)) <= set(range(1, step + 1))
    assert trainer.save(13).problem is None
    assert [name for name in names_in(root / "0") if name.startswith(".tmp")] == []


# ---- the trainer is killed


def test_writer_finishes_what_a_killed_trainer_sealed_and_the_successor_waits(
    base: Path, root: Path, repository: Path
) -> None:
    command = [sys.executable, "-m", TRAINER, str(base), str(root), "seal", "0"]
    child = subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    # stopped, with a sealed point that it does not know of
    writer = ProcessIdentity.of(int(child.stdout.readline()))
    assert writer is not None
    try:
        assert child.wait(WAIT_S) == -signal.SIGKILL
        lock = DirectoryLock(rank_directory(root, 0), "worker 0")
        with pytest.raises(LockedError, match="its last known holder, is gone"):
            lock.acquire()
        with pytest.raises(LockedError, match="another running process"):
            MemoryRoom(base, JOB, 0)
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    lock.acquire(WAIT_S)
    assert not writer.is_alive()
    lock.release()
    assert whole_steps(root) == [2, 1]
    assert steps_in_memory(base) == [2, 1]
    child.stdout.close()


# A trainer that is killed while its writer lives: tests/checkpoint_kills.
@pytest.mark.parametrize("with_its_writer", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_trainer_killed_at_a_random_time_loses_nothing_durable(
    base: Path, root: Path, repository: Path, with_its_writer: bool
) -> None:
    draw = random.Random(7)
    newest = 0
    for _ in range(12):
        command = [sys.executable, "-m", TRAINER, str(base), str(root), "save", str(newest)]
        child = subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        writer = ProcessIdentity.of(int(child.stdout.readline()))
        assert writer is not None
        time.sleep(draw.uniform(0.0, 0.2))  # the time is drawn
        if with_its_writer:
            os.kill(writer.pid, signal.SIGKILL)
        child.kill()
        durable = [int(line) for line in child.stdout]
        child.wait(WAIT_S)
        lock = DirectoryLock(rank_directory(root, 0), "worker 0")
        lock.acquire(WAIT_S)
        lock.release()
        found = points_in_memory(base, JOB, 0)[0]
        for one in found:
            loaded = read(one)
            assert bytes(loaded.tensors["weight"].data) == content_of(one.point.step, 500_000)
        whole = whole_steps(root)
        assert set(durable) <= set(whole)
        assert max(whole) > newest
        assert max(one.point.step for one in found) >= max(whole), "memory has the newest as well"
        newest = max(whole)
    assert newest > 0


# ---- direct I/O


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * 4096, 8 * 1024 * 1024 + 5])
@pytest.mark.parametrize("offset", [0, 7])  # aligned to a page and not: the kernel refuses direct I/O for the latter
@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_file_of_any_size_is_written_completely(tmp_path: Path, size: int, offset: int, folder: str) -> None:
    if folder == "memory" and not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    path = tmp_path / "file" if folder == "disk" else Path("/dev/shm") / f"samebits-test-{os.getpid()}-{size}"
    data = memoryview(mmap.mmap(-1, offset + size))[offset:]
    data[:] = os.urandom(size)
    try:
        writing.write_new_file(path, data)
        assert path.read_bytes() == data
        with pytest.raises(FileExistsError):
            writing.write_new_file(path, data)
    finally:
        path.unlink()


def test_empty_file_is_written_too(tmp_path: Path) -> None:
    writing.write_new_file(tmp_path / "file", memoryview(b""))
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(("is_alive", "left"), [(True, [3, 2]), (False, [3, 2, 1])])
@pytest.mark.parametrize("is_remote", [False, True])
def test_writer_removes_nothing_once_the_trainer_is_gone(
    base: Path, root: Path, is_alive: bool, left: list[int], is_remote: bool
) -> None:
    """The trainer's successor may already have found the point to which all ranks roll back."""
    location = f"memory://{uuid.uuid4().hex}/job" if is_remote else root
    place = open_point_store(location, 0, job=JOB, job_name=JOB_NAME)
    for step in (1, 2):
        place.write(header_of(step), tensors_of(step), {}, LAYOUT)
    trainer = ProcessIdentity.current()
    if not is_alive:
        trainer = dataclasses.replace(trainer, started_at=trainer.started_at - 1)  # an earlier process with this pid
    room = MemoryRoom(base, JOB, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(msgpack.packb(("save", *fill_numbered(room, 3))))
        ours.send(msgpack.packb(("prune", *message_of(Pruning(Point(3, 1), Retention(2))))))
        ours.shutdown(socket.SHUT_WR)
        WriterProcess(theirs, trainer, Task(location, "", room.path, room.descriptor)).run()
        words = [msgpack.unpackb(ours.recv(MAX_MESSAGE_BYTES)) for _ in range(3 if is_alive else 2)]
    assert [what for what, *_ in words] == ["hashed", "durable", "pruned"][: len(words)]
    assert [found.point.step for found in place.scan()] == left
    room.close()


def test_folder_with_a_non_utf8_name_is_used(base: Path, tmp_path: Path) -> None:
    root = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    trainer = Trainer(base, root)
    try:
        assert trainer.save(10).problem is None
        assert whole_steps(root) == [10]
        shutil.rmtree(rank_directory(root, 0))  # the problem names the folder, and is sent
        rank_directory(root, 0).symlink_to("nowhere")
        problem = trainer.save(20).problem
    finally:
        trainer.close()
    assert problem is not None
    problem.encode()
