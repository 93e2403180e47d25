"""Frozen values that travel or are stored, and their bytes: the base class, and the one way in and out.

Here live the base of every message and record, the bounds of a number, and :class:`Schema`; which values there are is
said where they are defined. A value is written as a msgpack array of its fields, after its tag where it has one. What
is read is exactly that: a wrong type, a bool where an int belongs, a surplus field, a map or a number of more than 64
bits raises :class:`ProtocolError`, and nothing is built. Fields with a default that are missing at the end have it, so
what an earlier release wrote stays readable.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from samebits.errors import ProtocolError
from samebits.printable import printable

__all__ = ["Int", "Meta", "Schema", "Told", "Value", "replace"]

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A signed number of 64 bits: msgpack has twice as many, and whoever writes it back would fail."""

replace = msgspec.structs.replace


class Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of what is written as an array of its fields. No value can refer to itself, so none needs the collector.

    A type that a schema tells apart by its number is defined with ``tag=``. A tag is never given to another type once
    released, the order of fields never changes, and a new field stands last and has a default.
    """


_FOR_PEOPLE = ("text", "reason", "cause", "missing")
"""Fields of a :class:`Told`; their length is not bounded, so that an escape has room. Ids are judged, not escaped."""


class Told(Value, frozen=True):
    """Base of values with text for people: it is one printable line from the moment the value is made, or read."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name in _FOR_PEOPLE and not (text := getattr(self, name)).isprintable():
                msgspec.structs.force_setattr(self, name, printable(text))


_Of = TypeVar("_Of")
_PLAIN: tuple[Any, ...] = (str, bytes, int, float, list, tuple)


def _plain(value: object) -> object:
    """What a library's own kind of text or number is, such as torch's version: msgspec writes the plain kinds only."""
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a message has no place for {type(value).__name__}")


def _escaped(plain: Any) -> Any:
    if isinstance(plain, str):
        return printable(plain)
    return [_escaped(one) for one in plain] if isinstance(plain, list | tuple) else plain


class Schema(Generic[_Of]):
    """A closed set of values that can be written and read.

    Args:
        kinds: their type: one class, or the union of several that each have a tag.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self.kinds: tuple[type, ...] = getattr(kinds, "__args__", (kinds,))

    def pack(self, value: object) -> bytes:
        """Return the value as msgpack; text that has no UTF-8 is escaped."""
        try:
            return self._encoder.encode(value)
        except UnicodeEncodeError:
            plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain)
            return self._encoder.encode(_escaped(plain))

    def unpack(self, packed: bytes | memoryview, max_bytes: int = 1 << 20) -> _Of:
        """The value that ``pack`` was given. Longer than ``max_bytes`` or malformed: :class:`ProtocolError`."""
        if len(packed) > max_bytes:
            raise ProtocolError(f"{len(packed)} bytes, at most {max_bytes} are accepted")
        try:
            value: _Of = self._decoder.decode(packed)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ProtocolError(f"malformed: {error}") from None
        return value
