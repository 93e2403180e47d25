"""Two ranks that keep each other's newest points: the effect on training, and what is offered afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from samebits.core.messages import Copy
from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.service.copies.buddy import CopyListener, brief_of
from samebits.service.log import LOGGER
from samebits.store.checkpoint import MemoryRoom, copied_slots, points_in_memory
from samebits.store.checkpoint.memory_room import RoomKind
from samebits.training.checkpoint import rank_checkpoints
from samebits.training.checkpoint.kept_copies import KeptCopies
from samebits.training.checkpoint.rank_checkpoints import RankCheckpoints
from samebits.training.state import snapshot
from samebits.training.state.checkpoint_config import CheckpointConfig
from tests.store.points import JOB, change_byte
from tests.store.slots import fill_and_hash

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    LOGGER.setLevel(logging.INFO)


@dataclass
class Rank:
    """One rank on its own host."""

    host: Path
    slot: int
    listener: CopyListener
    checkpoints: RankCheckpoints

    @property
    def memory(self) -> Path:
        return self.host / "memory"

    def save(self, step: int, elements: int = 1000) -> None:
        tree, tensors = snapshot.take_apart({"weight": torch.full((elements,), float(step))}, "state")
        header = self.checkpoints.header(Point(step, 1), self.slot, 2)
        assert self.checkpoints.save(header, tensors, tree, {})

    def exchange(self, other: Rank | None) -> None:
        keeper, keeps = ("", ()) if other is None else (str(other.listener.keeper), (other.slot,))
        self.checkpoints.exchange_copies(
            brief_of(None, str(self.memory), JOB, keeper, f"rank {1 - self.slot}", keeps, self.listener.keeper.ticket)
        )

    def writer(self) -> int:
        pid = self.checkpoints._saves._writer.pid  # type: ignore[union-attr]
        assert pid is not None
        return pid

    def kept(self) -> list[int]:
        found, _ = points_in_memory(self.memory, JOB, 1 - self.slot, kind=RoomKind.COPIED)
        return [one.point.step for one in found]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[Rank, Rank]]:
    made = []
    for slot in (0, 1):
        host = tmp_path / f"host{slot}"
        (host / "memory").mkdir(parents=True)
        listener = CopyListener("127.0.0.1")
        checkpoints = RankCheckpoints(
            CheckpointConfig(),
            host / "disk",
            job=JOB,
            job_name="j",
            slot=slot,
            node=str(slot),
            memory=host / "memory",
            listener=listener,
        )
        made.append(Rank(host, slot, listener, checkpoints))
    yield made[0], made[1]
    for one in made:
        one.checkpoints.release()
        one.listener.close()


def wait_until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspend a process, which could not end otherwise, for this block only."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def exchanged(ranks: tuple[Rank, Rank], *steps: int) -> None:
    """Let both ranks save these points and keep each other's."""
    ranks[0].exchange(ranks[1])
    ranks[1].exchange(ranks[0])
    for step in steps:
        for one in ranks:
            one.save(step)
            one.checkpoints.flush()
        wait_until(lambda step=step: all(step in one.kept() for one in ranks))  # type: ignore[misc]


def test_each_rank_keeps_the_others_two_newest(ranks: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture) -> None:
    exchanged(ranks, 1, 2, 3)
    assert [one.kept() for one in ranks] == [[3, 2], [3, 2]]
    copies = KeptCopies(JOB, memory=ranks[1].memory)
    copies.begin(1, (0,))
    assert copies.look() == [Copy(0, Point(2, 1)), Copy(0, Point(3, 1))]
    found = copies.read(Copy(0, Point(3, 1)))
    assert torch.equal(snapshot.join(found.tree, found.tensors)["weight"], torch.full((1000,), 3.0))
    assert copies.read(Copy(0, Point(2, 1))).header.slot == 0
    assert not caplog.records


def test_copies_start_once_there_is_a_buddy(ranks: tuple[Rank, Rank]) -> None:
    for one in ranks:
        one.save(1)
        one.checkpoints.flush()
    assert copied_slots(ranks[0].memory, JOB) == copied_slots(ranks[1].memory, JOB) == []
    exchanged(ranks, 2)
    ranks[0].checkpoints.exchange_copies(None)
    ranks[0].save(3)
    ranks[0].checkpoints.flush()
    assert ranks[1].kept()[0] == 2  # and 1, if it was sent before the next one was there


def test_rank_accepts_copies_from_its_first_commit_on(ranks: tuple[Rank, Rank]) -> None:
    """A rank that lost its buddy sends the newest point at once, perhaps before the receiver's own first save."""
    exchanged(ranks, 1)
    ranks[1].checkpoints.release()
    newcomer = RankCheckpoints(
        CheckpointConfig(),
        ranks[1].host / "disk",
        job=JOB,
        job_name="j",
        slot=1,
        node="9",
        memory=ranks[1].host / "elsewhere",
        listener=CopyListener("127.0.0.1"),
    )
    (ranks[1].host / "elsewhere").mkdir()
    third = Rank(ranks[1].host, 1, newcomer._saves._listener, newcomer)  # type: ignore[arg-type]
    newcomer.exchange_copies(
        brief_of(None, str(ranks[1].host / "elsewhere"), JOB, "", "", (0,), third.listener.keeper.ticket)
    )
    newcomer.settle()
    ranks[0].exchange(third)
    wait_until(lambda: points_in_memory(ranks[1].host / "elsewhere", JOB, 0, kind=RoomKind.COPIED)[0] != [])
    newcomer.release()


