"""The key-value store: each call, each bound with its message, and the way of calls through agent and scheduler."""

from __future__ import annotations

import msgspec
import pytest

from samebits.core.agent.agent_core import AgentCore, AgentPolicy
from samebits.core.agent.agent_events import Answered, Called, Connected, Disconnected, GaveUp, Heard, KeyAsk, Passed
from samebits.core.agent.key_calls import SAY_AGAIN_S, KeyCalls
from samebits.core.keys import key_store
from samebits.core.keys.key_store import (
    MAX_KEPT_ANSWERS,
    KeyDeleted,
    KeyRecord,
    KeyStore,
    KeyWritten,
    StoredValue,
    newest,
    replay,
)
from samebits.core.messages import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    SCHEMA,
    Activity,
    Admitted,
    Credential,
    Fenced,
    KeyAnswer,
    KeyCall,
    KeyOp,
    KeyOutcome,
    Process,
)
from samebits.errors import ProtocolError
from tests.core.house import House, policy

TERM = 3
FIRST = TERM << 32
SENDER = Credential("job", "0", "s0", 1)


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


class Desk:
    """One store with the call numbers of its callers."""

    def __init__(self, store: KeyStore | None = None) -> None:
        self.store = store or KeyStore(TERM)
        self.numbers = {"s0": 0}
        self.records: list[KeyRecord] = []
        self.told: list[KeyAnswer] = []

    def call(
        self, op: KeyOp, key: bytes = b"k", *, session: str = "s0", floor: int | None = None, **ask: object
    ) -> KeyAnswer:
        number = self.numbers[session] = self.numbers.get(session, 0) + 1
        sender = Credential("job", session, session, 1)
        self.last = KeyCall(sender, number, number if floor is None else floor, op, key, **ask)  # type: ignore[arg-type]
        return self.say(self.last)

    def say(self, call: KeyCall) -> KeyAnswer:
        ready = self.store.take(call)
        self.records += ready.records
        self.told = ready.answers
        return ready.answers[0] if ready.answers else None  # type: ignore[return-value]


def outcome(answer: KeyAnswer) -> tuple[KeyOutcome, int, bytes]:
    return answer.outcome, answer.version - FIRST if answer.version else 0, answer.value


def test_put_get_delete() -> None:
    desk = Desk()
    assert outcome(desk.call(KeyOp.GET)) == (KeyOutcome.ABSENT, 0, b"")
    assert outcome(desk.call(KeyOp.PUT, value=pack("a"))) == (KeyOutcome.DONE, 1, b"")
    assert outcome(desk.call(KeyOp.GET)) == (KeyOutcome.DONE, 1, pack("a"))
    assert outcome(desk.call(KeyOp.DELETE, version=FIRST + 9)) == (KeyOutcome.DIFFERS, 1, b"")
    assert outcome(desk.call(KeyOp.DELETE)) == (KeyOutcome.DONE, 2, b"")
    assert outcome(desk.call(KeyOp.DELETE)) == (KeyOutcome.ABSENT, 0, b"")
    assert desk.records == [], "durability was not requested"


def test_add_counts_from_zero_and_accepts_numbers_only() -> None:
    desk = Desk()
    assert desk.call(KeyOp.ADD, amount=5).value == pack(5)
    assert desk.call(KeyOp.ADD, amount=-7).value == pack(-2)
    desk.call(KeyOp.PUT, value=pack("text"))
    refused = desk.call(KeyOp.ADD, amount=1)
    assert refused.outcome is KeyOutcome.REFUSED
    assert refused.text.startswith("key 'k': its value is not a whole number. Fix: ")
    desk.call(KeyOp.PUT, value=pack(2**63 - 1))
    assert "more than 64 bits. Fix: " in desk.call(KeyOp.ADD, amount=1).text
    assert desk.call(KeyOp.GET).value == pack(2**63 - 1)


def test_compare_and_set_succeeds_only_at_its_version() -> None:
    desk = Desk()
    assert outcome(desk.call(KeyOp.COMPARE_AND_SET, value=b"\x01", version=FIRST + 1)) == (KeyOutcome.DIFFERS, 0, b"")
    assert outcome(desk.call(KeyOp.COMPARE_AND_SET, value=b"\x01")) == (KeyOutcome.DONE, 1, b"")
    assert outcome(desk.call(KeyOp.COMPARE_AND_SET, value=b"\x02")) == (KeyOutcome.DIFFERS, 1, b"")
    assert outcome(desk.call(KeyOp.COMPARE_AND_SET, value=b"\x03", version=FIRST + 1)) == (KeyOutcome.DONE, 2, b"")
    assert desk.call(KeyOp.GET).value == b"\x03"


