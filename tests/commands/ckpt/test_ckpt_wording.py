"""Formatting of values: lossless in JSON, short for people."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.commands.ckpt.wording import SHOWN_ITEMS, age_text, jsonable, plain_values, size_text, value_text
from samebits.store.checkpoint import Tree

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.text(max_size=5) | st.integers() | st.sampled_from(["$tuple", "$dict", "$bytes", "$float"])
TREES = st.recursive(
    SCALARS,
    lambda items: (
        st.lists(items, max_size=4) | st.lists(items, max_size=4).map(tuple) | st.dictionaries(KEYS, items, max_size=4)
    ),
    max_leaves=12,
)


def back(value: object) -> Tree:
    """Return the tree that ``jsonable`` was given."""
    if isinstance(value, list):
        return [back(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        match key:
            case "$dict":
                return {back(one): back(other) for one, other in inner}
            case "$tuple":
                return tuple(back(item) for item in inner)
            case "$bytes":
                return bytes.fromhex(inner)
            case "$float":
                return float(inner)
    return {key: back(item) for key, item in value.items()}


@given(TREES)
def test_json_restores_every_tree(tree: Tree) -> None:
    found = back(json.loads(json.dumps(jsonable(tree), allow_nan=False)))
    assert repr(found) == repr(tree)  # by repr, since nan does not equal itself and True equals 1


def test_plain_values_are_listed_by_path_without_tensors() -> None:
    tree = {"model": {"w": {"$tensor": "model.w"}}, "groups": [{"lr": 0.1, "p": list(range(20))}], "empty": {}, 3: b"x"}
    tree["last"] = {"w": {"$tensor": "last.w", "strides": [1, 2]}}
    tree["seen"] = {"$as": "Counter", "items": {"a": 1, "b": 2}}
    assert dict(plain_values(tree, "state")) == {
        "state.groups.0.lr": "0.1",
        "state.groups.0.p": "list of 20: 0, 1, 2, 3, 4, 5, …",
        "state.empty": "{}",
        "state.3": "b'x'",
        "state.seen": "Counter of 2",
    }
    assert value_text([*range(SHOWN_ITEMS)]) == "[0, 1, 2, 3, 4, 5]"
    assert value_text(b"0123456789") == "10 bytes"
    assert len(value_text("x" * 1000)) == 81


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(-1.0, "0 s"), (119, "119 s"), (600, "10 min"), (7200, "2 h"), (864_000, "10 days")],
)
def test_ages(age_s: float, text: str) -> None:
    assert age_text(age_s) == text
