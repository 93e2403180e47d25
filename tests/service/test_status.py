"""The snapshot of a large job: what it takes to send it, and that it comes out as it went in."""

from __future__ import annotations

import json
import zlib

import pytest

from runtime.core import messages
from runtime.core.messages import GenerationStarted, Process, RoundOpened, Status, StatusQuery
from runtime.service.status import message_of, snapshot, snapshot_in
from tests.core.house import House, policy

WORKERS = 10_000
LARGEST_DELTA_BYTES = 256
LARGEST_TABLE_BYTES = 100_000


@pytest.fixture(scope="module")
def house() -> House:
    """A job of ten thousand that trains, eight to a host, and its spare."""
    house = House(policy(WORKERS, spare_num=1))
    for node in range(WORKERS + 1):
        if node == WORKERS:
            for other in range(WORKERS):
                house.join(str(other))
            for other in range(WORKERS):
                house.beat(str(other), step=100)
        process = Process(f"trainer-{node // 8:04d}.cluster.internal#1a2b3c4d", 4_000_000 + node % 8, 123_456, "cpu")
        house.register(str(node), process=process)
    return house


def test_the_table_of_ten_thousand_is_compressed_by_columns_and_comes_out_as_it_was(house: House) -> None:
    content = snapshot(house.core, whole=True)
    message = message_of(content)
    assert len(content["workers"]) == WORKERS
    assert len(message.packed) < LARGEST_TABLE_BYTES
    assert snapshot_in(message) == json.loads(json.dumps(content))


def test_who_is_pushed_to_gets_no_table_of_a_large_job(house: House) -> None:
    content = snapshot(house.core, whole=False)
    assert not content.keys() & {"workers", "spares", "retired"}
    assert snapshot_in(message_of(content)) == content


def test_a_loss_tells_each_of_ten_thousand_little(house: House) -> None:
    house.sent.clear()
    house.close("s3", gone=True)
    for slot, (_, node) in enumerate(sorted(house.core.state.by_slot.items())):
        behind = slot % 2
        house.join(node, live=None if node == str(WORKERS) else (100_000 - behind, 1), looked=False)
    told = {
        kind: [message for sent in house.sent.values() for message in sent if isinstance(message, kind)]
        for kind in (RoundOpened, GenerationStarted)
    }
    assert [len(of_kind) for of_kind in told.values()] == [WORKERS] * 2
    sizes = [len(messages.SCHEMA.pack(message)) for of_kind in told.values() for message in of_kind]
    assert max(sizes) <= LARGEST_DELTA_BYTES


@pytest.mark.parametrize("message", [StatusQuery(follow=True), Status(b"{}"), Status(zlib.compress(b"{")), Status(b"")])
def test_what_is_no_snapshot_is_none(message: object) -> None:
    assert snapshot_in(message) is None
