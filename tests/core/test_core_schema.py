"""Messages and records ↔ plain lists: a round trip gives the same value, and anything else is a ProtocolError."""

from __future__ import annotations

import enum
import math
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core import messages, records
from runtime.core.messages import Activity, Credential, Heartbeat, Refusal, Refused, RoundId
from runtime.core.point import Point
from runtime.core.schema import Schema
from runtime.errors import ProtocolError

INT64 = st.integers(-(2**63), 2**63 - 1)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: INT64,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's declared type; written from the annotations alone, not from the schema under test."""
    if hint in SCALARS:
        return SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if type(None) in arguments:
        return st.none() | values_of(next(one for one in arguments if one is not type(None)))
    if issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{name: values_of(hints[name]) for name in hint.__match_args__})


WIRE = [*typing.get_args(messages.FromWorker), *typing.get_args(messages.FromScheduler)]
WIRE += [messages.StatusQuery, messages.StopJob, messages.Status]
JOURNAL = [*typing.get_args(records.Record)]
EVERY = [*((messages.SCHEMA, kind) for kind in dict.fromkeys(WIRE)), *((records.SCHEMA, kind) for kind in JOURNAL)]
NAMES = [kind.__name__ for _, kind in EVERY]

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)


@pytest.mark.parametrize(("schema", "kind"), EVERY, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_value_survives_the_wire(schema: Schema, kind: type, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    packed = msgpack.packb(schema.to_plain(value), use_bin_type=True)
    again = schema.from_plain(msgpack.unpackb(packed, raw=False))
    assert again == value
    assert type(again) is kind
    hash(again)


def test_every_message_and_record_has_a_tag() -> None:
    assert set(messages.SCHEMA._writers) == set(WIRE)
    assert set(records.SCHEMA._writers) == set(JOURNAL)


@pytest.mark.parametrize(("schema", "kind"), EVERY, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_wrong_item_is_a_protocol_error_or_another_value(schema: Schema, kind: type, data: st.DataObject) -> None:
    """Whatever replaces one item, at any depth: the reader refuses, or it builds a value that writes back the same."""
    plain = schema.to_plain(data.draw(values_of(kind)))
    spoiled = data.draw(_with_one_change(plain))
    try:
        value = schema.from_plain(spoiled)
    except ProtocolError:
        return
    assert _same(schema.to_plain(value), spoiled)


def _with_one_change(plain: Any) -> st.SearchStrategy[Any]:
    if not isinstance(plain, list) or not plain:
        return PLAIN
    return (
        st.integers(0, len(plain) - 1).flatmap(
            lambda at: _with_one_change(plain[at]).map(lambda item: [*plain[:at], item, *plain[at + 1 :]])
        )
        | PLAIN
        | st.just(plain[:-1])
        | PLAIN.map(lambda item: [*plain, item])
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)) and not isinstance(other, bool):
        return one == other or (math.isnan(one) and math.isnan(other))  # an int may stand where a float is declared
    return type(one) is type(other) and bool(one == other)


@given(PLAIN)
def test_garbage_is_a_protocol_error(plain: Any) -> None:
    for schema in (messages.SCHEMA, records.SCHEMA):
        try:
            value = schema.from_plain(plain)
        except ProtocolError:
            continue
        assert _same(schema.to_plain(value), plain)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_bytes_from_anywhere_are_a_protocol_error(raw: bytes) -> None:
    try:
        plain = msgpack.unpackb(raw, raw=False, strict_map_key=False)
    except Exception:  # msgpack's own refusal is the codec's affair
        return
    try:
        messages.SCHEMA.from_plain(plain)
    except ProtocolError as error:
        assert str(error)


CREDENTIAL = ["job", "0", "s0", 1]


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        (None, "expected a list that begins with a tag"),
        ([], "expected a list that begins with a tag"),
        ({}, "expected a list that begins with a tag"),
        ([99], "unknown tag"),
        (["2"], "unknown tag"),
        ([True], "unknown tag"),
        ([2], "Heartbeat: expected 6 fields"),
        ([2, CREDENTIAL, 1, 1, 0, None, 0, 0], "Heartbeat: expected 6 fields"),
        ([2, CREDENTIAL[:3], 1, 1, 0, None, 0], "Heartbeat.sender: Credential: expected 4 fields"),
        ([2, ["job", 0, "s0", 1], 1, 1, 0, None, 0], "Heartbeat.sender: Credential.node: expected str, found int 0"),
        ([2, CREDENTIAL, 1, 9, 0, None, 0], "Heartbeat.activity: expected one of"),
        ([2, CREDENTIAL, 1, True, 0, None, 0], "Heartbeat.activity: expected one of"),
        ([2, CREDENTIAL, 1, 1, True, None, 0], "Heartbeat.generation: expected int, found bool True"),
        ([2, CREDENTIAL, 1, 1, 0.0, None, 0], "Heartbeat.generation: expected int, found float 0.0"),
        ([2, CREDENTIAL, 1, 1, 2**63, None, 0], "Heartbeat.generation: expected an integer of 64 bits"),
        ([2, CREDENTIAL, 1, 1, 0, [1], 0], "Heartbeat.round: RoundId: expected 2 fields"),
        ([2, CREDENTIAL, 1, 1, 0, 1, 0], "Heartbeat.round: RoundId: expected 2 fields"),
        ([6, CREDENTIAL, 1, "bye"], "Leave.on_purpose: expected bool, found int 1"),
        ([4, CREDENTIAL, 1, "blob"], "Publish.blob: expected bytes, found str 'blob'"),
        ([22, "s", 1, "30", "t"], "Refused.retry_after_s: expected float, found str '30'"),
        ([22, "s", 1, 10**400, "t"], "Refused.retry_after_s: expected an integer of 64 bits"),
        ([26, "job-1", 1, 1, b"x"], "AddressMap.blobs: expected a list"),
    ],
)
def test_the_error_says_where_and_what(plain: object, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        messages.SCHEMA.from_plain(plain)
    assert text in str(caught.value)


def test_what_a_peer_nests_a_thousand_deep_does_not_break_the_reader() -> None:
    packed = b"\x97\x02" + b"\x91" * 1000 + b"\x90" + b"\x01" * 5
    with pytest.raises(ProtocolError):
        messages.SCHEMA.from_plain(msgpack.unpackb(packed))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for plain in (
        deep,
        [deep],
        [2, deep, 1, 1, 0, None, 0],
        [2, CREDENTIAL, 1, deep, 0, None, 0],
        [22, "s", 1, deep, "t"],
    ):
        with pytest.raises(ProtocolError):
            messages.SCHEMA.from_plain(plain)


def test_a_long_value_is_shown_shortened() -> None:
    with pytest.raises(ProtocolError) as caught:
        messages.SCHEMA.from_plain([2, CREDENTIAL, 1, "x" * 10_000, 0, None, 0])
    assert len(str(caught.value)) < 300


def test_an_int_may_stand_for_a_float_and_becomes_one() -> None:
    refused = messages.SCHEMA.from_plain([22, "s", 1, 30, "t"])
    assert refused == Refused("s", Refusal.ALIVE, 30.0, "t")
    assert type(refused.retry_after_s) is float


def test_the_wire_is_what_it_was() -> None:
    """Released tags and the order of fields never change; a new field is a new protocol version."""
    beat = Heartbeat(Credential("job", "0", "s0", 1), 2, Activity.TRAINING, 3, RoundId(2, 1), 40)
    assert messages.SCHEMA.to_plain(beat) == [2, ["job", "0", "s0", 1], 2, 4, 3, [2, 1], 40]
    assert records.SCHEMA.to_plain(records.TrainingFinished(Point(60, 3))) == [9, [60, 3]]


def test_one_type_under_two_tags_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="one type under two tags"):
        Schema({1: Point, 2: Point})