def test_stalled_buddy_delays_no_save_and_is_reported_once(
    ranks: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture
) -> None:
    exchanged(ranks, 1)
    with suspended(ranks[1].writer()):
        for step in range(2, 6):
            ranks[0].save(step, 200_000)
            ranks[0].checkpoints.flush()
            assert ranks[0].checkpoints.has_on_disk(Point(step, 1))
        caplog.clear()

        def is_said() -> bool:
            ranks[0].checkpoints.settle()
            return bool(caplog.messages)

        wait_until(is_said)
        (said,) = caplog.messages
        assert said.startswith(
            "the newest checkpoint has no copy at this rank's buddy: rank 1 has not answered for 10 s"
        )
        assert "buddy_copies=False" in said
    ranks[0].save(6)
    wait_until(lambda: 6 in ranks[1].kept())

    def is_mended() -> bool:
        ranks[0].checkpoints.settle()
        return len(caplog.messages) > 1

    wait_until(is_mended)
    assert caplog.messages[1:] == ["checkpoints are copied to this rank's buddy again"]


def test_point_is_handed_over_once_the_buddy_has_all_of_it(ranks: tuple[Rank, Rank]) -> None:
    exchanged(ranks, 1)
    with ThreadPoolExecutor() as pool, suspended(ranks[1].writer()):
        ranks[0].save(2, 200_000)
        ranks[0].checkpoints.flush()
        handing_over = pool.submit(ranks[0].checkpoints.hand_over, Point(2, 1))
    assert handing_over.result(WAIT_S) == ""
    assert 2 in ranks[1].kept()
    assert ranks[0].checkpoints.hand_over(Point(2, 1)) == ""


def test_process_does_not_leave_its_point_to_nobody(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_checkpoints, "HAND_OVER_S", 0.2)
    assert ranks[0].checkpoints.hand_over(Point(1, 1)) == "no copies are sent"
    exchanged(ranks, 1)
    assert ranks[0].checkpoints.hand_over(Point(2, 1)) == "it was not copied to memory first"
    with suspended(ranks[1].writer()):
        ranks[0].save(2)
        ranks[0].checkpoints.flush()
        assert ranks[0].checkpoints.hand_over(Point(2, 1)) == "no confirmation within 0.2 s"


def test_killed_writer_is_replaced_by_one_that_copies(ranks: tuple[Rank, Rank]) -> None:
    exchanged(ranks, 1)
    for one in ranks:
        os.kill(one.writer(), signal.SIGKILL)
    for step in (2, 3):
        for one in ranks:
            one.save(step)
            one.checkpoints.flush()
    wait_until(lambda: all(3 in one.kept() for one in ranks))


# ---- offers


def kept_on(memory: Path, *steps: int, slot: int = 0) -> list[Path]:
    """Store copies as if a keeper, now gone, had accepted them; return the slots' paths."""
    room = MemoryRoom(memory, JOB, slot, kind=RoomKind.COPIED)
    names = [fill_and_hash(room, step) for step in steps]
    room.close()
    return [room.path / name for name in names]


def test_each_copy_is_offered_by_one_process_of_the_host(tmp_path: Path) -> None:
    kept_on(tmp_path, 1, 2)
    first, second = KeptCopies(JOB, memory=tmp_path), KeptCopies(JOB, memory=tmp_path)
    assert first.look() == [Copy(0, Point(1, 1)), Copy(0, Point(2, 1))]
    assert first.look() == first.look()
    assert second.look() == []
    first.begin(1, ())
    assert second.look() != []
    second.let_go()


def test_damaged_copy_is_skipped_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, newest = kept_on(tmp_path, 1, 2)
    copies = KeptCopies(JOB, memory=tmp_path)
    change_byte(newest, newest.stat().st_size - 4096 + 200)
    for _ in range(2):
        assert copies.look() == [Copy(0, Point(1, 1))]
    (said,) = caplog.messages
    assert said.startswith("ignored a copy of another rank's restore point: ")
    assert str(newest) in said
    copies.let_go()


def test_copy_damaged_after_it_was_offered_is_not_offered_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = kept_on(tmp_path, 1)
    copies, copy = KeptCopies(JOB, memory=tmp_path), Copy(0, Point(1, 1))
    assert copies.look() == [copy]
    change_byte(path, path.stat().st_size - 4096 + 200)
    with pytest.raises(CheckpointError, match="is not what was saved"), copies.rejecting(copy):
        copies.read(copy)
    assert copies.look() == []
    assert len(caplog.messages) == 1
    with pytest.raises(CheckpointError, match="is gone"):
        copies.read(copy)
    copies.let_go()


def test_old_unowned_copies_are_removed_after_the_second_common_point(tmp_path: Path) -> None:
    for slot in (0, 1):
        kept_on(tmp_path, 1, slot=slot)
    copies = KeptCopies(JOB, memory=tmp_path)
    copies.begin(2, (1,))
    for point in (None, Point(9, 1), Point(10, 2), Point(10, 2)):
        copies.saved_by_all(point)
    assert copied_slots(tmp_path, JOB) == [0, 1]
    copies.saved_by_all(Point(20, 2))
    assert copied_slots(tmp_path, JOB) == [1], "that one is kept here"
    copies.discard()
    assert copied_slots(tmp_path, JOB) == []


def test_copies_of_a_live_process_stay(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0, kind=RoomKind.COPIED)
    fill_and_hash(room, 1)
    copies = KeptCopies(JOB, memory=tmp_path)
    assert copies.look() == []
    copies.discard()
    assert copied_slots(tmp_path, JOB) == [0]
    room.close()
