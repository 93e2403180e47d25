"""The ring of launched collectives, read by another process: ordered, bounded, one generation, robust."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from samebits.store.collective_ring import (
    _PLACES_AT,
    _SIZE,
    DTYPES,
    MOST_GROUPS,
    MOST_PLACES,
    NOBODY,
    OPS,
    OTHER_DTYPE,
    RECORDS,
    CollectiveRing,
    LaunchLine,
    RecordedCollectives,
    contents_of,
    read,
)
from samebits.store.process_identity import ProcessIdentity

FLOAT32 = DTYPES.index("float32")
WORLD = "0", "default_pg", range(3)


class Ring:
    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _SIZE)
        self.ring = CollectiveRing(self.memory)
        self.ring.begin(1, 3)
        self.world = self.ring.add_group(*WORLD)
        self.sequence = 0

    def launch(self, *shape: int, op: str = "all_reduce") -> int:
        self.sequence += 1
        assert self.world is not None
        return self.ring.launch(self.world, self.sequence, OPS.index(op), shape, FLOAT32, shape, FLOAT32)

    @property
    def contents(self) -> RecordedCollectives:
        found = contents_of(bytes(self.memory))
        assert found is not None
        return found


@pytest.fixture
def ring() -> Ring:
    return Ring()


def test_records_are_read_in_order_and_the_last_is_in_flight(ring: Ring) -> None:
    ring.ring.end(ring.launch(25_000))
    ring.launch(2, 3, 4, 5, 6, op="broadcast")
    ring.launch(op="barrier")
    first, second, third = ring.contents.launched
    assert (first.number, first.sequence, first.group.ranks) == (0, 1, (0, 1, 2))
    assert str(first) == "all_reduce #1 (float32, 25000), over"
    assert first.over_ns is not None and first.over_ns >= first.launched_ns
    assert second.input_shape == (2, 3, 4, 30) and second.over_ns is None
    assert str(third) == "barrier #3 (float32, one number), in flight"
    assert (ring.contents.rank, ring.contents.world_size) == (1, 3)


def test_send_and_receive_name_the_peer_and_the_line(ring: Ring) -> None:
    def line(number: int) -> int:
        frame = sys._getframe()
        return (ring.ring.place_of(frame), ring.ring.place_of(frame))[number]  # the same frame at another instruction

    group, send, recv = ring.world or 0, OPS.index("send"), OPS.index("recv")
    place = line(0)
    assert place == 1 and line(1) == 2 and line(0) == place
    shape = ((8,), FLOAT32, (8,), FLOAT32)
    ring.ring.launch(group, 1, send, *shape, 2, place)
    from_anybody = ring.ring.launch(group, 0, recv, *shape)
    found = ring.contents.launched
    where = f"test_store_collective_ring.py:{line.__code__.co_firstlineno + 2}"
    assert str(found[0]) == f"send to rank 2 #1 (float32, 8) at {where}, in flight"
    assert found[0].place is not None and (found[0].place.file, found[0].place.function) == (__file__, "line")
    assert str(found[1]) == "recv from anybody (float32, 8), in flight" and found[1].place is None
    ring.ring.name_sender(from_anybody, 0, 1)
    ring.ring.end(from_anybody)
    assert str(ring.contents.launched[1]) == "recv from rank 0 #1 (float32, 8), over"


def test_number_of_lines_is_bounded_and_a_generation_keeps_them(ring: Ring) -> None:
    places: list[int] = []
    for number in range(MOST_PLACES + 3):
        name = "x" * 600 if number == 7 else f"/job/{number}.py"
        exec(compile("places.append(of(frame()))", name, "exec"), {"of": ring.ring.place_of, **SEES, "places": places})
    assert places[:8] == [1, 2, 3, 4, 5, 6, 7, 0] and places[-3:] == [0, 0, 0] and max(places) == MOST_PLACES - 1
    ring.ring.begin(1, 3)
    ring.world = ring.ring.add_group(*WORLD)
    ring.ring.launch(ring.world or 0, 1, 0, (8,), FLOAT32, (8,), FLOAT32, NOBODY, 3)
    (one,) = ring.contents.launched
    assert one.place == LaunchLine("/job/2.py", 1, "<module>") and one.peer is None


SEES = {"frame": lambda: sys._getframe(1)}


def test_oldest_records_are_overwritten_and_a_late_end_changes_no_other(ring: Ring) -> None:
    numbers = [ring.launch(8) for _ in range(RECORDS + 5)]
    for number in numbers[:5]:
        ring.ring.end(number)
    launched = ring.contents.launched
    assert [one.number for one in launched] == list(range(5, RECORDS + 5))
    assert all(one.over_ns is None for one in launched)


def test_generation_begins_empty(ring: Ring) -> None:
    for _ in range(3):
        ring.launch(8)
    ring.ring.begin(0, 2)
    assert ring.contents.launched == () and ring.contents.groups == ()
    ring.world, ring.sequence = ring.ring.add_group("0", "default_pg", range(2)), 0
    ring.launch(9)
    assert [(one.number, one.sequence) for one in ring.contents.launched] == [(0, 1)]


def test_group_has_its_ranks_and_one_too_many_is_dropped(ring: Ring) -> None:
    assert ring.ring.add_group("4", "pairs", [0, 2]) == 1
    assert ring.ring.add_group("5", "x" * 2000, [0]) is None
    made = [ring.ring.add_group(str(number), "", [number]) for number in range(20)]
    assert sum(one is not None for one in made) == MOST_GROUPS - 2
    assert ring.contents.groups[1].ranks == (0, 2) and len(ring.contents.groups) == MOST_GROUPS


def test_nonsense_is_not_a_record(ring: Ring) -> None:
    assert contents_of(b"") is None and contents_of(bytes(_SIZE)) is None
    ring.ring.launch(ring.world or 0, 1, 200, (8,), FLOAT32, (8,), OTHER_DTYPE)
    ring.ring.launch(9, 1, 0, (8,), FLOAT32, (8,), OTHER_DTYPE)
    for peer in (3, -2, 1 << 30):
        ring.ring.launch(ring.world or 0, 1, 0, (8,), FLOAT32, (8,), FLOAT32, peer)
    assert ring.contents.launched == ()
    draw = random.Random(28)
    whole = bytes(ring.memory)
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(draw.randrange(1, 40)):
            at = draw.choice((draw.randrange(40), draw.randrange(1024), _PLACES_AT + draw.randrange(64)))
            damaged[draw.choice((at, draw.randrange(_SIZE)))] = draw.randrange(256)
        contents_of(bytes(damaged))  # raises nothing
    for text in (b'["0","",7]', b'["0"]', b'["0","","0-99999999999999"]', b'["0","","a,b"]', b"[" * 900):
        damaged = bytearray(whole)
        damaged[256 : 256 + 2 + len(text)] = len(text).to_bytes(2, "little") + text
        found = contents_of(bytes(damaged))
        assert found is not None and all(len(one.ranks) <= 1 << 20 for one in found.groups)
    ring.ring.launch(ring.world or 0, 1, 0, (8,), FLOAT32, (8,), FLOAT32, NOBODY, 1)
    whole = bytes(ring.memory)
    for text in (b'["\\u001b[31m",7,"f"]', b'["f.py","7","f"]', b'["f.py",true,"f"]', b'["f.py"]', b"7", b"", b"\xff"):
        damaged = bytearray(whole)
        damaged[_PLACES_AT : _PLACES_AT + 2 + len(text)] = len(text).to_bytes(2, "little") + text
        found = contents_of(bytes(damaged))
        assert found is not None and found.launched[-1].place is None


LAUNCHES = """
import os, re
from samebits.store.collective_ring import open_ring
ring = open_ring()
assert ring is open_ring()
ring.begin(2, 3)
world = ring.add_group("0", "default_pg", range(3))
for sequence in range(1, 9):
    ring.launch(world, sequence, 0, (7,), 0, (7,), 0)
os.write(1, b"ready")
re.match("(a+)+$", "a" * 60 + "b")
"""


@pytest.fixture
def holder() -> Iterator[ProcessIdentity]:
    """Return a process that has launched eight collectives and then holds the GIL."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHES], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(5) == b"ready"
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    yield identity
    process.kill()
    process.wait()
    process.stdout.close()


def test_ring_is_readable_while_the_process_holds_the_gil_or_is_stopped(holder: ProcessIdentity) -> None:
    for _ in range(2):
        found = read(holder)
        assert found is not None and found.rank == 2 and [one.sequence for one in found.launched] == list(range(1, 9))
        os.kill(holder.pid, signal.SIGSTOP)
    assert read(ProcessIdentity(holder.pid, holder.started_at + 1)) is None
    assert read(ProcessIdentity.of(1) or holder) is None
