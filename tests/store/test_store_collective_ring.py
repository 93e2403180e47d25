"""What a process launched last, read by another one: in order, bounded, of this generation, whatever lies there."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runtime.store.collective_ring import (
    _SIZE,
    DTYPES,
    MOST_GROUPS,
    OPS,
    OTHER_DTYPE,
    RECORDS,
    CollectiveRing,
    Contents,
    contents_of,
    read,
)
from runtime.store.process_identity import ProcessIdentity

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
    def contents(self) -> Contents:
        found = contents_of(bytes(self.memory))
        assert found is not None
        return found


@pytest.fixture
def ring() -> Ring:
    return Ring()


def test_what_was_launched_is_read_in_order_and_the_last_is_in_flight(ring: Ring) -> None:
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


def test_the_oldest_give_way_and_an_end_that_comes_late_changes_no_other(ring: Ring) -> None:
    numbers = [ring.launch(8) for _ in range(RECORDS + 5)]
    for number in numbers[:5]:
        ring.ring.end(number)
    launched = ring.contents.launched
    assert [one.number for one in launched] == list(range(5, RECORDS + 5))
    assert all(one.over_ns is None for one in launched)


def test_a_generation_begins_with_nothing(ring: Ring) -> None:
    for _ in range(3):
        ring.launch(8)
    ring.ring.begin(0, 2)
    assert ring.contents.launched == () and ring.contents.groups == ()
    ring.world, ring.sequence = ring.ring.add_group("0", "default_pg", range(2)), 0
    ring.launch(9)
    assert [(one.number, one.sequence) for one in ring.contents.launched] == [(0, 1)]


def test_a_group_has_its_ranks_and_one_too_many_is_not_kept(ring: Ring) -> None:
    assert ring.ring.add_group("4", "pairs", [0, 2]) == 1
    assert ring.ring.add_group("5", "x" * 2000, [0]) is None
    made = [ring.ring.add_group(str(number), "", [number]) for number in range(20)]
    assert sum(one is not None for one in made) == MOST_GROUPS - 2
    assert ring.contents.groups[1].ranks == (0, 2) and len(ring.contents.groups) == MOST_GROUPS


def test_nonsense_is_no_record(ring: Ring) -> None:
    assert contents_of(b"") is None and contents_of(bytes(_SIZE)) is None
    ring.ring.launch(ring.world or 0, 1, 200, (8,), FLOAT32, (8,), OTHER_DTYPE)
    ring.ring.launch(9, 1, 0, (8,), FLOAT32, (8,), OTHER_DTYPE)
    assert ring.contents.launched == ()
    draw = random.Random(28)
    whole = bytes(ring.memory)
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(draw.randrange(1, 40)):
            damaged[draw.choice((draw.randrange(40), draw.randrange(1024), draw.randrange(_SIZE)))] = draw.randrange(
                256
            )
        contents_of(bytes(damaged))  # raises nothing
    for text in (b'["0","",7]', b'["0"]', b'["0","","0-99999999999999"]', b'["0","","a,b"]', b"[" * 900):
        damaged = bytearray(whole)
        damaged[256 : 256 + 2 + len(text)] = len(text).to_bytes(2, "little") + text
        found = contents_of(bytes(damaged))
        assert found is not None and all(len(one.ranks) <= 1 << 20 for one in found.groups)


LAUNCHES = """
import os, re
from runtime.store.collective_ring import open_ring
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
    """A process that has launched eight and holds Python's lock since then."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHES], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(5) == b"ready"
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    yield identity
    process.kill()
    process.wait()
    process.stdout.close()


def test_it_is_read_while_the_process_holds_the_gil_or_is_stopped_and_not_of_another(holder: ProcessIdentity) -> None:
    for _ in range(2):
        found = read(holder)
        assert found is not None and found.rank == 2 and [one.sequence for one in found.launched] == list(range(1, 9))
        os.kill(holder.pid, signal.SIGSTOP)
    assert read(ProcessIdentity(holder.pid, holder.started_at + 1)) is None
    assert read(ProcessIdentity.of(1) or holder) is None
