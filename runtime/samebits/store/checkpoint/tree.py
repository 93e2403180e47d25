"""Convert trees of plain values to msgpack bytes and back, without changing values or types.

A tree consists of None, bool, int, float, str, bytes, and lists, tuples and dictionaries of those: the part of a state
that is not tensors. Plain msgpack turns a tuple into a list and refuses the 128-bit integers of numpy's generators, and
a state restored only approximately diverges silently. So tuples and large integers are stored as extension types. Any
other value that would not be restored exactly is refused when it is saved; the error gives its place in the tree.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgpack

from samebits.errors import CheckpointError

Tree: TypeAlias = Any

MAX_DEPTH = 64
MAX_ITEMS = 1 << 20  # per list, tuple or dictionary
MAX_TREE_BYTES = 64 * 1024 * 1024

_TUPLE = 1
_LARGE_INTEGER = 2
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


def encode(tree: Tree, name: str = "tree") -> bytes:
    """Encode the tree; raise :class:`CheckpointError` with the place of an unsupported value."""
    _require_plain(tree, name)
    try:
        packed = _pack(tree)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{name} holds text that is not valid unicode: {error}; save it as bytes") from None
    if len(packed) > MAX_TREE_BYTES:
        raise CheckpointError(f"{name}: {len(packed)} bytes; at most {MAX_TREE_BYTES}: keep large values in tensors")
    return packed


def decode(data: bytes) -> Tree:
    """Decode what :func:`encode` returned; raise :class:`ValueError` for any other bytes."""
    try:
        tree = _unpack(data, MAX_DEPTH)
        _require_plain(tree, "tree")  # msgpack supports more than trees do: timestamps, deeper nesting, other keys
    except (TypeError, OverflowError, RecursionError, msgpack.UnpackException, CheckpointError) as error:
        raise ValueError(str(error)) from error
    return tree


def _require_plain(tree: Tree, name: str) -> None:
    found = _fault(tree, MAX_DEPTH)
    if found is not None:
        place, problem = found
        raise CheckpointError(f"{name}{place}: {problem}")


def _fault(value: Tree, depth_left: int) -> tuple[str, str] | None:
    """Return the first place below ``value`` that cannot be saved, and the reason."""
    kind = type(value)  # exact, because a subclass would be restored as its base class
    if kind in _SCALARS:
        return None
    if kind not in (list, tuple, dict):
        return "", (
            f"a {kind.__module__}.{kind.__qualname__} cannot be saved; expected None, bool, int, float, str, "
            "bytes, or lists, tuples and dicts of those: convert it, or keep it as a tensor"
        )
    if depth_left == 0:
        return "", f"nested more than {MAX_DEPTH} deep; flatten it"
    if len(value) > MAX_ITEMS:
        return "", f"{len(value)} items; at most {MAX_ITEMS}: keep large values in tensors"
    if kind is dict:
        for key in value:
            if type(key) not in _SCALARS:
                return "", f"a key of type {type(key).__qualname__}; expected a plain value"
    for key, item in value.items() if kind is dict else enumerate(value):
        if type(item) not in _SCALARS and (found := _fault(item, depth_left - 1)) is not None:
            return f"[{key!r}]{found[0]}", found[1]
    return None


def _pack(tree: Tree) -> bytes:
    packed: bytes = msgpack.packb(tree, default=_pack_extension, strict_types=True)
    return packed


def _pack_extension(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    # All values here have passed _require_plain, so the others are integers of more than 64 bits.
    size = value.bit_length() // 8 + 1
    return msgpack.ExtType(_LARGE_INTEGER, value.to_bytes(size, "little", signed=True))


def _unpack(data: bytes, depth_left: int) -> Tree:
    def unpack_extension(code: int, content: bytes) -> Any:
        if code == _LARGE_INTEGER:
            return int.from_bytes(content, "little", signed=True)
        if code != _TUPLE or depth_left == 0:
            raise ValueError(f"extension type {code} with {depth_left} levels left")
        items = _unpack(content, depth_left - 1)
        if type(items) is not list:
            raise ValueError("a tuple that holds no list")
        return tuple(items)

    return msgpack.unpackb(
        data,
        ext_hook=unpack_extension,
        strict_map_key=False,
        max_str_len=MAX_TREE_BYTES,
        max_bin_len=MAX_TREE_BYTES,
        max_ext_len=MAX_TREE_BYTES,
        max_array_len=MAX_ITEMS,
        max_map_len=MAX_ITEMS,
    )
