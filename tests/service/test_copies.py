"""Copies between the companions of two writers: what arrives, what is reported, and that they block nothing."""

from __future__ import annotations

import os
import queue
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from samebits.core.point import Point
from samebits.core.values import replace
from samebits.errors import LockedError
from samebits.net.copies import BuddyAddress, BytesReceived, Declined, PointOffer, SenderSocket, StreamChunk
from samebits.net.curve import derive_keys
from samebits.service.copies import sender
from samebits.service.copies.buddy import Brief, CopyListener, brief_of
from samebits.service.copies.copying_writer import Copies
from samebits.store.checkpoint import MemoryRoom, memory_buffer, points_in_memory, verify
from samebits.store.checkpoint.memory_room import RoomKind
from samebits.store.process_identity import ProcessIdentity
from tests.store.points import JOB
from tests.store.slots import fill, fill_and_hash, hash_slot

WAIT_S = 30.0
LARGE = 40_000_000  # many windows
Report = tuple[str, int, str]


class End:
    """One host with the companion of one rank's writer."""

    def __init__(self, base: Path, slot: int = 0, listener: CopyListener | None = None) -> None:
        base.mkdir()
        self.base = base
        self.room = MemoryRoom(base, JOB, slot)
        self.listener = listener or CopyListener("127.0.0.1")
        self.told: queue.Queue[Report] = queue.Queue()
        self.copies = Copies(
            self.room.path,
            self.room.descriptor,
            base / "disk",
            os.dup(self.listener.descriptor),
            ProcessIdentity.current(),
            lambda *words: self.told.put(words),
        )

    def brief(
        self, keeper: BuddyAddress | str = "", *, keeps: tuple[int, ...] = (), secret: bytes | None = None
    ) -> None:
        keys = None if secret is None else derive_keys(secret)
        ticket = self.listener.keeper.ticket
        self.copies.brief(brief_of(keys, str(self.base), JOB, str(keeper), "rank 1", keeps, ticket).pack())

    def save(self, step: int, *, count: int = 1000) -> None:
        name = fill(self.room, step, count=count, chunk_bytes=max(100, count // 10))
        hash_slot(self.room, name)
        self.copies.hashed(name, self.room.sequence)

    def heard(self) -> Report:
        return self.told.get(timeout=WAIT_S)

    def kept(self, slot: int = 0) -> list[int]:
        found, problems = points_in_memory(self.base, JOB, slot, kind=RoomKind.COPIED)
        assert problems == []
        for one in found:
            verify(one)
        return [one.point.step for one in found]

    def close(self) -> None:
        self.copies.close()
        self.room.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Callable[[str], End]]:
    """Return a factory of hosts."""
    made: list[End] = []

    def make(name: str, slot: int = 0) -> End:
        made.append(End(tmp_path / name, slot))
        return made[-1]

    yield make
    for end in made:
        end.close()


@pytest.fixture
def pair(ends: Callable[..., End]) -> tuple[End, End]:
    """Return a rank and its buddy on another host, each informed of the other."""
    rank, buddy = ends("here"), ends("there", 1)
    buddy.brief(keeps=(0,))
    rank.brief(buddy.listener.keeper)
    return rank, buddy


def until_free(buddy: End, slot: int) -> None:
    """Wait until no process has the room of that slot's copies, since the keeper reacts in its own thread."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            MemoryRoom(buddy.base, JOB, slot, kind=RoomKind.COPIED).close()
        except LockedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


@pytest.mark.parametrize("count", [0, 1000, LARGE])
def test_hashed_point_is_copied(pair: tuple[End, End], count: int) -> None:
    rank, buddy = pair
    rank.save(1, count=count)
    assert rank.heard() == ("copied", 1, "")
    assert buddy.kept() == [1]
    rank.save(2, count=count)
    assert rank.heard() == ("copied", 2, "")
    assert buddy.kept() == [2, 1]


def test_point_hashed_before_there_was_a_buddy_is_copied_later(ends: Callable[..., End]) -> None:
    rank, buddy = ends("here"), ends("there", 1)
    fill_and_hash(rank.room, 1)  # by an earlier process
    buddy.brief(keeps=(0,))
    rank.brief(buddy.listener.keeper)
    assert rank.heard() == ("copied", 1, "")
    assert buddy.kept() == [1]


def test_new_buddy_gets_the_newest_point_at_once(pair: tuple[End, End], ends: Callable[..., End]) -> None:
    rank, _ = pair
    rank.save(1)
    rank.heard()
    other = ends("elsewhere", 2)
    other.brief(keeps=(0,))
    rank.brief(other.listener.keeper)
    assert rank.heard() == ("copied", 1, "")
    assert other.kept() == [1]


def test_buddy_may_be_informed_later(ends: Callable[..., End]) -> None:
    rank, buddy = ends("here"), ends("there", 1)
    buddy.brief(keeps=(7,))
    rank.brief(buddy.listener.keeper)
    rank.save(1)
    with pytest.raises(queue.Empty):
        rank.told.get(timeout=0.1)
    buddy.brief(keeps=(0,))
    assert rank.heard() == ("copied", 1, "")


def test_keeper_that_stops_leaves_its_copies_to_another_process_of_its_host(
    pair: tuple[End, End],
) -> None:
    rank, buddy = pair
    rank.save(1)
    rank.heard()
    buddy.brief(keeps=())
    until_free(buddy, 0)
    rank.save(2)
    with pytest.raises(queue.Empty):
        rank.told.get(timeout=0.1)
    assert buddy.kept() == [1], "existing copies stay"


def test_keeper_without_memory_says_so_and_the_next_one_is_tried(
    pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, buddy = pair
    with monkeypatch.context() as short:
        name = fill_and_hash(rank.room, 1)
        short.setattr(memory_buffer, "available_bytes", lambda: 1000)
        rank.copies.hashed(name, rank.room.sequence)
        what, sequence, text = rank.heard()
    assert (what, sequence) == ("uncopied", 1)
    assert text.startswith("rank 1: ") and "1000 that are available" in text
    rank.save(2)
    assert rank.heard() == ("copied", 2, "")
    assert buddy.kept() == [2]


def test_unresponsive_keeper_is_given_up_for_this_point(
    ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "SILENT_S", 0.2)
    rank = ends("here")
    nobody = CopyListener("127.0.0.1")
    rank.brief(nobody.keeper)
    rank.save(1)
    assert rank.heard() == ("uncopied", 1, "rank 1 has not answered for 0.2 s")
    nobody.close()


def test_keeper_that_starts_late_is_offered_the_same_point_again(
    tmp_path: Path, ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "SILENT_S", 0.2)
    monkeypatch.setattr(sender, "LATER_S", 0.2)
    rank, listener = ends("here"), CopyListener("127.0.0.1")
    rank.brief(listener.keeper)
    rank.save(1)
    assert rank.heard()[0] == "uncopied"
    buddy = End(tmp_path / "there", 1, listener)
    buddy.brief(keeps=(0,))
    while (heard := rank.heard())[0] == "uncopied":
        assert heard[1] == 1
    assert heard == ("copied", 1, "")
    assert buddy.kept() == [1]
    buddy.close()


def test_keeper_that_dies_midway_is_given_up_and_the_next_copy_is_complete(
    pair: tuple[End, End], ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, buddy = pair
    rank.save(1)
    rank.heard()
    with monkeypatch.context() as short:
        short.setattr(sender, "SILENT_S", 0.3)
        buddy.copies.close()
        rank.save(2, count=LARGE)
        assert rank.heard()[0] == "uncopied"
    other = ends("elsewhere", 2)
    other.brief(keeps=(0,))
    rank.brief(other.listener.keeper)
    assert rank.heard() == ("copied", 2, "")
    assert buddy.kept() == [1]


@pytest.mark.parametrize(
    ("ours", "theirs", "is_copied"),
    [
        (b"sixteen bytes and more", b"sixteen bytes and more", True),
        (b"sixteen bytes and more", b"another sixteen bytes!", False),
        (None, b"sixteen bytes and more", False),
        (b"sixteen bytes and more", None, False),
    ],
)
def test_only_peers_with_the_secret_are_heard(
    ends: Callable[..., End],
    monkeypatch: pytest.MonkeyPatch,
    ours: bytes | None,
    theirs: bytes | None,
    is_copied: bool,
) -> None:
    monkeypatch.setattr(sender, "SILENT_S", WAIT_S if is_copied else 0.5)
    rank, buddy = ends("here"), ends("there", 1)
    buddy.brief(keeps=(0,), secret=theirs)
    rank.brief(buddy.listener.keeper, secret=ours)
    rank.save(1, count=LARGE)
    assert (rank.heard()[0] == "copied") is is_copied
    assert buddy.kept() == ([1] if is_copied else [])


def test_points_of_another_job_are_refused(ends: Callable[..., End]) -> None:
    rank, buddy = ends("here"), ends("there", 1)
    buddy.copies.brief(Brief(str(buddy.base), "another", "", "", (0,), buddy.listener.keeper.ticket).pack())
    rank.brief(buddy.listener.keeper)
    rank.save(1)
    what, _, text = rank.heard()
    assert what == "uncopied"
    assert "it keeps copies of job another" in text


def test_copy_over_ipv6(tmp_path: Path) -> None:
    try:
        listener = CopyListener("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    rank, buddy = End(tmp_path / "here"), End(tmp_path / "there", 1, listener)
    buddy.brief(keeps=(0,))
    rank.brief(buddy.listener.keeper)
    rank.save(1)
    assert rank.heard() == ("copied", 1, "")
    assert rank.room.points()[0].point == Point(1, 1)
    rank.close()
    buddy.close()


def test_keeper_whose_memory_was_emptied_accepts_the_next_copy(pair: tuple[End, End]) -> None:
    rank, buddy = pair
    for step in (1, 2):
        rank.save(step)
        assert rank.heard() == ("copied", step, "")
    shutil.rmtree(buddy.base)
    buddy.base.mkdir()
    rank.save(3)
    kind, sequence, problem = rank.heard()
    assert (kind, sequence) == ("uncopied", 3) and "was removed while in use" in problem
    rank.save(4)
    assert rank.heard() == ("copied", 4, "")
    assert buddy.kept() == [4]


# ---- strangers


@pytest.fixture
def stranger(pair: tuple[End, End]) -> Iterator[SenderSocket]:
    """A peer that can reach the buddy's port and knows the protocol."""
    context: zmq.Context[Any] = zmq.Context()
    yield SenderSocket(context, pair[1].listener.keeper.endpoint, None)
    context.destroy(linger=0)


def answer_to(stranger: SenderSocket, offer: PointOffer) -> object:
    stranger.send(offer)
    assert stranger.socket.poll(WAIT_S * 1000)
    (answer,) = stranger.drain()
    return answer


LIES: list[dict[str, object]] = [
    {"point": Point(0, 2**40)},  # after which every copy would belong to an abandoned line
    {"point": Point(-1, 1)},
    {"point": Point(1, -(2**63))},
    {"slot": 2**62},
    {"slot": -1},
    {"job": "x" * 5000},
    {"digest": b""},
    {"manifest_bytes": -1},
    {"manifest_bytes": 2**63 - 1},
    {"data_bytes": 2**63 - 1},
    {"data_bytes": -1},
    {"transfer": -(2**63)},
]


@pytest.mark.parametrize("knows_the_ticket", [False, True], ids=["stranger", "member"])
def test_false_offer_costs_no_copy_and_no_transfer(
    pair: tuple[End, End], stranger: SenderSocket, knows_the_ticket: bool
) -> None:
    rank, buddy = pair
    for step in (1, 2):
        rank.save(step)
        assert rank.heard() == ("copied", step, "")
    ticket = buddy.listener.keeper.ticket if knows_the_ticket else b"t" * 16
    good = PointOffer(ticket, 1, JOB, 0, Point(3, 1), b"d" * 16, 100, 1000)
    for lie in LIES:
        answer = answer_to(stranger, replace(good, **lie))  # type: ignore[arg-type]
        assert isinstance(answer, Declined) or (knows_the_ticket and isinstance(answer, BytesReceived)), lie
        assert buddy.kept() == [2, 1]
    answer = answer_to(stranger, good)
    assert isinstance(answer, BytesReceived if knows_the_ticket else Declined)
    assert stranger.send_piece(StreamChunk(1, 0), b"no manifest".ljust(100))
    rank.save(3)
    assert rank.heard() == ("copied", 3, "")
    assert buddy.kept() == [3, 2]


def test_ticket_is_in_no_repr_and_in_no_other_process(ends: Callable[..., End]) -> None:
    one, other = ends("here").listener.keeper, ends("there", 1).listener.keeper
    assert one.ticket != other.ticket
    assert one.ticket.hex() not in repr(one)
