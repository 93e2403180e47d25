"""Frozen values ↔ plain lists, strictly: the one description of every message and every journal record.

A ``Schema`` is a closed set of dataclasses, with named tuples inside some, each with a small integer tag. ``to_plain``
gives ``[tag, field, …]`` made of None, bool, int, float, str, bytes and lists; ``from_plain`` accepts exactly that and
nothing else: a wrong tag, a missing or surplus field, a bool where an int belongs or an unknown enum value raises
:class:`ProtocolError` and builds nothing. ``pack`` and ``unpack`` are the same as msgpack bytes, bounded before they
are parsed.

Readers come in two: a strict one, made of closures, that says what is wrong; and before it a quick one, compiled from
the same hints (as ``dataclasses`` makes ``__init__``), that takes what is right and hands over anything else. A
scheduler of ten thousand reads ten thousand heartbeats a second, and hardly ever one that is wrong.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgpack

from runtime.errors import ProtocolError

Plain: TypeAlias = "bool | int | float | str | bytes | list[Plain] | None"

_INT64 = range(-(2**63), 2**63)
_SCALARS = (bool, int, float, str, bytes)
_CHECKS: dict[Any, str] = {  # a float's is missing: it may come as an integer, and becomes one
    str: "type({0}) is str",
    bytes: "type({0}) is bytes",
    bool: "type({0}) is bool",
    int: "type({0}) is int and LOW <= {0} < HIGH",
}


class Schema:
    """A closed set of dataclasses that can be written and read.

    Args:
        types_by_tag: wire tag → frozen dataclass. A tag is never given to another type once released.
    """

    def __init__(self, types_by_tag: Mapping[int, type]) -> None:
        self._readers = {tag: _value_reader(kind, first=1) for tag, kind in types_by_tag.items()}
        self._writers = {kind: _value_writer(kind, tag) for tag, kind in types_by_tag.items()}
        if len(self._writers) != len(self._readers):
            raise ValueError("one type under two tags")

    def to_plain(self, value: object) -> list[Plain]:
        """``[tag, field, …]`` of one of the schema's dataclasses."""
        return self._writers[type(value)](value)

    def pack(self, value: object) -> bytes:
        """``to_plain`` as msgpack."""
        packed: bytes = msgpack.packb(self._writers[type(value)](value), use_bin_type=True)
        return packed

    def unpack(self, packed: bytes | memoryview, max_bytes: int = 1 << 20) -> Any:
        """The dataclass that ``pack`` was given. Longer than ``max_bytes`` or malformed: :class:`ProtocolError`."""
        if len(packed) > max_bytes:
            raise ProtocolError(f"{len(packed)} bytes, at most {max_bytes} are accepted")
        try:
            plain = msgpack.unpackb(packed, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from None
        return self.from_plain(plain)

    def from_plain(self, plain: object) -> Any:
        """The dataclass that ``to_plain`` was given; anything else raises :class:`ProtocolError`."""
        if type(plain) is not list or not plain:
            raise ProtocolError(f"expected a list that begins with a tag, found {_shown(plain)}")
        tag = plain[0]
        if type(tag) is not int or tag not in self._readers:
            raise ProtocolError(f"unknown tag {_shown(tag)}")
        return self._readers[tag](plain)


def _shown(value: object) -> str:
    if isinstance(value, (str, bytes)):
        return f"{type(value).__name__} {value[:40]!r}{'…' if len(value) > 40 else ''}"
    if isinstance(value, (bool, float)) or (isinstance(value, int) and value in _INT64):
        return f"{type(value).__name__} {value}"
    return f"a {type(value).__name__}"  # repr() of what a peer nested a thousand deep would not come back


_Reader: TypeAlias = Callable[[Any], Any]
_Writer: TypeAlias = Callable[[Any], Plain]


def _is_value(hint: Any) -> bool:
    """Whether it is one of our values: a dataclass or a named tuple."""
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, tuple))


def _fields(kind: Any) -> list[tuple[str, Any]]:
    """The names and types of a value's fields."""
    hints = typing.get_type_hints(kind)
    return [(name, hints[name]) for name in kind.__match_args__]


