"""Copies of a shard's commits: which are made, which of them are left after a kill, and what they cost."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from samebits.core.messages import KeptCommit
from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.printable import counted
from samebits.store.checkpoint import PointHeader, rooms_of
from samebits.store.checkpoint.memory_room import RoomKind, room_path
from samebits.training.checkpoint import shard_copies, staging
from samebits.training.checkpoint.shard_copies import DECIDED_AT, CopySchedule, ShardCopies, ShardsAtRest
from tests.store.slots import locked_by_an_ending_process, on_first_sleep

JOB, SLOT = "a-job", 3


# ---- when


class Rank:
    """A rank whose steps take 0.1 s, and whose peers answer the same."""

    def __init__(self, every: int | str, cost_s: float) -> None:
        self.now, self.exchanges, self.cost_s = 0.0, 0, cost_s
        self.schedule = CopySchedule(every, self._gather, clock=lambda: self.now)

    def _gather(self, number: int) -> list[int]:
        self.exchanges += 1
        return [number, number]

    def copies(self, steps: Sequence[int]) -> list[int]:
        found = []
        for step in steps:
            self.now += 0.1
            if self.schedule.is_at(step):
                found.append(step)
                self.now += self.cost_s
                self.schedule.copied(step)
        return found


def test_every_third_commit_and_each_after_a_copied_step() -> None:
    one = CopySchedule(3, lambda number: [number])
    one.begins(4)
    found = []
    for step in (5, 6, 7, 7, 8, 9, 10, 14, 14, 15, 17):
        if one.is_at(step):
            found.append(step)
            one.copied(step)
    assert found == [7, 7, 10, 14, 14, 17]


def test_off_exchanges_nothing() -> None:
    def fail(number: int) -> list[int]:
        raise AssertionError("a collective")

    one = CopySchedule(0, fail)
    assert not any(one.is_at(step) for step in range(1, 3 * DECIDED_AT))


@pytest.mark.parametrize(("cost_s", "interval"), [(0.0005, 1), (0.0041, 5), (0.1995, 200), (50.0, 1000)])
def test_auto_copies_as_often_as_a_hundredth_of_the_time_allows(cost_s: float, interval: int) -> None:
    rank = Rank("auto", cost_s)
    assert rank.copies(range(1, DECIDED_AT))[:3] == [1, 2, 3]
    rank.copies([DECIDED_AT])
    assert (rank.schedule.interval, rank.exchanges) == (interval, 1)
    later = rank.copies(range(DECIDED_AT + 1, DECIDED_AT + 2 * interval + 1))
    assert len(later) == 2 and later[1] - later[0] == interval
    assert rank.exchanges == 1
    assert f"costs at most {counted(interval, 'step')}" in rank.schedule.text


def test_ranks_take_the_longest_interval_and_a_rank_without_room_turns_all_off() -> None:
    for answers, interval, refused in (([2, 7, 3], 7, ()), ([2, 0, 3], 0, (1,))):
        one = CopySchedule(2, lambda _, answers=answers: answers)  # type: ignore[misc]
        one.begins(0)
        for step in range(1, DECIDED_AT + 1):
            if one.is_at(step, fits=False):
                one.copied(step)
        assert (one.interval, one.refused_by) == (interval, refused)
        one.begins(DECIDED_AT)
        assert (one.interval, one.refused_by) == (2, ())


# ---- what is left


def commit(step: int, generation: int = 1, commits: int | None = None) -> tuple[PointHeader, object, object, object]:
    weights = torch.full((1000,), float(step * 10 + generation))
    tree = {"commits": step if commits is None else commits}
    return PointHeader(JOB, Point(step, generation), 4, 0, SLOT, "0"), [("weights", weights)], tree, {}


def copied(copies: ShardCopies, *commits: tuple[int, ...]) -> None:
    for one in commits:
        assert copies.copy(SLOT, *commit(*one), ranks_here=1)  # type: ignore[arg-type]


def successor(copies: ShardCopies, memory: Path) -> ShardCopies:
    """Return what a process finds after this one was killed: the kernel has ended its lock."""
    copies.close()
    return ShardCopies(JOB, memory=memory)


def test_the_last_two_commits_outlive_their_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies = ShardCopies(JOB, memory=tmp_path)
    copied(copies, (1,), (2,), (3,))
    assert ShardCopies(JOB, memory=tmp_path).offer(SLOT) == ()  # its process lives
    assert "the copies of commits of slot 3 are not used" in caplog.text
    after = successor(copies, tmp_path)
    assert after.offer(SLOT) == (KeptCommit(Point(3, 1), 3), KeptCommit(Point(2, 1), 2))
    for step in (2, 3):
        found = after.read(Point(step, 1))
        assert found.header.point == Point(step, 1)
        assert torch.frombuffer(found.tensors["weights"].data, dtype=torch.float32).eq(step * 10 + 1).all()
    copied(after, (4,))  # over the older one, though both are hashed now
    assert [one.point.step for one in after.offer(SLOT)] == [4, 3]
    after.discard()
    assert rooms_of(tmp_path, JOB) == []


def test_commits_of_an_ending_process_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = ShardCopies(JOB, memory=tmp_path)
    copied(copies, (1,))
    copies.close()
    with locked_by_an_ending_process(room_path(tmp_path, JOB, SLOT, kind=RoomKind.COMMITTED)) as holder:
        assert holder.stdin is not None
        on_first_sleep(monkeypatch, holder.stdin.close)
        assert ShardCopies(JOB, memory=tmp_path).offer(SLOT) == (KeptCommit(Point(1, 1), 1),)


def test_a_copy_that_was_being_made_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = ShardCopies(JOB, memory=tmp_path)
    copied(copies, (1,), (2,))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(staging, "copy", killed)
        copied(copies, (3,))
    assert successor(copies, tmp_path).offer(SLOT) == (KeptCommit(Point(2, 1), 2),)


def test_commits_of_an_abandoned_line_and_of_the_same_step_are_overwritten_first(tmp_path: Path) -> None:
    copies = ShardCopies(JOB, memory=tmp_path)
    copied(copies, (7,), (8,))
    copies.begins(Point(7, 2))
    assert copies.holds(Point(7, 1), 7) and not copies.holds(Point(7, 1), 6)
    copied(copies, (8, 2))
    assert [one.point for one in copies.offer(SLOT)] == [Point(8, 2), Point(7, 1)]
    copied(copies, (8, 2, 9))
    assert copies.offer(SLOT) == (KeptCommit(Point(8, 2), 9), KeptCommit(Point(7, 1), 7))
    copies.discard()


def test_a_damaged_copy_is_offered_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies = ShardCopies(JOB, memory=tmp_path)
    copied(copies, (1,), (2,))
    assert len(copies.offer(SLOT)) == 2
    copies.read(Point(2, 1))  # has its hashes from now on
    path = next(one.path for one in rooms_of(tmp_path, JOB)) / "b"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    at = data.rindex(torch.full((10,), 21.0).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        copies.read(Point(2, 1))
    assert [one.point.step for one in copies.offer(SLOT)] == [1]
    assert "ignored a copy of a commit" in caplog.text
    copies.discard()


def test_copies_that_do_not_fit_are_off_and_say_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_copies, "available_bytes", lambda: 64 * 2**20)
    copies = ShardCopies(JOB, memory=tmp_path)
    header, _, tree, layout = commit(1)
    weights = [("weights", torch.zeros(3 * 2**20 // 4))]
    assert copies.copy(SLOT, header, weights, tree, layout, ranks_here=2)  # type: ignore[arg-type]
    copies.discard()
    assert not copies.copy(SLOT, header, weights, tree, layout, ranks_here=3)  # type: ignore[arg-type]
    assert copies.is_off and rooms_of(tmp_path, JOB) == []
    said = caplog.text
    assert "2 copies of 3 MiB on 3 ranks of this host need 18 MiB" in said
    assert "16 MiB is the share of the available 64 MiB" in said and "SHARD_COPY_EVERY=off" in said


# ---- shards between a commit and the next step


def test_bits_that_no_operator_has_changed_are_noticed_once() -> None:
    shards = {name: torch.ones(3, dtype=torch.bfloat16) for name in ("weight", "exp_avg of weight", "bias")}
    at_rest = ShardsAtRest()
    at_rest.committed(shards)
    assert at_rest.changed(shards) == ""
    at_rest.committed(shards)
    shards["weight"].mul_(2)  # the script's own change
    ctypes.c_uint16.from_address(shards["bias"].data_ptr() + 4).value ^= 1
    assert at_rest.changed(shards) == "bias"
    assert at_rest.changed(shards) == "", "an optimizer has stepped since"
    at_rest.committed(shards)
    ctypes.c_uint16.from_address(shards["bias"].data_ptr()).value ^= 1
    assert at_rest.changed({}) == "", "the script may have written to the shards"
