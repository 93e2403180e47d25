"""Base class of frozen values that are sent or stored, and their serialisation.

A value is written as a msgpack array of its fields, preceded by its tag if it has one. Reading is strict: a wrong type,
a bool instead of an int, an additional field, a map or a number of more than 64 bits raises :class:`ProtocolError`.
Missing fields at the end get their default values, so data of earlier releases can be read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta as Meta

from samebits.errors import ProtocolError
from samebits.printable import printable

MAX_ID_CHARS = 64  # sessions and job ids: a UUID has 36
MAX_NAME_CHARS = 200  # as JOB_NAME
MAX_NODE_CHARS = 128  # as NODE_ID
MAX_HOST_CHARS = 320  # a host name of 253 (RFC 1035) and a suffix that distinguishes hosts of the same name
MAX_ITEMS = 4096
"""Most items in a list from a worker that has no limit of its own, such as its restore points."""
MAX_MEMBERS = 1 << 17
"""Most items in a list from the scheduler. MAX_WORKER_NUM may be a hundred thousand."""
_LARGEST_FLOAT = 1.7976931348623157e308
_LINE, _TEXT = "line", "text"


def line(most: int, least: int = 0, **more: Any) -> Meta:
    """Return the constraints on text from a peer: its length, and only printable characters.

    msgspec checks the length while reading, and :func:`unprintable` checks the characters.
    """
    return Meta(min_length=least, max_length=most, extra={"kind": _LINE}, **more)


_Of = TypeVar("_Of")
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Signed 64-bit number. msgpack reads larger ones, which could not be written back."""
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # the limit of every time setting
Share = Annotated[float, Meta(ge=0, le=1e6)]
Finite = Annotated[float, Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]  # neither infinite nor NaN
Hash = Annotated[bytes, Meta(max_length=MAX_ID_CHARS)]
Id = Annotated[str, line(MAX_ID_CHARS)]
Name = Annotated[str, line(MAX_NAME_CHARS)]
NodeId = Annotated[str, line(MAX_NODE_CHARS)]
HostName = Annotated[str, line(MAX_HOST_CHARS)]
Text = Annotated[str, Meta(extra={"kind": _TEXT})]
"""Text for people in a :class:`TextValue`: made into one printable line when created or read.

Its length has no limit, so that there is room for escapes.
"""
Few = Annotated[tuple[_Of, ...], Meta(max_length=MAX_ITEMS)]
Many = Annotated[tuple[_Of, ...], Meta(max_length=MAX_MEMBERS)]

replace = msgspec.structs.replace


class Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base class of values that are written as an array of their fields.

    Types that a schema distinguishes by number have ``tag=``. A released tag is never reused, the order of fields never
    changes, and new fields come last and have a default. ``gc=False`` is safe because no value can refer to itself.
    """


class TextValue(Value, frozen=True):
    """Base of values with a field of type :data:`Text`."""

    def __post_init__(self) -> None:
        for name in _texts_of(type(self)):
            if not (text := getattr(self, name)).isprintable():
                msgspec.structs.force_setattr(self, name, printable(text))


@functools.cache
def _texts_of(kind: type[Value]) -> tuple[str, ...]:
    """Return the names of the fields of type :data:`Text`."""
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return tuple(one.name for one in fields if getattr(one.type, "extra", None) == {"kind": _TEXT})


def unprintable(value: Any) -> str | None:
    """Return the path of the first field that is not one printable line, or None.

    Only values from a peer are checked, so that our own text cannot raise an error in one of our threads.
    """
    found = _finder_of(type(value))(value)  # type: ignore[arg-type]  # classes are hashable; mypy disagrees
    return None if found is None else f"{type(value).__name__}{found}"


_Finder = Callable[[Any], "str | None"]
"""Returns the path, such as ``.sender.node``, of the first unprintable text in a value."""


def _nothing(value: object) -> None:
    return None


@functools.cache
def _finder_of(kind: type) -> _Finder:
    return _finder(msgspec.inspect.type_info(kind)) or _nothing


def _finder(info: Any) -> _Finder | None:
    """Return a function that finds unprintable text in values of this type, or None if the type has no such text."""
    match info:
        case msgspec.inspect.Metadata(extra={"kind": "line"}):
            return lambda text: None if text.isprintable() else ""
        case msgspec.inspect.Metadata(type=inner):
            return _finder(inner)
        case msgspec.inspect.StructType(fields=fields) | msgspec.inspect.NamedTupleType(fields=fields):
            return _finder_in_fields([(one.name, attrgetter(one.name), _finder(one.type)) for one in fields])
        case msgspec.inspect.VarTupleType(item_type=msgspec.inspect.TupleType(item_types=items)):
            # Pairs of texts are joined first: ten thousand workers register with the same thirty settings.
            are_lines = all(getattr(one, "extra", None) == {"kind": _LINE} for one in items)
            return (lambda pairs: None if "".join(chain(*pairs)).isprintable() else "") if are_lines else None
        case msgspec.inspect.VarTupleType(item_type=item):
            find = _finder(item)
            return None if find is None else lambda values: next((x for x in map(find, values) if x is not None), None)
        case msgspec.inspect.UnionType(types=types):
            kinds = {getattr(one, "cls", str): found for one in types if (found := _finder(one)) is not None}
            return (lambda value: kinds.get(type(value), _nothing)(value)) if kinds else None
        case _:
            return None


def _finder_in_fields(fields: list[tuple[str, Callable[[Any], Any], _Finder | None]]) -> _Finder | None:
    inside = [(name, get, find) for name, get, find in fields if find is not None]

    def find_in(value: Any) -> str | None:
        for name, get, find in inside:
            if (below := find(get(value))) is not None:
                return f".{name}{below}"
        return None

    return find_in if inside else None


_PLAIN: tuple[Any, ...] = (str, bytes, int, float, list, tuple)


def _plain(value: object) -> object:
    """Convert a subclass of a plain type, such as torch's version, which msgspec would refuse."""
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a message cannot hold values of type {type(value).__name__}")


def _escaped(plain: Any) -> Any:
    if isinstance(plain, str):
        return printable(plain)
    return [_escaped(one) for one in plain] if isinstance(plain, list | tuple) else plain


class Schema(Generic[_Of]):
    """A closed set of values that can be written and read.

    Args:
        kinds: one class, or a union of classes that each have a tag.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self.kinds: tuple[type, ...] = getattr(kinds, "__args__", (kinds,))

    def pack(self, value: object) -> bytes:
        """Return the value as msgpack. Text that is not valid UTF-8 is escaped."""
        try:
            return self._encoder.encode(value)
        except UnicodeEncodeError:
            plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain)
            return self._encoder.encode(_escaped(plain))

    def unpack(self, packed: bytes | memoryview, max_bytes: int = 1 << 20) -> _Of:
        """Return the value written by ``pack``.

        Raises:
            ProtocolError: ``packed`` is longer than ``max_bytes`` or malformed.
        """
        if len(packed) > max_bytes:
            raise ProtocolError(f"{len(packed)} bytes, at most {max_bytes} are accepted")
        try:
            value: _Of = self._decoder.decode(packed)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ProtocolError(f"malformed: {error}") from None
        return value
