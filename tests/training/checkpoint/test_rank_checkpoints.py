"""A rank's restore points, saved in the background: what is durable when, messages, and recovery from memory."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.core.point import Point
from samebits.errors import CheckpointError, UsageError
from samebits.service.log import LOGGER
from samebits.store.checkpoint import MemoryRoom, memory_buffer, point_name, points_in_memory, pruning, verify
from samebits.store.checkpoint.remote_points import RemotePointStore
from samebits.store.process_identity import ProcessIdentity
from samebits.training.checkpoint import rank_checkpoints
from samebits.training.checkpoint.rank_checkpoints import RankCheckpoints
from samebits.training.state import snapshot
from samebits.training.state.checkpoint_config import CheckpointConfig
from tests.store.disk_faults import NO_SPACE, Disk, interposed
from tests.store.forging import STATE, changes, fields_of, forge
from tests.store.points import change_byte, find

JOB = "a-job"


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make messages reach ``caplog``, however the logger was set up before."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    LOGGER.setLevel(logging.INFO)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., RankCheckpoints]]:
    """Return a factory of a rank's checkpoints, which are released after the test."""
    made: list[RankCheckpoints] = []
    (tmp_path / "memory").mkdir()

    def make(**options: Any) -> RankCheckpoints:
        memory = options.pop("memory", tmp_path / "memory")
        others = {name: options.pop(name) for name in ("committed", "report") if name in options}
        config = CheckpointConfig(**options)
        made.append(
            RankCheckpoints(config, tmp_path / "root", job=JOB, job_name="j", slot=0, node="0", memory=memory, **others)
        )
        return made[-1]

    yield make
    for one in made:
        one.release()


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(50, 7, generator=generator),
        "transposed": torch.randn(6, 5, generator=generator).t(),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "scalar": torch.tensor(float(step)),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
        "long": torch.arange(step + 3 if step > 100 else 3),
        "rows": torch.randn(20, 4, generator=generator)[::2],
        "conjugate": torch.randn(4, dtype=torch.complex64, generator=generator).conj(),
        "step": step,
        "betas": (0.9, 0.999),
    }


def point_of(rank: RankCheckpoints, step: int, generation: int = 1) -> tuple[Any, ...]:
    tree, tensors = snapshot.take_apart(state_of(step), "state")
    return rank.header(Point(step, generation), 0, 1), tensors, tree, {}


def save(rank: RankCheckpoints, step: int, generation: int = 1, *, durable: bool = False) -> bool:
    return rank.save(*point_of(rank, step, generation), durable=durable)


def until_prepared(rank: RankCheckpoints) -> None:
    staging = rank._saves._staging
    assert staging is not None
    wait(staging._reserving.values())


def assert_is_step(rank: RankCheckpoints, step: int, generation: int = 1) -> None:
    found = rank.load(Point(step, generation))
    loaded, expected = snapshot.join(found.tree, found.tensors), state_of(step)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name
        else:
            assert loaded[name] == value


def on_disk(rank: RankCheckpoints) -> set[int]:
    return {int(path.name.split("_")[1]) for path in (rank.root / "0").glob("step_*")}


def until_old_ones_are_gone(rank: RankCheckpoints) -> None:
    rank.flush()
    rank._hear_of_pruning(wait=True)


def stop_writer(rank: RankCheckpoints) -> ProcessIdentity:
    """Stop the writer, as a slow disk would."""
    pid = rank._saves._writer.pid  # type: ignore[union-attr]
    assert pid is not None
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    os.kill(pid, signal.SIGSTOP)
    return identity


def go_on(writer: ProcessIdentity) -> None:
    os.kill(writer.pid, signal.SIGCONT)


# ---- saving


@pytest.mark.parametrize("async_save", [True, False])
def test_saved_point_is_loaded(rank: Callable[..., RankCheckpoints], async_save: bool) -> None:
    mine = rank(async_save=async_save)
    for step in (1, 2, 3, 200, 201, 4):  # two of them of other shapes
        assert save(mine, step)
        mine.flush()
        assert step in on_disk(mine)
        assert_is_step(mine, step)
    again = rank()
    assert again.held()[:2] == [Point(201, 1), Point(200, 1)]
    assert_is_step(again, 201)
    assert_is_step(again, 4)