def test_what_everybody_says_alike_is_one_object() -> None:
    pairs = (("threads", "1"), ("torch", "2.13.0"))
    first, second = (messages.SCHEMA.unpack(messages.SCHEMA.pack(_join(pairs))) for _ in range(2))
    assert first.numerics is second.numerics
    other = messages.SCHEMA.unpack(messages.SCHEMA.pack(_join((("threads", "2"),))))
    assert (first.numerics, other.numerics) == (pairs, (("threads", "2"),))
    plain = messages.SCHEMA.to_plain(_join(pairs))
    plain[5] = [["threads", 1], ["torch", "2.13.0"]]
    with pytest.raises(ProtocolError, match="expected str"):
        messages.SCHEMA.from_plain(plain)


def _join(numerics: messages.Pairs) -> messages.Join:
    return messages.Join(messages.Credential("job", "1", "s", 1), messages.RoundId(1, 1), (), False, numerics)


@pytest.mark.parametrize("schema", [messages.SCHEMA, records.SCHEMA])
def test_what_is_read_is_what_its_type_would_have_made(schema: Schema) -> None:
    """Readers fill the slots themselves; a type that does more when it is made must not be read so."""
    for kind in schema._writers:
        assert "__slots__" in vars(kind) and not hasattr(kind, "__post_init__"), kind