def test_wait_ends_with_a_higher_version() -> None:
    desk = Desk()
    assert desk.call(KeyOp.WAIT, session="s1") is None
    desk.say(desk.last)  # repeated: it still waits once
    assert desk.store.waits == 1
    desk.call(KeyOp.PUT, value=b"\x01")
    assert [(one.session, one.value) for one in desk.told] == [("s0", b""), ("s1", b"\x01")]
    assert desk.store.waits == 0
    assert desk.call(KeyOp.WAIT, session="s1").value == b"\x01", "it is already there"
    assert desk.call(KeyOp.WAIT, session="s1", version=FIRST + 1) is None
    desk.call(KeyOp.DELETE)
    assert [one.session for one in desk.told] == ["s0"], "a deletion does not end a wait"
    desk.call(KeyOp.ADD, amount=1)
    assert [one.session for one in desk.told] == ["s0", "s1"]


def test_repeated_change_is_done_once_with_the_same_answer() -> None:
    desk = Desk()
    first, said = desk.call(KeyOp.ADD, amount=1), desk.last
    assert desk.say(said) == first
    desk.call(KeyOp.ADD, amount=1, floor=1)
    assert desk.say(said) == first
    desk.call(KeyOp.ADD, amount=1, floor=3)
    assert desk.say(said) is None, "its caller has the answer: this repeat is late"
    assert desk.call(KeyOp.GET).value == pack(3)


def test_durable_key_stays_durable_until_it_is_deleted() -> None:
    desk = Desk()
    desk.call(KeyOp.PUT, b"volatile", value=b"\x01")
    desk.call(KeyOp.PUT, b"d", value=b"\x02", is_durable=True)
    desk.call(KeyOp.PUT, b"d", value=b"\x03")
    kept, said = desk.call(KeyOp.ADD, b"n", amount=4, is_durable=True), desk.last
    again = Desk(replay(desk.records, TERM + 1))
    assert dict(again.store.keys) == {b"d": StoredValue(b"\x03", FIRST + 3), b"n": StoredValue(pack(4), FIRST + 4)}
    assert again.say(said) == msgspec.structs.replace(kept, term=TERM + 1)
    assert again.store.keys[b"n"].value == pack(4)
    desk.call(KeyOp.DELETE, b"d")
    desk.call(KeyOp.PUT, b"d", value=b"\x05")
    assert b"d" not in replay(desk.records, TERM + 1).keys
    assert [type(one) for one in desk.records] == [KeyWritten, KeyWritten, KeyWritten, KeyDeleted]


def test_snapshot_restores_the_same_store() -> None:
    desk = Desk()
    for number in range(5):
        desk.call(KeyOp.ADD, b"key %d" % number, session=f"s{number % 2}", amount=1, is_durable=number != 3)
    said = desk.last
    again = Desk(replay(desk.store.snapshot(), TERM + 1))
    assert again.store.keys == replay(desk.records, TERM + 1).keys
    assert again.say(said).value == pack(1)
    assert list(replay(desk.store.snapshot(), TERM + 1).snapshot()) == list(desk.store.snapshot())


def test_versions_rise_across_scheduler_starts_whatever_was_forgotten() -> None:
    desk = Desk()
    before = desk.call(KeyOp.PUT, value=b"\x01").version
    assert Desk(KeyStore(TERM + 1)).call(KeyOp.PUT, value=b"\x01").version > before


def test_record_of_an_older_version_overwrites_no_newer_value() -> None:
    newer, older = KeyWritten(b"k", b"\x02", 9), KeyWritten(b"k", b"\x01", 8)
    assert replay([newer, older, KeyDeleted(b"k", 7, "s", 1, 1)], 0).keys == {b"k": StoredValue(b"\x02", 9)}
    mine, others = (
        {b"a": StoredValue(b"1", 1), b"b": StoredValue(b"4", 4)},
        {b"a": StoredValue(b"2", 2), b"b": StoredValue(b"3", 3)},
    )
    assert newest(mine, others) == newest(others, mine) == {b"a": StoredValue(b"2", 2), b"b": StoredValue(b"4", 4)}


