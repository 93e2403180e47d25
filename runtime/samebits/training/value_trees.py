"""Walk, rebuild and copy a state's containers and tensors, preserving types and strides.

The list of supported container types is fixed, and any other value is a leaf. No file and no other rank can therefore
name a type to import. ``state.snapshot`` saves the leaves.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, tuple, dict, set)}
"""Factories that a ``defaultdict`` may have, by name."""
_MAPPINGS = frozenset({dict, OrderedDict, Counter, defaultdict})
_SEQUENCES = frozenset({list, tuple, deque})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def children(value: object) -> Iterable[tuple[Any, Any]] | None:
    """Return a container's items with their keys or indices, or None for a leaf.

    Sets, and subclasses of containers, are leaves.
    """
    kind = type(value)
    if kind in _MAPPINGS:
        return value.items()  # type: ignore[attr-defined, no-any-return]
    if kind in _SEQUENCES:
        return enumerate(value)  # type: ignore[arg-type]
    return None


def rebuilt(like: Any, items: Sequence[tuple[Any, Any]]) -> Any:
    """Return a container of the same type as ``like`` that holds these items."""
    kind = type(like)
    if kind is defaultdict:
        return defaultdict(like.default_factory, items)
    if kind is Counter:
        counter: Counter[Any] = Counter()
        dict.update(counter, items)  # Counter.update would add the counts
        return counter
    if kind in _MAPPINGS:
        return kind(items)
    values = (value for _, value in items)
    return deque(values, like.maxlen) if kind is deque else kind(values)


def is_plain_tensor(value: object) -> bool:
    """Return whether the value is a tensor of torch's own classes, defined by its bytes, dtype and strides."""
    return type(value) in (torch.Tensor, nn.Parameter)


@functools.lru_cache(maxsize=4096)  # called for every tensor at every save
def plain_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def laid_out(values: torch.Tensor, strides: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Return a copy with exactly these strides, in newly allocated memory.

    Elements that share memory in the original, as an expanded tensor's do, share it in the copy.

    Raises:
        ValueError: no tensor of this shape has such strides.
    """
    values, strides = values.detach(), tuple(strides)
    if len(strides) != values.dim() or any(stride < 0 for stride in strides):
        raise ValueError(f"strides {strides} for a tensor of shape {tuple(values.shape)}")
    device = values.device if device is None else device
    if not _overlap(values.shape, strides):
        return torch.empty_strided(values.shape, strides, dtype=values.dtype, device=device).copy_(values)
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    places = torch.arange(span).as_strided(values.shape, strides).reshape(-1)
    known = _INTEGERS.get(values.dtype.itemsize)  # indexing is not defined for every dtype
    flat = values.cpu().reshape(-1)
    memory = torch.zeros(span, dtype=values.dtype)
    if known is None:
        memory[places] = flat
    else:
        memory.view(known)[places] = flat.view(known)
    return memory.to(device).as_strided(values.shape, strides)


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of the tensor may share memory, so that values must not be copied into it."""
    if tensor.layout is not torch.strided or tensor.stride() == plain_strides(tensor.shape):
        return False
    return _overlap(tensor.shape, tensor.stride())


def _overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides; a leaf that requires a gradient stays a leaf, a parameter a parameter."""
    copy = tensor.detach().clone()
    if is_plain_tensor(tensor) and tensor.layout is torch.strided and copy.stride() != tensor.stride():
        copy = laid_out(tensor, tensor.stride())
    if type(tensor) is nn.Parameter:
        return nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_() if tensor.requires_grad and tensor.is_leaf else copy


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bits."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
