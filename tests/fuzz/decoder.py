"""Target: bytes from a socket or a journal record, read by the schemas of messages and records.

One input is the bytes of one message. It is refused as a ``ProtocolError`` with a bounded text, or it is a value that
writes and reads back the same.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Iterator
from typing import Any

from samebits.core import messages, records
from samebits.core.keys import key_store
from samebits.errors import ProtocolError

LONGEST_TEXT = 2000
SCHEMAS = (messages.SCHEMA, records.SCHEMA, key_store.SCHEMA)


def check(data: bytes) -> None:
    for schema in SCHEMAS:
        try:
            value = schema.unpack(data)
        except ProtocolError as error:
            assert 0 < len(str(error)) <= LONGEST_TEXT, f"a refusal of {len(str(error))} characters"
            continue
        hash(value)
        packed = schema.pack(value)
        again = schema.unpack(packed)
        assert type(again) is type(value)
        assert schema.pack(again) == packed, "the value does not write and read back the same"


def seeds() -> Iterator[bytes]:
    """Return one of every message and record."""
    for schema in SCHEMAS:
        for kind in schema.kinds:
            yield schema.pack(_example(kind))


def _example(hint: Any) -> Any:
    """Return a small value of a field's declared type."""
    if hint in _EXAMPLES:
        return _EXAMPLES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return tuple(_example(each) for each in arguments if each is not Ellipsis)
    if origin in (typing.Union, types.UnionType):
        return _example(arguments[0])
    if issubclass(hint, enum.Enum):
        return next(iter(hint))
    hints = typing.get_type_hints(hint)
    return hint(*(_example(hints[name]) for name in hint.__match_args__))


_EXAMPLES: dict[Any, Any] = {int: 300, float: 1.5, bool: True, str: "text", bytes: b"bytes"}