def test_keys_and_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_store, "MAX_KEYS", 2)
    monkeypatch.setattr(key_store, "MAX_STORE_BYTES", 40)
    desk = Desk()
    desk.call(KeyOp.PUT, b"a", value=b"x" * 30)
    refused = desk.call(KeyOp.PUT, b"b", value=b"x" * 20)
    assert (refused.outcome, refused.text) == (
        KeyOutcome.REFUSED,
        "key 'b': all keys and values would have 52 bytes, at most 40 are kept. Fix: delete keys that are no longer "
        "needed, or keep large values in files and their paths here",
    )
    desk.call(KeyOp.PUT, b"a", value=b"x")
    assert desk.call(KeyOp.PUT, b"b", value=b"x" * 20).outcome is KeyOutcome.DONE
    assert "there are 2 keys, the maximum. Fix: " in desk.call(KeyOp.ADD, b"c").text
    assert desk.call(KeyOp.ADD, b"c").outcome is KeyOutcome.REFUSED
    desk.call(KeyOp.DELETE, b"a")
    assert desk.call(KeyOp.ADD, b"c").outcome is KeyOutcome.DONE


def test_waits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    for _ in range(200):
        desk.call(KeyOp.WAIT)
    assert desk.store.waits == key_store.MAX_WAITS_OF_ONE, "the oldest were dropped"
    monkeypatch.setattr(key_store, "MAX_WAITS", desk.store.waits)
    assert "calls are already waiting for keys, the maximum. Fix: " in desk.call(KeyOp.WAIT, session="s1").text
    desk.store.forget_callers_but({"s1"})
    assert desk.store.waits == 0


def test_kept_answers_are_bounded() -> None:
    desk = Desk()
    for _ in range(2 * MAX_KEPT_ANSWERS):
        desk.call(KeyOp.ADD, amount=1, floor=1)
    assert desk.call(KeyOp.GET, floor=1).value == pack(MAX_KEPT_ANSWERS)
    assert len(desk.store._callers["s0"].answers) == MAX_KEPT_ANSWERS


@pytest.mark.parametrize(
    "call",
    [
        KeyCall(SENDER, 1, 1, KeyOp.PUT, b""),
        KeyCall(SENDER, 1, 1, KeyOp.PUT, b"k" * (MAX_KEY_BYTES + 1)),
        KeyCall(SENDER, 1, 1, KeyOp.PUT, b"k", b"v" * (MAX_VALUE_BYTES + 1)),
        KeyCall(SENDER, -1, 1, KeyOp.PUT, b"k"),
        KeyCall(SENDER, 1, 1, KeyOp.PUT, b"k", version=-1),
        KeyCall(SENDER, 1, 1, KeyOp.ADD, b"k", amount=2**63),
    ],
)
def test_message_out_of_bounds_is_rejected(call: KeyCall) -> None:
    with pytest.raises(ProtocolError):
        SCHEMA.unpack(SCHEMA.pack(call))


# ---- callers


ADD = KeyAsk(KeyOp.ADD, b"k", amount=1)


def test_floor_is_the_oldest_unanswered_change() -> None:
    calls = KeyCalls()
    for ticket, ask in enumerate([KeyAsk(KeyOp.WAIT, b"w"), ADD, ADD]):
        calls.begin(ticket, ask, 0.0)
    said = calls.due(SENDER, 0.0)
    assert [(one.number, one.floor, one.op) for one in said] == [
        (1, 2, KeyOp.WAIT),
        (2, 2, KeyOp.ADD),
        (3, 2, KeyOp.ADD),
    ]
    assert calls.answered(3) == 2
    calls.begin(3, ADD, 0.0)
    assert [one.floor for one in calls.due(SENDER, 0.0)] == [2]
    assert calls.answered(2) == 1
    assert calls.answered(2) is None
    calls.give_up(3)
    calls.begin(4, ADD, 0.0)
    assert [(one.number, one.floor) for one in calls.due(SENDER, 0.0)] == [(5, 5)]


def test_call_is_repeated_at_growing_intervals() -> None:
    calls, times, now = KeyCalls(), [], 0.0
    calls.begin(0, ADD, now)
    for _ in range(6):
        assert calls.say_at is not None
        now = calls.say_at
        assert len(calls.due(SENDER, now)) == 1
        assert calls.due(SENDER, now) == []
        times.append(now)
    assert times == [0, 2, 6, 14, 30, 62]
    calls.say_all_again(now)
    assert calls.say_at == now


