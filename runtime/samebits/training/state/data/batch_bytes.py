"""Encode nested tensors and plain values, strides included, so that another rank computes the same bits from them.

The format is a msgpack head followed by the tensors' bytes. Strides are sent too, because a kernel may compute
different bits from a different layout. Sizes in the head are checked against the received bytes before use.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import torch
from torch import nn

from samebits.store.checkpoint import TensorPart
from samebits.training.state import snapshot

_LENGTH = struct.Struct("<Q")
_TUPLE = 1  # msgpack's extension type
_ROOT = "batch"
_MOST_GAPS = 4  # limit on a tensor's extent, as a multiple of its size; a tensor with wider gaps is copied without them


def pack(tree: Mapping[str, Any], about: Mapping[str, Any], most_bytes: int) -> bytearray:
    """Encode the nested tensors, and plain values that describe them.

    Raises:
        CheckpointError, TypeError, OverflowError: a value is neither a tensor nor plain.
        ValueError: the tensors exceed ``most_bytes``.
    """
    plain, tensors = snapshot.take_apart(tree, _ROOT)
    layouts = {name: [list(one.stride()), one.requires_grad] for name, one in tensors}
    if len(layouts) < len(tensors):
        raise ValueError("two tensors have the same name")
    size_bytes = sum(one.numel() * one.element_size() for _, one in tensors)
    if size_bytes > most_bytes:
        raise ValueError(f"{size_bytes} bytes, more than {most_bytes}")
    parts = snapshot.parts_of(tensors)
    head = _pack(
        {
            "about": about,
            "tree": plain,
            "layouts": layouts,
            "parts": [[one.name, one.dtype, list(one.shape), memoryview(one.data).nbytes] for one in parts],
        }
    )
    packed = bytearray(_LENGTH.pack(len(head)) + head)
    for one in parts:
        packed += bytes(one.data)
    return packed


def unpack(packed: memoryview, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Decode the result of :func:`pack`: the nested tensors, placed on ``device``, and the values that describe them.

    Raises:
        Exception: the bytes are not valid; they were not used.
    """
    (size_bytes,) = _LENGTH.unpack_from(packed)
    at = _LENGTH.size + size_bytes
    if at > len(packed):
        raise ValueError(f"a head of {size_bytes} bytes in {len(packed)}")
    head = _unpack(bytes(packed[_LENGTH.size : at]))
    parts = {}
    for name, dtype, shape, part_bytes in head["parts"]:
        if part_bytes < 0 or at + part_bytes > len(packed):
            raise ValueError(f"{name} has {part_bytes} bytes, more than came")
        parts[name] = TensorPart(name, dtype, tuple(shape), memoryview(bytearray(packed[at : at + part_bytes])))
        at += part_bytes
    return _placed(snapshot.join(head["tree"], parts), head["layouts"], device, _ROOT), head["about"]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    return _laid_out(tensor.detach(), tensor.stride(), tensor.device)


def copy_of(value: Any) -> Any:
    """Return the nested structure with a copy of each tensor.

    Raises:
        TypeError: a tensor belongs to a subclass of torch's.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise TypeError(f"a {type(value).__name__}")
        return copied(value).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: copy_of(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_of(item) for item in value)
    return value


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a copy with the given strides, in which expanded dimensions stay expanded."""
    once = tensor
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            once = once.narrow(dimension, 0, 1)
    own = [max(one, 1) for one in strides]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(once.shape, own, strict=True))
    if once.numel() <= extent <= _MOST_GAPS * once.numel():
        laid_out = torch.empty_strided(once.shape, own, dtype=tensor.dtype, device=device)
    else:  # a small part of a large tensor, or one whose elements share their memory
        laid_out = torch.empty(once.shape, dtype=tensor.dtype, device=device)
    return laid_out.copy_(once).expand(tensor.shape)


def _placed(value: Any, layouts: Mapping[str, Any], device: torch.device, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        strides, requires_grad = layouts[path]
        return _laid_out(value, tuple(strides), device).requires_grad_(requires_grad)
    if isinstance(value, dict):
        return {key: _placed(item, layouts, device, f"{path}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placed(item, layouts, device, f"{path}.{place}") for place, item in enumerate(value))
    return value


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, strict_types=True, use_bin_type=True, default=_tuple_packed)
    return packed


def _tuple_packed(value: Any) -> msgpack.ExtType:
    if type(value) is not tuple:
        raise TypeError(f"a {type(value).__name__}")
    return msgpack.ExtType(_TUPLE, _pack(list(value)))


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=False, ext_hook=_tuple_of)


def _tuple_of(code: int, packed: bytes) -> tuple[Any, ...]:
    if code != _TUPLE:
        raise ValueError(f"msgpack's extension type {code}")
    return tuple(_unpack(packed))
