"""The step log's files: durable before the step, torn, damaged or foreign, and bounded."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.errors import ForeignFolderError, StoreError
from samebits.store import step_log
from samebits.store.checkpoint.folder import point_name
from samebits.store.step_log import StepLogWriter, read_step_log
from samebits.store.step_record import LateSamples, LogHeader, NewLine, StepRecord
from tests.store.disk_faults import NO_SPACE, Disk, error, interposed, kill_this_process

HEADER = LogHeader("job-1", 2, "worker-2")


def record(step: int, samples: int = 4) -> StepRecord:
    return StepRecord(step, 1, 4, 2, 5, (0.01,), tuple(range(step, step + samples)), f"{step:032x}")


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    """Return the folder of the rank with slot 2."""
    folder = tmp_path / "2"
    folder.mkdir()
    return folder


def write(rank: Path, steps: range, header: LogHeader = HEADER) -> None:
    writer = StepLogWriter.open(rank, header)
    for step in steps:
        writer.append([record(step)])
    writer.close()


def segments(rank: Path) -> list[Path]:
    return sorted((rank / "steps").glob("*_from_step_*"))


def read(rank: Path) -> list[int]:
    found = read_step_log(rank)
    assert found is not None
    return [one.step for one in found.history.records]


def same_as_written(rank: Path) -> list[int]:
    """Return the steps in the log after checking that each is as written."""
    found = read_step_log(rank)
    for one in [] if found is None else found.history.records:
        written = record(one.step)
        assert (one.samples, one.weights, one.learning_rates) == (
            written.samples,
            written.weights,
            written.learning_rates,
        )
    return [] if found is None else [one.step for one in found.history.records]


def test_records_are_read_back_in_order(rank: Path) -> None:
    assert read_step_log(rank) is None
    write(rank, range(1, 6))
    write(rank, range(4, 8))
    found = read_step_log(rank)
    assert found is not None
    assert [one.step for one in found.history.records] == [1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert (found.header, found.history.last_step, found.problems) == (HEADER, 7, [])
    writer = StepLogWriter.open(rank, HEADER)
    assert (writer.last_step, sorted(writer.line_after(5)), writer.problems) == (7, [6, 7], [])
    writer.close()


def test_several_entries_are_written_together(rank: Path) -> None:
    writer = StepLogWriter.open(rank, HEADER)
    writer.append([record(1, samples=0)])
    writer.append([LateSamples(1, (8, 9)), NewLine(1, "another world"), record(2)])
    writer.close()
    found = read_step_log(rank)
    assert found is not None
    assert found.history.line[1].samples == (8, 9)
    assert found.history.last_step == 2


def test_record_is_one_write_and_one_fsync(rank: Path) -> None:
    writer = StepLogWriter.open(rank, HEADER)
    writer.append([record(1)])
    writer.close()
    with interposed(Disk(), rank) as disk:
        writer = StepLogWriter.open(rank, HEADER)
        writer.append([record(2)])
        disk.calls.clear()
        writer.append([record(3)])
        assert [one.name for one in disk.calls] == ["write", "fsync"]
    writer.close()


def test_files_are_private(rank: Path) -> None:
    write(rank, range(1, 3))
    assert {stat.S_IMODE(one.stat().st_mode) for one in segments(rank)} == {0o600}
    assert stat.S_IMODE((rank / "steps").stat().st_mode) == 0o700


def test_end_torn_at_any_byte_costs_the_last_record_alone(rank: Path) -> None:
    writer = StepLogWriter.open(rank, HEADER)
    for step in (1, 2):
        writer.append([record(step)])
    (segment,) = segments(rank)
    last_begins = segment.stat().st_size
    writer.append([record(3)])
    writer.close()
    whole = segment.read_bytes()
    assert len(whole) > last_begins + 60
    for size in range(last_begins, len(whole)):
        segment.write_bytes(whole[:size])
        assert same_as_written(rank) == [1, 2]
        writer = StepLogWriter.open(rank, HEADER)
        assert bool(writer.problems) == (size > last_begins), f"torn at byte {size}"
        assert all("incomplete record" in problem for problem in writer.problems)
        assert segment.stat().st_size == last_begins
        writer.append([record(3)])
        writer.close()
        assert same_as_written(rank) == [1, 2, 3]
        for one in segments(rank)[1:]:
            one.unlink()


def test_file_shorter_than_its_header_is_reported_and_skipped(rank: Path) -> None:
    write(rank, range(1, 2))
    (segment,) = segments(rank)
    whole = segment.read_bytes()
    for size in range(len(whole)):
        segment.write_bytes(whole[:size])
        writer = StepLogWriter.open(rank, HEADER)
        assert len(writer.problems) == 1 and segment.name in writer.problems[0], f"cut to {size} bytes"
        assert segment.stat().st_size == size, "it must stay as it is"
        writer.append([record(2)])
        writer.close()
        assert same_as_written(rank) == [2]
        assert segment.exists(), "a damaged file may be needed until every point is newer"
        segments(rank)[1].unlink()


def test_flipped_byte_never_gives_a_wrong_record(rank: Path) -> None:
    write(rank, range(1, 5))
    (segment,) = segments(rank)
    whole = segment.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x04
        segment.write_bytes(damaged)
        steps = same_as_written(rank)
        assert steps == list(range(1, len(steps) + 1)) and len(steps) < 4, f"byte {place}"
        writer = StepLogWriter.open(rank, HEADER)
        writer.close()
        assert writer.problems, f"byte {place}"
        segment.write_bytes(whole)


def test_records_before_the_damage_and_in_later_files_are_used(rank: Path) -> None:
    write(rank, range(1, 4))
    (segment,) = segments(rank)
    damaged = bytearray(segment.read_bytes())
    write(rank, range(4, 6))
    middle = damaged.index(f"{2:032x}".encode())
    damaged[middle] ^= 1
    segment.write_bytes(damaged)
    found = read_step_log(rank)
    assert found is not None
    assert [one.step for one in found.history.records] == [1, 4, 5]
    assert len(found.problems) == 1 and "was changed after it was written" in found.problems[0]


def test_log_of_another_job_is_refused_and_left_alone(rank: Path) -> None:
    write(rank, range(1, 3), LogHeader("job-0", 2, "worker-2"))
    before = {one: one.read_bytes() for one in segments(rank)}
    with pytest.raises(ForeignFolderError, match="written by job job-0, but this is job job-1"):
        StepLogWriter.open(rank, HEADER)
    assert {one: one.read_bytes() for one in segments(rank)} == before


def test_log_of_another_slot_is_reported_and_skipped(rank: Path) -> None:
    write(rank, range(1, 3), LogHeader("job-1", 3, "worker-3"))
    writer = StepLogWriter.open(rank, HEADER)
    assert "is the log of slot 3, not of 2" in writer.problems[0]
    assert (writer.last_step, writer.line_after(0)) == (0, {})
    writer.close()


def test_records_older_than_every_point_are_removed(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "SEGMENT_BYTES", 1500)
    writer = StepLogWriter.open(rank, HEADER)
    sizes = []
    for step in range(1, 401):
        writer.append([record(step)])
        if step % 50 == 0:
            (rank / point_name(Point(step, 1))).mkdir()
            if step > 100:
                (rank / point_name(Point(step - 100, 1))).rmdir()
        sizes.append(sum(one.stat().st_size for one in segments(rank)))
    oldest = 350
    assert set(range(oldest + 1, 401)) <= set(read(rank)), "the step before the oldest point is gone"
    assert min(read(rank)) > 250
    assert max(sizes[200:]) < 1.3 * max(sizes[100:200]), "it grows without bound"
    writer.close()


def test_age_of_points_stored_elsewhere_is_queried(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "SEGMENT_BYTES", 1500)
    oldest = 0
    writer = StepLogWriter.open(rank, HEADER, lambda: oldest)
    for step in range(1, 101):
        writer.append([record(step)])
    assert min(read(rank)) == 1, "it is not known yet"
    oldest = 90
    for step in range(101, 151):
        writer.append([record(step)])
    writer.close()
    assert set(range(91, 151)) <= set(read(rank))
    assert min(read(rank)) > 50


def test_unremovable_old_segment_costs_no_record(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "SEGMENT_BYTES", 500)

    def refuse() -> int:
        raise StoreError("the folder cannot be listed")

    writer = StepLogWriter.open(rank, HEADER, refuse)
    for step in range(1, 20):
        writer.append([record(step)])
    writer.close()
    assert read(rank) == list(range(1, 20))


def test_unremoved_segment_is_removed_with_a_later_one(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "SEGMENT_BYTES", 500)
    write(rank, range(1, 10))
    before = segments(rank)
    writer = StepLogWriter.open(rank, HEADER, lambda: 9)

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        writer.append([record(10)])
    assert segments(rank)[: len(before)] == before
    for step in range(11, 20):
        writer.append([record(step)])
    writer.close()
    assert not set(before[:-1]) & set(segments(rank))


def test_damaged_file_is_removed_once_every_point_is_newer(rank: Path) -> None:
    write(rank, range(1, 3))
    (segment,) = segments(rank)
    segment.write_bytes(segment.read_bytes()[:20])
    write(rank, range(3, 6))
    (rank / point_name(Point(4, 1))).mkdir()
    write(rank, range(6, 7))
    assert segment.exists()
    (rank / point_name(Point(4, 1))).rename(rank / point_name(Point(5, 1)))
    write(rank, range(7, 8))
    assert not segment.exists()
    assert read(rank) == [6, 7]


def test_nothing_is_removed_without_a_point(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "SEGMENT_BYTES", 500)
    write(rank, range(1, 40))
    assert len(segments(rank)) > 3
    assert read(rank) == list(range(1, 40))


@pytest.mark.parametrize("half_writes", [False, True])
def test_full_disk_costs_only_that_record(rank: Path, half_writes: bool) -> None:
    with interposed(Disk(), rank) as disk:
        writer = StepLogWriter.open(rank, HEADER)
        writer.append([record(1)])
        writer.append([record(2)])
        disk.only, disk.matching, disk.fail_at, disk.failure = ("write",), 0, 0, NO_SPACE
        disk.half_writes = half_writes
        with pytest.raises(StoreError, match="ENOSPC"):
            writer.append([record(3)])
        disk.fail_at = -1
        writer.append([record(4)])
        writer.close()
    assert same_as_written(rank) == [1, 2, 4]
    assert StepLogWriter.open(rank, HEADER).problems == []
    assert not list((rank / "steps").glob(".*"))


def test_file_is_never_written_again_after_a_failed_fsync(rank: Path) -> None:
    with interposed(Disk(), rank) as disk:
        writer = StepLogWriter.open(rank, HEADER)
        writer.append([record(1)])
        disk.only, disk.matching, disk.fail_at, disk.failure = ("fsync",), 0, 0, error(errno.EIO)
        with pytest.raises(StoreError, match="EIO"):
            writer.append([record(2)])
        disk.fail_at = -1
        writer.append([record(3)])
        writer.close()
    assert len(segments(rank)) == 2
    assert same_as_written(rank) == [1, 3]


def calls_of(rank: Path, action: Callable[[Path], None]) -> int:
    with interposed(Disk(), rank) as disk:
        action(rank)
    return len(disk.calls)


def two_records(rank: Path) -> None:
    write(rank, range(1, 3))


def test_kill_at_any_call_leaves_a_usable_log(tmp_path: Path) -> None:
    counted = tmp_path / "0" / "2"
    counted.mkdir(parents=True)
    for number in range(calls_of(counted, two_records)):
        rank = tmp_path / str(number + 1) / "2"
        rank.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            with interposed(Disk(fail_at=number, failure=kill_this_process, half_writes=True), rank):
                two_records(rank)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 9, f"not killed at call {number}"
        writer = StepLogWriter.open(rank, HEADER)
        assert all("incomplete record" in problem for problem in writer.problems)
        writer.append([record(writer.last_step + 1)])
        writer.close()
        assert same_as_written(rank) == list(range(1, writer.last_step + 1))
        assert not list((rank / "steps").glob(".*"))