def _value_reader(kind: type, first: int = 0) -> _Reader:
    """Reads the fields, from item ``first`` of the list on."""
    fields = _fields(kind)
    readers = [(name, _reader(hint)) for name, hint in fields]

    def read(plain: Any) -> Any:
        if not isinstance(plain, list) or len(plain) != first + len(readers):
            raise ProtocolError(f"{kind.__name__}: expected {len(readers)} fields, found {_shown(plain)}")
        values = []
        for (name, reader), item in zip(readers, plain[first:], strict=True):
            try:
                values.append(reader(item))
            except ProtocolError as error:
                raise ProtocolError(f"{kind.__name__}.{name}: {error}") from None
        return kind(*values)

    return _quick_reader([hint for _, hint in fields], [reader for _, reader in readers], kind, read, first)


def _quick_reader(
    hints: list[Any], readers: list[_Reader], build: type | None, strict: _Reader, first: int = 0
) -> _Reader:
    """Takes a list of exactly these items and makes ``build`` of them, or a tuple; all else is left to ``strict``."""
    scope: dict[str, Any] = {"strict": strict, "LOW": _INT64.start, "HIGH": _INT64.stop}
    scope["ProtocolError"] = ProtocolError
    checks, values = ["type(plain) is list", f"len(plain) == {first + len(hints)}"], []
    for index, (hint, reader) in enumerate(zip(hints, readers, strict=True)):
        item = f"plain[{first + index}]"
        scope[f"read_{index}"] = reader
        if check := _CHECKS.get(hint):
            checks.append(check.format(item))
            values.append(item)
        elif type(None) in typing.get_args(hint):
            values.append(f"None if {item} is None else read_{index}({item})")
        else:
            values.append(f"read_{index}({item})")
    source = f"""
def quick(plain):
    if {" and ".join(checks)}:
        try:
            {_making(build, values, scope)}
        except ProtocolError:
            pass  # said again below, with the way to it
    return strict(plain)
"""
    return _compiled(source, scope)


def _quick_reader_of_many(hint: Any, strict: _Reader) -> _Reader:
    """Takes a list, of any length, of scalars or of fixed tuples of them; all else is left to ``strict``.

    The members and slots of a generation of ten thousand are two such lists.
    """
    scope: dict[str, Any] = {"strict": strict, "LOW": _INT64.start, "HIGH": _INT64.stop}
    if check := _CHECKS.get(hint):
        checks, value = [check.format("item")], "item"
    else:
        items = [f"item[{index}]" for index in range(len(typing.get_args(hint)))]
        checks = ["type(item) is list", f"len(item) == {len(items)}"]
        checks += [_CHECKS[inner].format(item) for inner, item in zip(typing.get_args(hint), items, strict=True)]
        value = f"({', '.join(items)},)"
    source = f"""
def quick(plain):
    if type(plain) is list:
        values = [{value} for item in plain if {" and ".join(checks)}]
        if len(values) == len(plain):
            return tuple(values)
    return strict(plain)
"""
    return _compiled(source, scope)


def _compiled(source: str, scope: dict[str, Any]) -> _Reader:
    exec(source, scope)
    quick: _Reader = scope["quick"]
    return quick


def _is_quick_item(hint: Any) -> bool:
    """Whether it is a scalar, or a fixed tuple of scalars, that is right by its type alone."""
    arguments = typing.get_args(hint)
    return hint in _CHECKS or (typing.get_origin(hint) is tuple and bool(arguments) and _CHECKS.keys() >= {*arguments})


def _making(build: type | None, values: list[str], scope: dict[str, Any]) -> str:
    """Statements that return what is made of these values: of a slotted dataclass, what its ``__init__`` would make.

    A frozen one's goes through ``object.__setattr__`` by name, which takes twice as long as the slots themselves.
    """
    if build is None:
        return f"return ({', '.join(values)},)"
    scope["build"] = build
    if issubclass(build, tuple):
        scope["new"] = tuple.__new__
        return f"return new(build, ({', '.join(values)},))"
    if "__slots__" not in vars(build) or hasattr(build, "__post_init__"):
        return f"return build({', '.join(values)})"
    scope["new"] = object.__new__
    statements = ["made = new(build)"]
    for (name, _), value in zip(_fields(build), values, strict=True):
        scope[f"set_{name}"] = vars(build)[name].__set__
        statements.append(f"set_{name}(made, {value})")
    return "; ".join([*statements, "return made"])


