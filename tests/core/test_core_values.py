"""Encoding of messages and records: a round trip gives the same value, anything else is a ProtocolError."""

from __future__ import annotations

import enum
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.core import messages, records
from samebits.core.keys import key_store
from samebits.core.messages import Activity, Credential, Heartbeat, Refusal, Refused, RoundId
from samebits.core.point import Point
from samebits.core.values import Meta, Schema, Value
from samebits.errors import ProtocolError
from samebits.net import copies
from samebits.printable import printable
from samebits.service.copies import buddy
from samebits.training.process import next_group

EDGES: dict[type, Any] = {int: (-(2**63), 2**63 - 1), float: (-1e300, 1e300)}
STORED = Path(__file__).parents[1] / "stored" / "packed.json"
"""For each type of value: bytes that the last release wrote, and its fields in order."""

INT64 = st.integers(-(2**63), 2**63 - 1)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: INT64,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
}


def bounded(kind: type, bounds: Meta) -> st.SearchStrategy[Any]:
    """Draw values of a plain type within the bounds of its annotation."""
    if kind in EDGES:
        least, most = EDGES[kind]
        numbers = st.integers if kind is int else st.floats
        return numbers(least if bounds.ge is None else bounds.ge, most if bounds.le is None else bounds.le)
    if bounds.pattern is not None:
        return st.from_regex(bounds.pattern, fullmatch=True).filter(lambda text: 0 < len(text) <= bounds.max_length)
    sizes = {"min_size": bounds.min_length or 0, "max_size": min(20, bounds.max_length or 20)}
    return (st.binary if kind is bytes else st.text)(**sizes)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Draw values of a field's declared type, from the annotations alone, not from the schema under test."""
    if hint in SCALARS:
        return SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        kind, bounds = arguments
        return bounded(kind, bounds) if kind in (*EDGES, bytes, str) else values_of(kind)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin in (typing.Union, types.UnionType):
        inner = st.one_of([values_of(one) for one in arguments if one is not type(None)])
        return st.none() | inner if type(None) in arguments else inner
    if issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    hints = typing.get_type_hints(hint, include_extras=True)
    return st.builds(hint, **{name: values_of(hints[name]) for name in hint.__match_args__})


WIRE = [*typing.get_args(messages.FromWorker), *typing.get_args(messages.FromScheduler)]
WIRE += [messages.StatusQuery, messages.StopJob, messages.OperatorDecision, messages.ProcessEnded, messages.ProcessSeen]
WIRE += [messages.Restarting]
JOURNAL = [*typing.get_args(records.Record)]
EVERY = [*((messages.SCHEMA, kind) for kind in dict.fromkeys(WIRE)), *((records.SCHEMA, kind) for kind in JOURNAL)]
EVERY += [(key_store.SCHEMA, kind) for kind in typing.get_args(key_store.KeyRecord)]
NAMES = [kind.__name__ for _, kind in EVERY]

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)


def plain_of(schema: Schema[Any], value: object) -> Any:
    """Decode the bytes of a value with another library."""
    return msgpack.unpackb(schema.pack(value), raw=False, use_list=True)


def read(schema: Schema[Any], plain: object) -> Any:
    """Decode plain values with our reader."""
    try:
        packed = msgpack.packb(plain, use_bin_type=True)
    except (OverflowError, ValueError, UnicodeEncodeError):
        raise ProtocolError("not encodable as msgpack") from None
    return schema.unpack(packed)