def test_changes_wait_behind_an_old_unanswered_one() -> None:
    calls = KeyCalls()
    for ticket in range(MAX_KEPT_ANSWERS + 5):
        calls.begin(ticket, ADD, 0.0)
    assert len(calls.due(SENDER, 0.0)) == MAX_KEPT_ANSWERS
    calls.answered(1)
    assert [one.number for one in calls.due(SENDER, 0.0)] == [MAX_KEPT_ANSWERS + 1]


# ---- agent and scheduler


def agent_core() -> AgentCore:
    core = AgentCore(AgentPolicy("0", "s0", Process("host", 1, 1, "cpu"), "train.py", ()), 0.0)
    core.step(Connected(), 0.0)
    core.step(Heard(Admitted("s0", "job", TERM, 0, 1, 1, None)), 0.0)
    return core


def key_calls(sends: list[object]) -> list[KeyCall]:
    return [one for one in sends if isinstance(one, KeyCall)]


def test_agent_sends_a_call_at_once_and_again_on_a_new_connection() -> None:
    core = agent_core()
    (said,) = key_calls(core.step(Called(7, ADD), 0.1).sends)  # type: ignore[arg-type]
    assert (said.number, said.sender.incarnation, core.activity) == (1, 1, Activity.SEATED)
    core.step(Disconnected(), 0.2)
    assert key_calls(core.step(Called(8, ADD), 0.3).sends) == [], "there is no scheduler"  # type: ignore[arg-type]
    core.step(Connected(), 0.4)
    back = core.step(Heard(Admitted("s0", "job", TERM + 1, 0, 1, 1, None)), 0.5)
    assert [one.number for one in key_calls(back.sends)] == [1, 2]  # type: ignore[arg-type]
    assert core.step(Heard(KeyAnswer("s0", 1, TERM, KeyOutcome.DONE, 5, pack(1))), 0.6).notices == [], "of another term"
    answer = KeyAnswer("s0", 1, TERM + 1, KeyOutcome.DONE, 5, pack(1))
    assert core.step(Heard(answer), 0.6).notices == [Answered(7, answer)]
    assert core.step(Heard(answer), 0.6).notices == []
    assert core.step(Heard(KeyAnswer("another", 2, TERM + 1, KeyOutcome.DONE)), 0.6).notices == []
    assert len(key_calls(core.step(Passed(0), 0.5 + SAY_AGAIN_S).sends)) == 1  # type: ignore[arg-type]
    core.step(GaveUp(8), 3.0)
    assert key_calls(core.step(Passed(0), 90.0).sends) == []  # type: ignore[arg-type]


def test_scheduler_answers_only_holders_of_a_seat() -> None:
    house = House(policy(1)).fill()
    credential = house.credential("0")
    call = KeyCall(credential, 1, 1, KeyOp.ADD, b"k", amount=2, is_durable=True)
    ready = house.receive(credential.session, call)
    assert [type(one) for one in ready.key_records] == [KeyWritten]
    assert ready.records == []
    assert [one.value for one in house.sent[credential.session] if isinstance(one, KeyAnswer)] == [pack(2)]
    stale = msgspec.structs.replace(call, sender=msgspec.structs.replace(credential, incarnation=9), number=2)
    ready = house.receive(credential.session, stale)
    assert (ready.key_records, [type(one.message) for one in ready.sends]) == ([], [Fenced])
    assert house.core.keys.keys[b"k"].value == pack(2)


def test_restarted_scheduler_has_the_keys_that_were_written() -> None:
    house = House(policy(1)).fill()
    credential = house.credential("0")
    call = KeyCall(credential, 1, 1, KeyOp.ADD, b"k", amount=2, is_durable=True)
    written = house.receive(credential.session, call).key_records
    house.crash()
    house.core.load_keys(written)
    house.receive(credential.session, call)
    answers = [one for one in house.sent[credential.session] if isinstance(one, KeyAnswer)]
    assert [(one.term, one.value) for one in answers] == [(1, pack(2)), (2, pack(2))]
    assert answers[0].version == answers[1].version


def test_callers_without_a_seat_are_forgotten() -> None:
    house = House(policy(1)).fill()
    credential = house.credential("0")
    for number in range(key_store.FEW_CALLERS + 2):
        gone = msgspec.structs.replace(credential, session=f"gone {number}")
        house.core.keys.take(KeyCall(gone, 1, 1, KeyOp.WAIT, b"k"))
    house.receive(credential.session, KeyCall(credential, 1, 1, KeyOp.GET, b"k"))
    assert (house.core.keys.callers, house.core.keys.waits) == (1, 0)
