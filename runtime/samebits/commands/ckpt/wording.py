"""Format sizes, ages and a state's values, as short text for people and as lossless JSON for programs.

A value that JSON cannot represent (bytes, tuples, keys that are not strings, NaN) becomes an object with one key that
names its type, so different values never look the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from samebits.store.checkpoint import Tree

TENSOR_KEY = "$tensor"  # replaces a tensor in a state's tree
KIND_KEY = "$as"  # names the type of a value that is not of one of the tree's own types
SHOWN_ITEMS = 6
SHOWN_CHARACTERS = 80
_MOST_INTEGER_BITS = 14_000  # about as many digits as Python writes (sys.set_int_max_str_digits)
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size_text(size_bytes: float) -> str:
    """Format a size: ``17 bytes``, ``3.1 MiB``."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} bytes"
    size = size_bytes / 1024
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def age_text(age_s: float) -> str:
    """Format an age: ``12 s``, ``5 min``, ``3 h``, ``4 days``."""
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if age_s < limit_s:
            return f"{max(0.0, age_s) / unit_s:.0f} {unit}"
    return f"{age_s / 86_400:.0f} days"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table with columns as wide as their widest cell; the last column is not padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def jsonable(tree: Tree) -> Any:
    """Return the tree as JSON values; tuples, bytes, nan and other keys become objects that name their type."""
    if isinstance(tree, dict):
        looks_like_ours = len(tree) == 1 and str(next(iter(tree))).startswith("$") and TENSOR_KEY not in tree
        if all(type(key) is str for key in tree) and not looks_like_ours:
            return {key: jsonable(item) for key, item in tree.items()}
        return {"$dict": [[jsonable(key), jsonable(item)] for key, item in tree.items()]}
    if isinstance(tree, tuple):
        return {"$tuple": [jsonable(item) for item in tree]}
    if isinstance(tree, list):
        return [jsonable(item) for item in tree]
    if isinstance(tree, bytes):
        return {"$bytes": tree.hex()}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"$float": repr(tree)}
    if isinstance(tree, int) and tree.bit_length() > _MOST_INTEGER_BITS:
        return {"$int": hex(tree)}
    return tree


def plain_values(tree: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every value of the tree that is not a tensor, with its path; long values are shortened."""
    if isinstance(tree, dict):
        if TENSOR_KEY in tree:
            return
        if KIND_KEY in tree and isinstance(tree.get("items"), list | dict):
            yield path, f"{tree[KIND_KEY]} of {len(tree['items'])}"
            return
        if tree:
            for key, item in tree.items():
                yield from plain_values(item, f"{path}.{key}" if path else str(key))
            return
    if isinstance(tree, list | tuple) and any(isinstance(item, dict | list | tuple) for item in tree):
        for index, item in enumerate(tree):
            yield from plain_values(item, f"{path}.{index}")
        return
    yield path, value_text(tree)


def value_text(value: Tree) -> str:
    """Return a value as one line."""
    if isinstance(value, list | tuple) and len(value) > SHOWN_ITEMS:
        shown = ", ".join(value_text(item) for item in value[:SHOWN_ITEMS])
        return f"{type(value).__name__} of {len(value)}: {shown}, …"
    if isinstance(value, bytes) and len(value) > SHOWN_ITEMS:
        return f"{len(value)} bytes"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes (sys.set_int_max_str_digits)
        return "an integer of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__} with one"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
