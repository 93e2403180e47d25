"""Saving with failing disks, interrupts and kills, and saving a point that exists already."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.errors import CheckpointError, StoreError
from samebits.store.checkpoint import TensorPart, rank_directory, read, scan, verify, write_point
from samebits.store.process_identity import ProcessIdentity
from tests.store import killed_writer
from tests.store.disk_faults import NO_SPACE, Disk, InterruptedHere, error, interposed, interrupt, names_in
from tests.store.points import JOB, change_byte, find, header_of, save

STEP_2, STEP_3 = "step_0000000002_gen_000001", "step_0000000003_gen_000001"


def usable_points(root: Path) -> list[Point]:
    """Return the points that scanning lists, each of which must verify."""
    found = scan(rank_directory(root, 0), JOB)
    for point in found:
        verify(point)
    return [point.point for point in found]


def number_of_calls(root: Path) -> int:
    with interposed(Disk(), root) as disk:
        killed_writer.save(root, step=9)
    return len(disk.calls)


def test_order_of_a_save(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    with interposed(Disk(), tmp_path) as disk:
        killed_writer.save(tmp_path, step=3)
    calls = [name for name in disk.names() if name != "write data.safetensors"]
    temporary = calls[0].split()[1]
    assert temporary.startswith(f".tmp-{os.getpid()}-")
    assert calls == [
        f"mkdir {temporary}",
        "open data.safetensors",
        "fsync data.safetensors",
        "open manifest.msgpack",
        "write manifest.msgpack",
        "fsync manifest.msgpack",
        f"fsync {temporary}",
        f"rename {temporary}",
        "fsync 0",
    ]
    path = tmp_path / "0" / STEP_3
    assert path.stat().st_mode & 0o777 == 0o700
    assert {entry.stat().st_mode & 0o777 for entry in path.iterdir()} == {0o600}


def test_tensors_are_written_in_place_without_a_copy(tmp_path: Path) -> None:
    source = bytearray(b"x" * 1000)
    part = TensorPart("w", "U8", (1000,), memoryview(source)[:])
    write_point(tmp_path, header_of(3), (one for one in [part]), None, None)
    assert bytes(read(find(tmp_path, 3)).tensors["w"].data) == source


# ---- existing points ----------------------------------------------------------------------------------------------


def test_saving_a_complete_point_again_changes_nothing_but_syncs_it(tmp_path: Path) -> None:
    found = save(tmp_path, 3)
    before = {entry.name: (entry.stat().st_ino, entry.read_bytes()) for entry in found.path.iterdir()}
    with interposed(Disk(), tmp_path) as disk:
        save(tmp_path, 3)
    assert {entry.name: (entry.stat().st_ino, entry.read_bytes()) for entry in found.path.iterdir()} == before
    synced = ["fsync data.safetensors", "fsync manifest.msgpack", f"fsync {STEP_3}", "fsync 0"]
    assert disk.names() == synced, "a save that was killed before its last fsync is completed by the next"
    assert names_in(tmp_path / "0") == [STEP_3]


@pytest.mark.parametrize("name", ["data.safetensors", "manifest.msgpack"])
def test_damaged_point_is_set_aside_and_saved_again(tmp_path: Path, name: str) -> None:
    for number in (1, 2):
        found = save(tmp_path, 3)
        change_byte(found.path / name, 40)
        damaged = (found.path / name).read_bytes()
        verify(save(tmp_path, 3))
        assert (tmp_path / "0" / f"damaged-{number}-{STEP_3}" / name).read_bytes() == damaged
    assert names_in(tmp_path / "0") == [f"damaged-1-{STEP_3}", f"damaged-2-{STEP_3}", STEP_3]
    assert usable_points(tmp_path) == [Point(3, 1)]


def test_file_or_dangling_link_with_the_points_name_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / STEP_3).write_bytes(b"in the way")
    verify(save(tmp_path, 3))
    (tmp_path / "0" / STEP_2).symlink_to("nowhere")
    verify(save(tmp_path, 2))
    assert names_in(tmp_path / "0") == [f"damaged-1-{STEP_2}", f"damaged-1-{STEP_3}", STEP_2, STEP_3]


def test_damaged_point_stays_until_the_new_one_is_written(tmp_path: Path) -> None:
    found = save(tmp_path, 3)
    change_byte(found.path / "data.safetensors", 40)
    with (
        interposed(Disk(fail_at=0, failure=NO_SPACE, only=("write",)), tmp_path),
        pytest.raises(StoreError, match="ENOSPC"),
    ):
        save(tmp_path, 3)
    assert names_in(tmp_path / "0") == [STEP_3]


def test_point_of_another_job_is_set_aside_not_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 3, job="other")
    verify(save(tmp_path, 3))
    assert names_in(tmp_path / "0") == [f"damaged-1-{STEP_3}", STEP_3]


# ---- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("half_writes", [False, True])
def test_error_at_any_call_leaves_no_trace_of_the_attempt(tmp_path: Path, number: int, half_writes: bool) -> None:
    killed_writer.save(tmp_path, step=2)
    calls = number_of_calls(tmp_path)
    for fail_at in range(calls):
        disk = Disk(fail_at=fail_at, failure=error(number), half_writes=half_writes)
        with interposed(disk, tmp_path), pytest.raises(StoreError, match=errno.errorcode[number]) as caught:
            killed_writer.save(tmp_path, step=3)
        assert not isinstance(caught.value, CheckpointError), "the disk is at fault, not the point"
        assert str(tmp_path / "0") in str(caught.value)
        if fail_at == calls - 1:  # only the folder's fsync failed: the point exists, but may not be durable
            assert names_in(tmp_path / "0") == [STEP_2, STEP_3, "step_0000000009_gen_000001"]
        else:
            assert names_in(tmp_path / "0") == [STEP_2, "step_0000000009_gen_000001"]
    killed_writer.save(tmp_path, step=3)
    assert usable_points(tmp_path) == [Point(9, 1), Point(3, 1), Point(2, 1)]


def test_interrupt_at_any_call_leaves_no_trace_of_the_attempt(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    calls = number_of_calls(tmp_path)
    for fail_at in range(calls - 1):
        disk = Disk(fail_at=fail_at, failure=interrupt, half_writes=True)
        with interposed(disk, tmp_path), pytest.raises(InterruptedHere):
            killed_writer.save(tmp_path, step=3)
        assert names_in(tmp_path / "0") == ["step_0000000009_gen_000001"]


def test_failing_generator_of_tensors_leaves_no_trace(tmp_path: Path) -> None:
    def tensors() -> object:
        yield TensorPart("w", "U8", (1,), b"x")
        raise InterruptedHere

    with pytest.raises(InterruptedHere):
        write_point(tmp_path, header_of(3), tensors(), None, None)  # type: ignore[arg-type]
    assert names_in(tmp_path / "0") == []


# Kills between whole calls: test_kill_at_any_system_call_of_a_save_leaves_the_older_point_or_both.
@pytest.mark.parametrize("half_writes", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_kill_9_at_any_call_leaves_a_complete_point_or_none(
    tmp_path: Path, repository: Path, half_writes: bool
) -> None:
    killed_writer.save(tmp_path, step=2)
    outcomes = set()
    for fail_at in range(100):
        command = [str(tmp_path), "save", str(fail_at), "half" if half_writes else "whole"]
        result = subprocess.run(
            [sys.executable, "-m", "tests.store.killed_writer", *command],
            cwd=repository,
            capture_output=True,
            text=True,
        )
        points = usable_points(tmp_path)
        assert points in ([Point(2, 1)], [Point(3, 1), Point(2, 1)])
        outcomes.add(len(points))
        if result.stdout == "done\n":
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
        assert len(names_in(tmp_path / "0")) <= len(points) + 1, "leftovers of earlier attempts are removed"
        for path in (tmp_path / "0").glob(STEP_3):
            path.rename(tmp_path / f"seen-{fail_at}")
    assert outcomes == {1, 2}
    assert fail_at >= 10
    assert names_in(tmp_path / "0") == [STEP_2, STEP_3]


def test_temporary_directory_of_a_live_writer_stays_and_a_dead_ones_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "0"
    me = ProcessIdentity.current()
    names = {
        "mine": f".tmp-{me.pid}-{me.started_at}-0-{STEP_2}",
        "reused pid": f".tmp-{me.pid}-{me.started_at - 1}-0-{STEP_2}",
        "nobody": f".tmp-{2**31}-1-0-{STEP_3}",
        "another kind": ".tmp-notes",
    }
    for name in names.values():
        (directory / name).mkdir(parents=True)
        (directory / name / "data.safetensors").write_bytes(b"half")
    save(tmp_path, 3)
    assert names_in(directory) == sorted([names["mine"], names["another kind"], STEP_3])


def test_unremovable_temporary_directory_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stale = tmp_path / "0" / f".tmp-{2**31}-1-0-{STEP_3}"
    stale.mkdir(parents=True)
    with interposed(Disk(fail_at=0, failure=error(errno.EACCES), only=("rmdir",)), tmp_path):
        verify(save(tmp_path, 3))
    assert stale.exists()
    assert stale.name in caplog.text