def _value_writer(kind: type, tag: int | None = None) -> Callable[[Any], list[Plain]]:
    """Writes the fields, after the tag if there is one."""
    scope: dict[str, Any] = {}
    items = [] if tag is None else [str(tag)]
    for name, hint in _fields(kind):
        if hint in _SCALARS:
            items.append(f"value.{name}")
        else:
            scope[f"write_{name}"] = _writer(hint)
            items.append(f"write_{name}(value.{name})")
    exec(f"def write(value):\n    return [{', '.join(items)}]", scope)
    write: Callable[[Any], list[Plain]] = scope["write"]
    return write


def _reader(hint: Any) -> _Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        read_inner = _reader(inner)
        return lambda plain: None if plain is None else read_inner(plain)
    if origin is tuple:
        return _tuple_reader(arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_reader(hint)
    if _is_value(hint):
        return _value_reader(hint)
    return _scalar_reader(hint)


def _scalar_reader(kind: type) -> _Reader:
    accepted = (int, float) if kind is float else (kind,)

    def read(plain: Any) -> Any:
        if type(plain) not in accepted:
            raise ProtocolError(f"expected {kind.__name__}, found {_shown(plain)}")
        if type(plain) is int and plain not in _INT64:
            raise ProtocolError(f"expected an integer of 64 bits, found {_shown(plain)}")
        return float(plain) if kind is float else plain

    return read


def _tuple_reader(arguments: tuple[Any, ...]) -> _Reader:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        read_item = _reader(arguments[0])

        def read_many(plain: Any) -> Any:
            if not isinstance(plain, list):
                raise ProtocolError(f"expected a list, found {_shown(plain)}")
            return tuple([read_item(item) for item in plain])

        read = _quick_reader_of_many(arguments[0], read_many) if _is_quick_item(arguments[0]) else read_many
        return _remembering(read) if _is_of_text(arguments[0]) else read
    readers = [_reader(argument) for argument in arguments]

    def read_each(plain: Any) -> Any:
        if not isinstance(plain, list) or len(plain) != len(readers):
            raise ProtocolError(f"expected {len(readers)} items, found {_shown(plain)}")
        return tuple(reader(item) for reader, item in zip(readers, plain, strict=True))

    return _quick_reader(list(arguments), readers, None, read_each)


def _remembering(read: _Reader) -> _Reader:
    """Reads what was read last to the same object: settings and numerics, which everybody says alike.

    Only for lists in which nothing but text passes: of other values two that are equal need not both be right
    (``1 == True``).
    """
    last: tuple[Any, Any] = (None, None)

    def read_or_remember(plain: Any) -> Any:
        nonlocal last
        before, value = last
        if plain != before or value is None:
            value = read(plain)
            last = (plain, value)
        return value

    return read_or_remember


def _is_of_text(hint: Any) -> bool:
    """Whether it is a fixed tuple of text."""
    return typing.get_origin(hint) is tuple and set(typing.get_args(hint)) == {str}


def _enum_reader(kind: type[enum.Enum]) -> _Reader:
    by_value = {member.value: member for member in kind}

    def read(plain: Any) -> Any:
        if (type(plain) is int or type(plain) is str) and (member := by_value.get(plain)) is not None:
            return member
        raise ProtocolError(f"expected one of {sorted(map(str, by_value))}, found {_shown(plain)}")

    return read


def _writer(hint: Any) -> _Writer:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        write_inner = _writer(inner)
        return lambda value: None if value is None else write_inner(value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            if arguments[0] in _SCALARS:
                return list
            write_item = _writer(arguments[0])
            return lambda value: [write_item(item) for item in value]
        if all(argument in _SCALARS for argument in arguments):
            return list
        writers = [_writer(argument) for argument in arguments]
        return lambda value: [write(item) for write, item in zip(writers, value, strict=True)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return lambda value: value.value
    if _is_value(hint):
        is_plain_tuple = issubclass(hint, tuple) and all(inner in _SCALARS for _, inner in _fields(hint))
        return list if is_plain_tuple else _value_writer(hint)
    return lambda value: value
