"""The snapshot of a large job: its size, and that it survives a round trip."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import msgspec
import pytest

from samebits.account.job_view import (
    JOURNAL,
    SCHEDULER,
    Interruption,
    JobView,
    PresenceState,
    StandstillView,
    WorkerView,
)
from samebits.core import messages, records
from samebits.core.messages import MAX_STOPPED_BY, GenerationStarted, Process, RoundId, RoundOpened, Status, StatusQuery
from samebits.core.records import JobRebuilt, RebuiltGeneration, RebuiltSeat
from samebits.errors import JournalDamagedError
from samebits.service.job_journal import history_of
from samebits.service.status import message_of, snapshot, stop_request, stored_view, view_in
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
    view = snapshot(house.core, whole=True)
    message = message_of(view)
    assert len(view.workers) == WORKERS
    assert len(message.packed) < LARGEST_TABLE_BYTES
    assert view_in(message) == view


def test_follower_gets_no_table_of_a_large_job(house: House) -> None:
    message = message_of(snapshot(house.core, whole=False))
    assert not json.loads(zlib.decompress(message.packed)).keys() & {"workers", "spares", "retired"}
    assert view_in(message) == snapshot(house.core, whole=False)


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


NODE = WorkerView(
    node="2.1",
    slot=2,
    incarnation=3,
    presence=PresenceState.LOST,
    reason="silent",
    host="here",
    pid=42,
    started_at=7,
    activity="training",
    step=9,
    figures={"pace": 0.5},
    is_joining=True,
    waits_for=("slot 3 is filled",),
)
WHOLE = JobView(
    source=SCHEDULER,
    job="job-1",
    name="train.py",
    term=2,
    generation=3,
    restore_step=4,
    committed_step=5,
    training_finished=True,
    job_finished=True,
    interruptions=(Interruption("stopped", 6, "Ctrl-C", 7),),
    phase="ending",
    world_size=8,
    wanted_size=9,
    min_world_size=10,
    max_world_size=11,
    alive=12,
    joining=13,
    spares_alive=14,
    ready=15,
    recovery=True,
    step=16,
    seat_free_in_s=17.5,
    first_cause="a cause",
    standstill="a standstill",
    ailments=("a full disk",),
    stragglers=("a slow worker",),
    notices=((18, "a warning"),),
    stall=StandstillView(19, ("0",), ("1",), ("2",)),
    ended=Interruption("script_failed", 20, "another cause", 21),
    losses=22,
    last_losses=("worker 1: gone",),
    workers=(NODE,),
    spares=(msgspec.structs.replace(NODE, slot=None, is_joining=False, waits_for=()),),
    retired=(msgspec.structs.replace(NODE, node="3", slot=None, is_joining=False, waits_for=()),),
    address="10.0.0.2:9000",
)
SENT_BY_THE_FIRST_SCHEDULERS = {
    *("source", "job", "name", "term", "generation", "restore_step", "training_finished", "job_finished", "phase"),
    *("interruptions", "world_size", "wanted_size", "min_world_size", "max_world_size", "alive", "recovery", "step"),
    *("first_cause", "ended", "workers"),
}
SENT_SINCE = {
    *("committed_step", "joining", "spares_alive", "ready", "seat_free_in_s", "standstill", "ailments", "stragglers"),
    *("notices", "stall", "losses", "last_losses", "spares", "retired", "address"),
}


ADDED_TO_WORKERS = ("figures", "joining", "waits_for")


def unset(value: msgspec.Struct) -> list[str]:
    defaults = {
        one.name: one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory()
        for one in msgspec.structs.fields(value)
    }
    return [name for name, default in defaults.items() if getattr(value, name) == default]


def test_every_field_of_the_state_survives_a_message() -> None:
    assert unset(WHOLE) == unset(NODE) == unset(WHOLE.interruptions[0]) == [], "a new field belongs into this test"
    only_stored = {"losses": 0, "last_losses": ()}
    assert view_in(message_of(WHOLE)) == msgspec.structs.replace(WHOLE, **only_stored)
    only_live = {"ready": None, "notices": (), "stall": None}
    stored = msgspec.structs.replace(WHOLE, source=JOURNAL, **only_live)
    assert view_in(message_of(stored)) == stored


def test_names_in_messages_are_those_of_earlier_releases() -> None:
    sent = json.loads(zlib.decompress(message_of(WHOLE).packed))
    stored = json.loads(zlib.decompress(message_of(msgspec.structs.replace(WHOLE, source=JOURNAL)).packed))
    assert sent.keys() | stored.keys() == SENT_BY_THE_FIRST_SCHEDULERS | SENT_SINCE
    assert list(sent["spares"]) == [
        *("node", "slot", "incarnation", "state", "reason", "host", "pid", "started_at", "activity", "step", "figures")
    ]
    assert list(sent["workers"]) == [*sent["spares"], "joining", "waits_for"]
    assert sent["ended"] == {"kind": "script_failed", "step": 20, "cause": "another cause", "status": 21}


def test_message_of_an_earlier_scheduler_is_read() -> None:
    sent = json.loads(zlib.decompress(message_of(WHOLE).packed))
    old = {name: value for name, value in sent.items() if name in SENT_BY_THE_FIRST_SCHEDULERS}
    old["workers"] = {name: value for name, value in old["workers"].items() if name not in ADDED_TO_WORKERS}
    del old["ended"]["status"]
    read = view_in(Status(zlib.compress(json.dumps({**old, "of_a_later_release": 1}).encode())))
    assert read is not None
    assert sorted(unset(read)) == sorted(SENT_SINCE)
    assert sorted(unset(read.workers[0])) == ["figures", "is_joining", "waits_for"]
    assert read.ended == Interruption("script_failed", 20, "another cause")


@pytest.mark.parametrize(
    "changes", [{"job": None}, {"workers": [1]}, {"workers": {"node": ["0"]}}, {"ended": {"kind": "x", "step": 1}}]
)
def test_damaged_state_is_ignored(changes: dict[str, object]) -> None:
    sent = {**json.loads(zlib.decompress(message_of(WHOLE).packed)), **changes}
    assert view_in(Status(zlib.compress(json.dumps(sent).encode()))) is None


@pytest.mark.parametrize("message", [StatusQuery(follow=True), Status(b"{}"), Status(zlib.compress(b"{")), Status(b"")])
def test_invalid_snapshot_is_rejected(message: object) -> None:
    assert view_in(message) is None


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
    view = stored_view(tmp_path)
    assert view is not None
    assert (view.job, len(view.workers)) == ("job-old", WORKERS)


def test_journal_keeps_which_worker_was_lost_and_returned(tmp_path: Path) -> None:
    house = House(policy(2, cool_down_s=0.0)).fill()
    for number in range(4):
        house.close(f"s1-{number}" if number else "s1", gone=True)
        house.register("1", session=f"s1-{number + 1}")
    with Journal.open(tmp_path)[0] as journal:
        journal.append([records.SCHEMA.pack(record) for record in house.journal])
    view = stored_view(tmp_path)
    assert view is not None
    assert view.losses == 4
    assert view.last_losses == ("worker 1: its connection closed and its process is gone",) * 3


def test_loss_of_a_worker_that_returned_in_its_session_is_shown_as_over(tmp_path: Path) -> None:
    house = House(policy(2)).fill()
    house.tick(4.999)
    house.beat("0")
    house.tick(0.001)
    house.beat("1")
    with Journal.open(tmp_path)[0] as journal:
        journal.append([records.SCHEMA.pack(record) for record in house.journal])
    view = stored_view(tmp_path)
    assert view is not None
    assert view.last_losses == ("worker 1: silent for 5 s (NODE_TIMEOUT); it is back",)


def test_record_of_another_version_is_named_with_the_fix(tmp_path: Path) -> None:
    with Journal.open(tmp_path)[0] as journal:
        journal.append([b"\x91\xcc\xfa"])
    with pytest.raises(JournalDamagedError, match=r"this version does not recognize .* run the version"):
        history_of(tmp_path, [b"\x91\xcc\xfa"])
    with pytest.raises(JournalDamagedError, match=str(tmp_path)):
        stored_view(tmp_path)


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
