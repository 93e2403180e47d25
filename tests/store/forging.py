"""Forged points: manifests with arbitrary fields and a correct hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from samebits.store.checkpoint import FoundPoint
from samebits.store.checkpoint import tree as trees

STATE = {
    "shared": {"steps": 10, "values": {"model": {"w": {"$tensor": "weight"}}, "epoch": 1}},
    "own": {"shards": {}},
    "commits": 3,
    "due": {},
}
OTHERS: list[Any] = [None, True, -1, 2**63, 2**80, 1.5, "x", b"x", [], {}, {"a": {}}, [1], {3: [None]}, ("$tensor",)]


def forge(found: FoundPoint, fields: dict[Any, Any]) -> None:
    """Write a manifest with these fields and a correct hash."""
    body = trees.encode(fields, "forged")
    (found.path / "manifest.msgpack").write_bytes(body + b"\xc4\x10" + xxhash.xxh3_128_digest(body))


def fields_of(found: FoundPoint) -> dict[str, Any]:
    fields = trees.decode((found.path / "manifest.msgpack").read_bytes()[:-18])
    assert isinstance(fields, dict)
    return fields


def changes(
    tree: dict[Any, Any], above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Callable[[dict[Any, Any]], None]]]:
    """Omit each key of a tree, and replace its value by each other kind, at every depth."""

    def inner(fields: dict[Any, Any]) -> dict[Any, Any]:
        for key in above:
            fields = fields[key]
        return fields

    for key, value in tree.items():
        name = "/".join(map(str, (*above, key)))
        yield f"without {name}", lambda fields, key=key: inner(fields).pop(key)
        for other in OTHERS:
            yield f"{name} = {other!r}", lambda fields, key=key, other=other: inner(fields).update({key: other})
        if isinstance(value, dict):
            yield from changes(value, (*above, key))
