"""The snapshot of a large job: its size, and that it survives a round trip."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from samebits.core import messages, records
from samebits.core.messages import MAX_STOPPED_BY, GenerationStarted, Process, RoundId, RoundOpened, Status, StatusQuery
from samebits.core.records import JobRebuilt, RebuiltGeneration, RebuiltSeat
from samebits.errors import JournalDamagedError
from samebits.service.job_journal import history_of
from samebits.service.status import message_of, snapshot, snapshot_in, stop_request, stored_snapshot
from samebits.store.journal import Journal
from tests.core.house import House, policy
from tests.hostile.attackers import objection

WORKERS = 10_000
LARGEST_DELTA_BYTES = 256
LARGEST_TABLE_BYTES = 100_000


@pytest.fixture(scope="module")
def house() -> House:
    """Return a job of ten thousand workers that trains, eight to a host, with one spare."""
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


def test_table_of_ten_thousand_is_compressed_by_columns_and_restored(house: House) -> None:
    content = snapshot(house.core, whole=True)
    message = message_of(content)
    assert len(content["workers"]) == WORKERS
    assert len(message.packed) < LARGEST_TABLE_BYTES
    assert snapshot_in(message) == json.loads(json.dumps(content))


def test_follower_gets_no_table_of_a_large_job(house: House) -> None:
    content = snapshot(house.core, whole=False)
    assert not content.keys() & {"workers", "spares", "retired"}
    assert snapshot_in(message_of(content)) == content


def test_loss_sends_little_to_each_of_ten_thousand(house: House) -> None:
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
def test_invalid_snapshot_is_rejected(message: object) -> None:
    assert snapshot_in(message) is None


def test_compacted_journal_of_a_large_job_is_read_without_the_lock(tmp_path: Path) -> None:
    process = Process("trainer-0001.cluster.internal#1a2b3c4d", 4_000_000, 123_456, "cpu")
    seats = tuple(RebuiltSeat(str(slot), slot, 1, f"{slot:032x}", process) for slot in range(WORKERS))
    members = tuple((str(slot), 1) for slot in range(WORKERS))
    generation = RebuiltGeneration(3, RoundId(2, 5), members, None, (), (), tuple(range(WORKERS)))
    settings = (("WORKER_NUM", str(WORKERS)),)
    record = JobRebuilt("job-old", "train.py", settings, 9, "boot", 1.0, seats, generation, None)
    packed = records.SCHEMA.pack(record)
    assert len(packed) > 1 << 20
    with Journal.open(tmp_path)[0] as journal:
        journal.append([packed])
    content = stored_snapshot(tmp_path)
    assert content is not None
    assert (content["job"], len(content["workers"])) == ("job-old", WORKERS)


def test_journal_keeps_which_worker_was_lost_and_returned(tmp_path: Path) -> None:
    house = House(policy(2, cool_down_s=0.0)).fill()
    for number in range(4):
        house.close(f"s1-{number}" if number else "s1", gone=True)
        house.register("1", session=f"s1-{number + 1}")
    with Journal.open(tmp_path)[0] as journal:
        journal.append([records.SCHEMA.pack(record) for record in house.journal])
    content = stored_snapshot(tmp_path)
    assert content is not None
    assert content["losses"] == 4
    assert content["last_losses"] == ["worker 1: its connection closed and its process is gone"] * 3


def test_record_of_another_version_is_named_with_the_fix(tmp_path: Path) -> None:
    with Journal.open(tmp_path)[0] as journal:
        journal.append([b"\x91\xcc\xfa"])
    with pytest.raises(JournalDamagedError, match=r"unknown to this version .* run the version"):
        history_of(tmp_path, [b"\x91\xcc\xfa"])
    with pytest.raises(JournalDamagedError, match=str(tmp_path)):
        stored_snapshot(tmp_path)


@pytest.mark.parametrize(
    ("by", "told"),
    [
        ("Ctrl-C", "Ctrl-C"),
        ("é" * MAX_STOPPED_BY, "é" * MAX_STOPPED_BY),
        (
            "first cause: " + "diverged " * 500,
            "first cause: " + " ".join(["diverged"] * 61) + "… (`samebits logs` shows the rest)",
        ),
        ("Traceback:\n\tValueError: \x1b[31mred", "Traceback:  ValueError: \\u001b[31mred"),
    ],
    ids=["short", "as long as may be", "too long", "several lines"],
)
def test_stop_request_fits_what_a_scheduler_accepts(by: str, told: str) -> None:
    """The cause contains a dead worker's last words. A longer one was once refused, and the job kept running."""
    asked = stop_request(by)
    assert asked.by == told
    assert objection(asked) is None