def test_training_continues_while_the_disk_is_slow(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank()
    save(mine, 1)
    mine.flush()
    writer = stop_writer(mine)
    assert save(mine, 2)
    mine.settle()
    assert on_disk(mine) == {1}
    go_on(writer)
    mine.flush()
    assert on_disk(mine) == {1, 2}


def test_point_that_must_be_durable_is_when_the_call_returns(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank()
    save(mine, 1)
    assert save(mine, 2, durable=True)
    assert on_disk(mine) == {1, 2}


def test_changes_after_the_call_are_not_in_the_point(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank()
    save(mine, 1)
    mine.flush()
    writer = stop_writer(mine)
    weight = torch.ones(1000)
    mine.save(mine.header(Point(2, 1), 0, 1), [("w", weight)], {}, {})
    weight.zero_()
    go_on(writer)
    mine.flush()
    assert torch.frombuffer(mine.load(Point(2, 1)).tensors["w"].data, dtype=torch.float32).sum() == 1000


def test_busy_writer_is_waited_for(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank(when_busy="wait")
    for step in range(1, 6):
        save(mine, step)
    mine.flush()
    assert on_disk(mine) == {1, 2, 3, 4, 5}


def test_save_is_skipped_while_the_writer_is_busy_and_reported_once(
    rank: Callable[..., RankCheckpoints], caplog: pytest.LogCaptureFixture
) -> None:
    mine = rank(when_busy="skip")
    save(mine, 1)
    mine.flush()
    writer = stop_writer(mine)
    for step in (2, 3, 4):
        assert save(mine, step)
    go_on(writer)
    mine.flush()
    save(mine, 5)
    mine.flush()
    assert on_disk(mine) == {1, 2, 5}
    (said,) = [record.message for record in caplog.records if "is skipped" in record.message]
    assert "step 3 " in said and "save_checkpoint_steps" in said and 'when_busy="wait"' in said


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="when_busy='drop': expected 'wait' or 'skip'"):
        CheckpointConfig(when_busy="drop")


def test_unsavable_state_is_an_error_at_once(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank()
    with pytest.raises(CheckpointError, match=r"w: a tensor of torch\.float32, torch\.sparse_coo cannot be saved"):
        mine.save(mine.header(Point(1, 1), 0, 1), [("w", torch.eye(3).to_sparse())], {}, {})
    assert save(mine, 2)
    mine.flush()
    assert on_disk(mine) == {2}


def test_old_points_are_removed_when_a_new_one_is_durable(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank(keep_checkpoint_max=2)
    for step in range(1, 6):
        save(mine, step)
    until_old_ones_are_gone(mine)
    assert on_disk(mine) == {4, 5}


@pytest.mark.parametrize("async_save", [True, False])
def test_damaged_point_stays_and_is_reported_once(
    rank: Callable[..., RankCheckpoints],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    async_save: bool,
) -> None:
    """If nothing is restored, the damage is found only when the point is due for removal."""
    before = rank(async_save=False)
    for step in (1, 2, 3):
        assert save(before, step)
    before.release()
    change_byte(tmp_path / "root" / "0" / point_name(Point(1, 1)) / "data.safetensors", -1)
    caplog.clear()
    read: list[int] = []
    monkeypatch.setattr(pruning, "verify", lambda found: read.append(found.point.step) or verify(found))
    after = rank(keep_checkpoint_max=2, async_save=async_save)
    for step in (4, 5, 6):
        assert save(after, step)
        until_old_ones_are_gone(after)
    assert on_disk(after) == {1, 5, 6}
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith("ignored the restore point of step 1")
    assert "data.safetensors" in said
    if not async_save:
        assert read.count(1) == 1


def test_no_step_waits_for_the_removal_of_old_points(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank(keep_checkpoint_max=2)
    for step in (1, 2, 3):
        save(mine, step)
    outcome = mine._saves.outcome(wait=True)
    writer = stop_writer(mine)
    mine._hear(outcome)
    mine.settle()
    assert save(mine, 4)
    mine.settle()
    assert on_disk(mine) == {1, 2, 3}
    go_on(writer)
    until_old_ones_are_gone(mine)
    assert on_disk(mine) == {3, 4}
    assert mine._told == mine._verified == {Point(3, 1), Point(4, 1)}


def test_failing_disk_is_reported_less_and_less_often_and_so_is_its_recovery(
    rank: Callable[..., RankCheckpoints], caplog: pytest.LogCaptureFixture
) -> None:
    mine = rank()
    save(mine, 1)
    mine.flush()
    directory = mine.root / "0"
    directory.rename(mine.root / "aside")
    directory.write_bytes(b"in the way")
    for step in range(2, 8):
        save(mine, step)
        mine.flush()
    directory.unlink()
    (mine.root / "aside").rename(directory)
    save(mine, 8)
    mine.flush()
    assert on_disk(mine) == {1, 8}
    failed = [record.message for record in caplog.records if "was not saved" in record.message]
    assert [one.split()[4] for one in failed] == ["2", "3", "5"] and all("ENOTDIR" in one for one in failed)
    assert "4 in a row; the newest on disk is of step 1" in failed[-1]
    (again,) = [record.message for record in caplog.records if "saved again" in record.message]
    assert "from step 8 on" in again


@pytest.mark.parametrize("kind", ["absent", "too small", "no memory left", "somebody else's"])
def test_training_without_memory_waits_for_the_disk_and_is_warned_once(
    rank: Callable[..., RankCheckpoints],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    memory = tmp_path / "memory"
    if kind == "absent":
        memory = tmp_path / "none"
    elif kind == "too small":

        def refuse(descriptor: int, offset: int, size: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
    elif kind == "no memory left":
        monkeypatch.setattr(memory_buffer, "available_bytes", lambda: 100)
    else:
        other = MemoryRoom(memory, JOB, 0)
    mine = rank(memory=memory)
    for step in (1, 2, 3):
        assert save(mine, step)
        assert step in on_disk(mine)
    (said,) = [record.message for record in caplog.records if "waits for the disk" in record.message]
    reasons = {"absent": "ENOENT", "too small": "ENOSPC", "no memory left": "100 that are available"}
    assert reasons.get(kind, "another running process") in said
    assert not list(memory.rglob("[ab]"))
    assert "async_save=False" in said
    if kind == "somebody else's":
        other.close()
        save(mine, 4)
        assert [record for record in caplog.records if "copied aside again" in record.message]


def test_prepared_memory_is_available_when_needed(
    rank: Callable[..., RankCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = rank()
    mine.prepare(*point_of(mine, 3))
    until_prepared(mine)
    slots = sorted((tmp_path / "memory").rglob("[ab]"))
    assert [slot.name for slot in slots] == ["a"], "one is enough while every point gets to the disk"
    assert slots[0].stat().st_blocks
    assert mine._saves._writer is None
    assert mine.held() == []
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory was reserved again"))
    for step in (4, 5, 6):
        assert save(mine, step)
        mine.flush()
        assert_is_step(mine, step)


def in_memory(folder: Path) -> list[int]:
    return [found.point.step for found in points_in_memory(folder / "memory", JOB, 0)[0]]


def test_only_a_point_that_is_on_disk_is_overwritten_in_memory(
    rank: Callable[..., RankCheckpoints], tmp_path: Path
) -> None:
    mine = rank()
    for step in (1, 2):
        assert save(mine, step)
        mine.flush()
    assert in_memory(tmp_path) == [2]
    mine._verified.discard(Point(2, 1))  # as if the disk had failed
    assert save(mine, 3)
    assert [slot.name for slot in sorted((tmp_path / "memory").rglob("[ab]"))] == ["a", "b"]
    mine.flush()
    assert in_memory(tmp_path) == [3, 2]
    mine._verified.add(Point(2, 1))
    for step in (4, 5):
        assert save(mine, step)
        mine.flush()
        assert in_memory(tmp_path) == [step], "the other slot's memory is free again"


def test_preparing_leaves_points_that_may_be_needed(rank: Callable[..., RankCheckpoints], tmp_path: Path) -> None:
    before = rank()
    for step in (1, 2):
        assert save(before, step)
        before.flush()
    before.release()
    mine = rank()
    mine.prepare(*point_of(mine, 3))
    until_prepared(mine)
    assert [found.point.step for found in points_in_memory(tmp_path / "memory", JOB, 0)[0]] == [2]
    assert save(mine, 4)
    mine.flush()
    assert_is_step(mine, 4)


def test_failed_preparation_is_reported_by_the_save_that_needs_it(
    rank: Callable[..., RankCheckpoints],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = rank()
    mine.prepare(mine.header(Point(3, 1), 0, 1), [("twice", torch.ones(1))] * 2, {}, {})
    with monkeypatch.context() as patch:
        patch.setattr(memory_buffer, "available_bytes", lambda: 100)
        mine.prepare(*point_of(mine, 3))
        until_prepared(mine)
        assert not caplog.records
        assert not list((tmp_path / "memory").rglob("[ab]"))
        save(mine, 4)
    assert "100 that are available" in caplog.text
    other = rank(async_save=False)
    other.prepare(*point_of(other, 3))
    assert other._saves._staging is None


def test_memory_for_one_slot_of_two_is_freed_and_not_requested_for_the_same_size(
    rank: Callable[..., RankCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    reserve = os.posix_fallocate

    def refuse_the_second(descriptor: int, offset: int, size: int) -> None:
        asked.append(size)
        if len(asked) == 2:
            raise OSError(28, "No space left on device")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", refuse_the_second)
    mine = rank()
    for step in (201, 202, 203, 204):
        save(mine, step)
        mine.flush()
    assert on_disk(mine) == {201, 202, 203, 204}
    assert len(asked) == 2
    assert not list((tmp_path / "memory").rglob("[ab]"))
    save(mine, 5)
    assert len(asked) == 3, "a smaller state may fit"
    mine.flush()
    assert_is_step(mine, 5)


# ---- recovery from memory


def test_memory_precedes_disk_and_is_verified(
    rank: Callable[..., RankCheckpoints], caplog: pytest.LogCaptureFixture
) -> None:
    mine = rank()
    for step in (1, 2, 3):
        save(mine, step)
    mine.release()
    for path in (mine.root / "0" / point_name(Point(3, 1))).iterdir():
        path.unlink()  # the disk never had it
    again = rank()
    assert again.held() == [Point(3, 1), Point(2, 1), Point(1, 1)]
    assert_is_step(again, 3)
    assert [record for record in caplog.records if "step 3" in record.message and "from memory" in record.message]
    assert again.load(Point(3, 1), to_send=True).tree == again.load(Point(3, 1)).tree
    caplog.clear()
    assert_is_step(again, 1)
    assert not [record for record in caplog.records if "from memory" in record.message]


def test_changed_byte_in_memory_is_found_and_the_disk_is_used(
    rank: Callable[..., RankCheckpoints], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = rank()
    for step in (1, 2):
        save(mine, step)
    mine.release()
    [newest] = points_in_memory(tmp_path / "memory", JOB, 0)[0]
    assert newest.data_offset is not None
    change_byte(newest.path, newest.data_offset + 200)
    again = rank()
    assert again.held() == [Point(2, 1), Point(1, 1)]
    assert [record for record in caplog.records if "ignored" in record.message and "chunk 0" in record.message]
    again.release()
    change_byte(newest.path, newest.data_offset + 200)
    again = rank()
    assert again.held() == [Point(2, 1), Point(1, 1)]
    caplog.clear()
    change_byte(newest.path, newest.data_offset + 200)
    assert_is_step(again, 2)
    assert [record for record in caplog.records if "ignored" in record.message and "chunk 0" in record.message]
    assert_is_step(again, 1)


def test_rejected_point_is_not_offered_from_memory_either(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank()
    for step in (1, 2):
        save(mine, step)
    assert Point(2, 1) in mine.held()
    mine.reject(Point(2, 1), "it cannot be loaded")
    assert mine.held() == [Point(1, 1)]


def test_abandoned_line_is_forgotten_in_memory_too(rank: Callable[..., RankCheckpoints], tmp_path: Path) -> None:
    mine = rank()
    for step in (10, 20):
        save(mine, step)
    until_old_ones_are_gone(mine)
    save(mine, 15, generation=2)
    until_old_ones_are_gone(mine)
    assert on_disk(mine) == {10, 15}
    assert {one.point for one in points_in_memory(tmp_path / "memory", JOB, 0)[0]} == {Point(15, 2)}


def test_predecessors_abandoned_points_are_forgotten_without_own_slots(
    rank: Callable[..., RankCheckpoints], tmp_path: Path
) -> None:
    mine = rank()
    for step in (10, 20):
        save(mine, step)
    mine.release()
    again = rank(async_save=False)
    assert again.held() == [Point(20, 1), Point(10, 1)]
    save(again, 15, generation=2)
    assert again.held() == [Point(15, 2), Point(10, 1)]


def test_finished_job_frees_its_memory(rank: Callable[..., RankCheckpoints], tmp_path: Path) -> None:
    mine = rank()
    for step in (1, 2):
        save(mine, step)
    assert list((tmp_path / "memory").rglob("a"))
    mine.discard_memory()
    assert on_disk(mine) == {1, 2}
    assert not list((tmp_path / "memory").rglob("[ab]"))
    assert mine.held() == [Point(2, 1), Point(1, 1)]


def test_release_finishes_the_save_in_progress(rank: Callable[..., RankCheckpoints]) -> None:
    mine = rank()
    save(mine, 1)
    mine.release()
    assert on_disk(mine) == {1}
    again = rank()
    save(again, 2)
    again.release()
    assert on_disk(again) == {1, 2}


def test_no_point_is_removed_after_it_was_offered(rank: Callable[..., RankCheckpoints]) -> None:
    """A save in progress, whose end removes the oldest point, ends before anything is offered."""
    mine = rank(keep_checkpoint_max=2)
    for step in (1, 2):
        assert save(mine, step, durable=True)
    assert save(mine, 3)
    assert mine.held() == [Point(3, 1), Point(2, 1)]
    mine.flush()
    assert on_disk(mine) == {3, 2}


def test_point_just_announced_to_the_others_stays(rank: Callable[..., RankCheckpoints]) -> None:
    """Step 6 could be announced only once the others had caught up; the save that needs room does not replace it."""
    held_by_all: list[Point | None] = [None]
    reports: list[list[Point]] = []
    mine = rank(keep_checkpoint_max=2, committed=lambda: held_by_all[0], report=reports.append)
    for step in range(1, 7):
        assert save(mine, step)
        until_old_ones_are_gone(mine)
    assert (on_disk(mine), reports[-1][-1]) == ({1, 2, 3, 4, 6}, Point(4, 1))
    held_by_all[0] = Point(3, 1)
    assert save(mine, 7)
    until_old_ones_are_gone(mine)
    assert on_disk(mine) == {3, 4, 6, 7}
    assert {point.step for point in reports[-1]} >= {3, 4, 6, 7}


def test_points_older_than_needed_are_not_read(rank: Callable[..., RankCheckpoints], tmp_path: Path) -> None:
    before = rank(async_save=False)
    for step in (1, 2, 3, 4):
        assert save(before, step)
    before.release()
    change_byte(tmp_path / "root" / "0" / point_name(Point(4, 1)) / "data.safetensors", -1)
    change_byte(tmp_path / "root" / "0" / point_name(Point(1, 1)) / "data.safetensors", -1)
    after = rank()
    assert after.held(Point(3, 1)) == [Point(3, 1)], "the newer one is damaged, older ones are not examined"
    assert after._rejected.keys() == {Point(4, 1)}
    after.reject(Point(3, 1), "it could not be loaded")
    assert after.held(Point(3, 1)) == [Point(2, 1)]
    assert after._rejected.keys() == {Point(4, 1), Point(3, 1), Point(1, 1)}


@pytest.mark.parametrize("looks", [True, False])
def test_points_of_an_earlier_process_stay_until_all_hold_something_newer(
    rank: Callable[..., RankCheckpoints], looks: bool
) -> None:
    """A restarted process saves before it learns which point all hold, and its slots hold what the disk has."""
    before = rank()
    for step in (1, 2):
        assert save(before, step)
    before.release()
    reported: list[Point] = []
    after = rank(committed=lambda: None, report=reported.extend)
    if looks:
        assert after.held() == [Point(2, 1), Point(1, 1)]
    for step in (3, 4, 5, 6, 7, 8, 9):
        assert save(after, step)
        until_old_ones_are_gone(after)
        assert on_disk(after) >= {1, 2}
    assert len(on_disk(after)) <= 2 + after.config.keep_checkpoint_max + 1


# ---- from an object store


@pytest.fixture
def afar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[[], RankCheckpoints], list[str]]]:
    """Return a factory of a rank's checkpoints in an object store, and the fetched data by point."""
    url, fetched = f"memory://{tmp_path}", list[str]()
    chunks = RemotePointStore._chunks

    def counted(place: RemotePointStore, name: str, manifest: Any) -> Iterator[tuple[int, bytes]]:
        fetched.append(name.split("/")[1].split(".")[0])
        return chunks(place, name, manifest)

    monkeypatch.setattr(RemotePointStore, "_chunks", counted)
    made: list[RankCheckpoints] = []

    def make() -> RankCheckpoints:
        folders = {"local_state": tmp_path / "local", "memory": tmp_path}
        config = CheckpointConfig(async_save=False)
        made.append(RankCheckpoints(config, url, job=JOB, job_name="j", slot=0, node="0", **folders))
        return made[-1]

    before = make()
    for step in (1, 2):
        assert save(before, step)
    before.release()
    fetched.clear()
    yield make, fetched
    for one in made:
        one.release()


def test_data_fetched_for_verification_is_not_fetched_again(
    afar: tuple[Callable[[], RankCheckpoints], list[str]],
) -> None:
    make, fetched = afar
    mine = make()
    assert mine.held(Point(2, 1)) == [Point(2, 1)]
    sent = mine.load(Point(2, 1), to_send=True)
    assert snapshot.join(sent.tree, sent.tensors)["step"] == 2
    assert_is_step(mine, 2)
    assert len(fetched) == 1
    assert_is_step(mine, 2)  # the first load may have changed it since
    assert len(fetched) == 2


def test_fetched_data_is_released_when_a_generation_starts_without_it(
    afar: tuple[Callable[[], RankCheckpoints], list[str]],
) -> None:
    make, fetched = afar
    mine = make()
    assert mine.held() == [Point(2, 1), Point(1, 1)]
    assert_is_step(mine, 1)
    mine.exchange_copies(None)
    assert mine._fetched is None
    assert_is_step(mine, 2)
    assert len(fetched) == 4


def test_nothing_is_cached_if_memory_is_short(
    afar: tuple[Callable[[], RankCheckpoints], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, fetched = afar
    monkeypatch.setattr(rank_checkpoints, "available_bytes", lambda: 1000)
    mine = make()
    assert mine.held(Point(2, 1)) == [Point(2, 1)]
    assert_is_step(mine, 2)
    assert len(fetched) == 2


def test_erased_memory_sends_the_point_to_disk_and_later_ones_to_new_memory(
    rank: Callable[..., RankCheckpoints], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = rank()
    for step in (1, 2):  # both slots are mapped
        assert save(saving, step)
        saving.flush()
    shutil.rmtree(tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    assert save(saving, 3)
    assert not saving._saves.is_busy and saving.has_on_disk(Point(3, 1)), "training waited for the disk"
    assert "was removed while in use" in caplog.text
    assert save(saving, 4)
    assert saving._saves.is_busy, "copied in the background again"
    saving.flush()
    assert "checkpoints are copied aside again" in caplog.text
    assert_is_step(saving, 4)


def test_age_of_the_oldest_point_is_never_overestimated(
    rank: Callable[..., RankCheckpoints], afar: tuple[Callable[[], RankCheckpoints], list[str]]
) -> None:
    here = rank(async_save=False)
    assert here.oldest_step() == 0
    for step in (3, 4):
        assert save(here, step)
    assert here.oldest_step() == 3
    make, _ = afar
    there = make()  # with two from a predecessor
    assert there.oldest_step() == 0
    for step in range(3, 20):
        assert save(there, step)
        there._hear_of_pruning(wait=True)
        assert there.oldest_step() <= min(found.point.step for found in there._place.scan())
    assert there.oldest_step() > 3


# ---- refused saves


def free_descriptors() -> int:
    """Return the number that the next descriptor in this process may get."""
    number = os.dup(0)
    os.close(number)
    return number


@pytest.mark.parametrize("is_async", [True, False], ids=["copied aside", "at once"])
def test_save_without_descriptors_is_skipped_without_an_error(
    rank: Callable[..., RankCheckpoints], caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    """Starting from none, one more is free each time, until a save succeeds."""
    checkpoints = rank(async_save=is_async)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = 0
    try:
        for left in range(40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free_descriptors() + left, hard))
            is_saved = save(checkpoints, left + 1)
            checkpoints.flush()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if is_saved and checkpoints.has_on_disk(Point(left + 1, 1)):
                break
            refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 0 < refused < 40 and checkpoints.held() == [Point(refused + 1, 1)]
    said = [one.message for one in caplog.records if "was not saved" in one.message]
    assert len(said) == refused.bit_length(), "the first, the second, the fourth, and so on"
    assert "Fix: raise the limit of open files" in said[0] and "training continues" in said[0]


def test_full_disk_prevents_neither_the_start_nor_the_steps(
    tmp_path: Path, rank: Callable[..., RankCheckpoints]
) -> None:
    """Each file that the disk may refuse is tried, from the folder's own on: one call fails, then the next."""
    for fail_at in itertools.count():
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
        disk = Disk(fail_at=fail_at, failure=NO_SPACE)
        with interposed(disk, tmp_path / "root"):
            checkpoints = rank(async_save=False)
            is_saved = save(checkpoints, 1)
        assert is_saved or (checkpoints.refused_by is not None and checkpoints.refused_by.may_pass)
        checkpoints.release()
        if fail_at >= disk.matching:
            break
        assert save(checkpoints, 2), "there is room again"
        assert checkpoints.held()[0] == Point(2, 1)
        checkpoints.release()
    assert fail_at > 5 and is_saved


# ---- foreign files


def test_forged_point_is_skipped_or_refused_in_a_sentence(rank: Callable[..., RankCheckpoints]) -> None:
    """A recovery reads each of them and accepts none."""
    mine, endings = rank(async_save=False), Counter[str]()
    tree, tensors = snapshot.take_apart({**STATE, "shared": {"steps": 10, "values": {"w": torch.ones(3)}}}, "state")
    assert mine.save(mine.header(Point(10, 1), 0, 1), tensors, tree, {})
    found = find(mine.root, 10, job=JOB)
    whole = fields_of(found)
    for name, change in changes(whole):
        fields = copy.deepcopy(whole)
        change(fields)
        try:
            forge(found, fields)
        except CheckpointError:
            continue  # no such manifest can be written
        fresh = rank(async_save=False)
        if fresh.held() != [Point(10, 1)]:
            endings["passed over"] += 1
            continue
        try:
            read = fresh.load(Point(10, 1))
            snapshot.state_in(read.tree, read.tensors)
            endings["taken"] += 1
        except CheckpointError:
            endings["refused"] += 1
        except Exception as error:
            pytest.fail(f"{name}: {error!r}")
    assert endings["passed over"] > 50 and endings["refused"] > 50, endings


@pytest.mark.parametrize("is_async", [False, True])
def test_final_state_is_stored_beside_its_commits_point_if_it_differs(
    rank: Callable[..., RankCheckpoints], is_async: bool
) -> None:
    saved = rank(async_save=is_async)
    save(saved, 5)
    assert saved.has_on_disk(Point(5, 1))
    header, tensors, tree, layout = point_of(saved, 5)
    beside = Path(saved.root, ".final")
    assert saved.save_final(header, tensors, tree, layout)
    assert not beside.exists()
    assert saved.save_final(header, tensors, {**tree, "epoch": 1}, layout)
    final = find(beside, 5, job=JOB)
    assert final.require_manifest().tree == {**tree, "epoch": 1}
    verify(final)
    assert final.data_file.stat().st_nlink == 2, "the tensors are the point's"
    assert_is_step(saved, 5)


def test_final_state_with_other_tensors_is_written_completely(
    rank: Callable[..., RankCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = rank(async_save=False)
    save(saved, 5)
    header, tensors, tree, layout = point_of(saved, 5)
    _, others, _, _ = point_of(saved, 6)
    assert saved.save_final(header, others, tree, layout)
    beside = Path(saved.root, ".final")
    final = find(beside, 5, job=JOB)
    verify(final)
    assert final.require_manifest().chunks != find(Path(saved.root), 5, job=JOB).require_manifest().chunks

    def has_no_links(*_: object) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", has_no_links)
    shutil.rmtree(beside)
    assert saved.save_final(header, tensors, {**tree, "epoch": 1}, layout)
    final = find(beside, 5, job=JOB)
    verify(final)
    assert final.data_file.stat().st_nlink == 1