@pytest.mark.parametrize(("schema", "kind"), EVERY, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_value_survives_the_wire(schema: Schema[Any], kind: type, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    packed = schema.pack(value)
    again = schema.unpack(packed)
    assert again == value
    assert type(again) is kind
    assert msgpack.packb(msgpack.unpackb(packed), use_bin_type=True) == packed, "not as msgpack writes it"
    hash(again)


def test_every_message_and_record_has_a_tag() -> None:
    assert set(messages.SCHEMA.kinds) == set(WIRE)
    assert set(records.SCHEMA.kinds) == set(JOURNAL)
    assert all(kind.__struct_config__.tag is not None for _, kind in EVERY)


@pytest.mark.parametrize(("schema", "kind"), EVERY, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_wrong_item_is_a_protocol_error_or_another_value(
    schema: Schema[Any], kind: type, data: st.DataObject
) -> None:
    """Replace one item, at any depth: the reader refuses, or builds a value that writes back the same."""
    plain = plain_of(schema, data.draw(values_of(kind)))
    spoiled = data.draw(_with_one_change(plain))
    try:
        value = read(schema, spoiled)
    except ProtocolError:
        return
    assert _same(plain_of(schema, value), spoiled)


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
    """Return whether the written value equals the read one, plus trailing defaults."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) >= len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)) and not isinstance(other, bool):
        return one == float(other) or (math.isnan(one) and math.isnan(other))  # an int where a float is declared
    if isinstance(one, str) and isinstance(other, str):
        return one in (other, printable(other))  # text for people is made printable when it is read
    return type(one) is type(other) and bool(one == other)


@given(PLAIN)
def test_garbage_is_a_protocol_error(plain: Any) -> None:
    for schema in (messages.SCHEMA, records.SCHEMA, key_store.SCHEMA):
        try:
            value = read(schema, plain)
        except ProtocolError:
            continue
        assert _same(plain_of(schema, value), plain)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_a_protocol_error(raw: bytes) -> None:
    try:
        messages.SCHEMA.unpack(raw)
    except ProtocolError as error:
        assert str(error)


CREDENTIAL = ["job", "0", "s0", 1]


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        (None, "Expected `array`, got `None`"),
        ([], "Expected `array` of at least length 1"),
        ({}, "Expected `array`, got `object`"),
        ([99], "Invalid value 99"),
        (["2"], "Expected `int`, got `str`"),
        ([True], "Expected `int`, got `bool`"),
        ([2], "Expected `array` of at least length 7, got 1"),
        ([2, CREDENTIAL[:3], 1, 1, 0, None, 0], "Expected `array` of at least length 4, got 3 - at `$[1]`"),
        ([2, [*CREDENTIAL, 0], 1, 1, 0, None, 0], "Expected `array` of at most length 4, got 5 - at `$[1]`"),
        ([2, ["job", 0, "s0", 1], 1, 1, 0, None, 0], "Expected `str`, got `int` - at `$[1][1]`"),
        ([2, ["job", "x" * 129, "s0", 1], 1, 1, 0, None, 0], "Expected `str` of length <= 128 - at `$[1][1]`"),
        ([2, {"job": "j", "node": "0"}, 1, 1, 0, None, 0], "Expected `array`, got `object` - at `$[1]`"),
        ([2, CREDENTIAL, 1, 9, 0, None, 0], "Invalid enum value 9 - at `$[3]`"),
        ([2, CREDENTIAL, 1, True, 0, None, 0], "Expected `int`, got `bool` - at `$[3]`"),
        ([2, CREDENTIAL, 1, 1, True, None, 0], "Expected `int`, got `bool` - at `$[4]`"),
        ([2, CREDENTIAL, 1, 1, 0.0, None, 0], "Expected `int`, got `float` - at `$[4]`"),
        ([2, CREDENTIAL, 1, 1, 2**63, None, 0], "Expected `int` <= 9223372036854775807 - at `$[4]`"),
        ([2, CREDENTIAL, 1, 1, 0, [1], 0], "Expected `array` of length 2, got 1 - at `$[5]`"),
        ([2, CREDENTIAL, 1, 1, 0, [1, 2**64 - 1], 0], "Expected `int` <= 9223372036854775807 - at `$[5][1]`"),
        ([2, CREDENTIAL, 1, 1, 0, 1, 0], "Expected `array | null`, got `int` - at `$[5]`"),
        ([6, CREDENTIAL, 1, "bye"], "Expected `bool`, got `int` - at `$[2]`"),
        ([4, CREDENTIAL, 1, "blob"], "Expected `bytes`, got `str` - at `$[3]`"),
        ([22, "s", 1, "30", "t"], "Expected `float`, got `str` - at `$[3]`"),
        ([26, "job-1", 1, 1, b"x"], "Expected `array`, got `bytes` - at `$[4]`"),
        ([48, CREDENTIAL, [9, [[1, 1]] * 9]], "Expected `array` of length <= 8 - at `$[2][1]`"),
    ],
)
def test_error_gives_position_and_reason(plain: object, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read(messages.SCHEMA, plain)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x92\x07",
        b"\x92\x07\xc2\x00",
        b"\x92\x08\xa1\xff",
        b"\x92\x08\xa3\xed\xa0\x80",  # half of a UTF-16 surrogate pair
        b"\xdd\xff\xff\xff\xff\x07",
        b"\x92\x08\xdb\xff\xff\xff\xff",
        b"\x92\x08\xd6\xff\x00\x00\x00\x00",  # a timestamp, by msgpack's own extension
    ],
    ids=repr,
)
def test_invalid_msgpack_is_a_protocol_error(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.SCHEMA.unpack(packed)


def test_deep_nesting_by_a_peer_does_not_crash_the_reader() -> None:
    deep = b"\x91" * 100_000
    for packed in (deep, b"\x92\x02" + deep, b"\x97\x02" + b"\x91" * 1000 + b"\x90" + b"\x01" * 5, b"\x92\x1d" + deep):
        with pytest.raises(ProtocolError):
            messages.SCHEMA.unpack(packed)


def test_long_value_is_not_shown() -> None:
    with pytest.raises(ProtocolError) as caught:
        read(messages.SCHEMA, [2, CREDENTIAL, 1, "x" * 10_000, 0, None, 0])
    assert len(str(caught.value)) < 300


def test_int_is_accepted_for_a_float_and_becomes_one() -> None:
    refused = read(messages.SCHEMA, [22, "s", 1, 30, "t"])
    assert refused == Refused("s", Refusal.ALIVE, 30.0, "t")
    assert type(refused.retry_after_s) is float


def test_wire_format_is_unchanged() -> None:
    """Released tags and the order of fields never change. A new field comes last and has a default."""
    beat = Heartbeat(Credential("job", "0", "s0", 1), 2, Activity.TRAINING, 3, RoundId(2, 1), 40)
    assert plain_of(messages.SCHEMA, beat)[:7] == [2, ["job", "0", "s0", 1], 2, 4, 3, [2, 1], 40]
    assert plain_of(records.SCHEMA, records.TrainingFinished(Point(60, 3))) == [9, [60, 3]]


class OddText(str):
    """A str subclass, as torch's version is."""


class OddBytes(bytes):
    pass


class OddNumber(int):
    pass


class OddFloat(float):
    """A float subclass, as numpy's is."""


def test_subclasses_of_plain_types_are_written_as_plain_ones() -> None:
    odd = Refused(OddText("s"), Refusal.ALIVE, OddFloat(1.5), OddText("t"))
    assert messages.SCHEMA.pack(odd) == messages.SCHEMA.pack(Refused("s", Refusal.ALIVE, 1.5, "t"))
    odd_map = messages.AddressMap("job", OddNumber(3), 4, (OddBytes(b"x"),))
    assert messages.SCHEMA.pack(odd_map) == messages.SCHEMA.pack(messages.AddressMap("job", 3, 4, (b"x",)))
    with pytest.raises(TypeError, match="cannot hold values of type object"):
        messages.SCHEMA.pack(messages.Explain("job", 1, Point(1, 1), object()))  # type: ignore[arg-type]


SCHEMAS: dict[str, Schema[Any]] = {
    "messages": messages.SCHEMA,
    "records": records.SCHEMA,
    "copies": copies.SCHEMA,
    "buddy": buddy._SCHEMA,
    "member_info": next_group._SCHEMA,
}


def test_bytes_of_the_last_release_are_read_and_written_unchanged() -> None:
    stored = json.loads(STORED.read_text())
    read_kinds = set()
    for name, kind, packed in stored["packed"]:
        schema, was = SCHEMAS[name], bytes.fromhex(packed)
        value = schema.unpack(was)
        assert type(value).__name__ == kind
        again = schema.pack(value)
        assert again == was or _same(msgpack.unpackb(again), msgpack.unpackb(was)), f"{kind} is written differently"
        read_kinds.add((name, kind))
    assert read_kinds == {(name, kind) for name, kind, _ in stored["packed"]}
    assert len(read_kinds) >= 43


def test_fields_keep_the_order_of_the_last_release() -> None:
    stored = json.loads(STORED.read_text())["fields"]
    found: dict[str, list[str]] = {}
    for schema in SCHEMAS.values():
        for kind in schema.kinds:
            _fields_in(kind, found)
    for name, fields in stored.items():
        assert found[name][: len(fields)] == fields, name


def _fields_in(hint: Any, found: dict[str, list[str]]) -> None:
    for argument in typing.get_args(hint):
        _fields_in(argument, found)
    if isinstance(hint, type) and (issubclass(hint, Value) or hasattr(hint, "_fields")):
        found[hint.__name__] = [*hint.__match_args__]  # type: ignore[attr-defined]
        for inner in typing.get_type_hints(hint).values():
            _fields_in(inner, found)


def test_every_number_is_bounded() -> None:
    """msgpack has integers up to 2⁶⁴, which the core could not write back. Each type is tried with each number too
    large.
    """
    seen = 0
    for name, kind, packed in json.loads(STORED.read_text())["packed"]:
        plain = msgpack.unpackb(bytes.fromhex(packed))
        for spoiled in _with_a_number_too_large(plain):
            with pytest.raises(ProtocolError):
                value = read(SCHEMAS[name], spoiled)
                pytest.fail(f"{kind} is read as {value}")
            seen += 1
    assert seen > 1000


def _with_a_number_too_large(plain: Any) -> typing.Iterator[Any]:
    if type(plain) is int:
        yield 2**63
    elif isinstance(plain, list):
        for at, item in enumerate(plain):
            yield from ([*plain[:at], inner, *plain[at + 1 :]] for inner in _with_a_number_too_large(item))
