"""One tensor as the store sees it: a name, a dtype's name, a shape and its bytes; and what makes these four agree.

No arithmetic and no torch here. The one idea: the store never interprets elements, so every dtype that safetensors can
name goes through alike, bfloat16 and the 8-bit floats included.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from samebits.errors import CheckpointError
from samebits.store.durable import BytesLike

# The names of the safetensors format (0.8) and the size of one element; an F4 or F6 tensor must fill whole bytes.
BITS_BY_DTYPE = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class TensorPart(NamedTuple):
    """A tensor's bytes and what they mean; a tuple, because a state has thousands of them.

    Attributes:
        name: unique within one point.
        dtype: the safetensors name, e.g. ``"F32"`` or ``"BF16"``.
        shape: elements along each axis; ``()`` for a scalar.
        data: C-contiguous, little-endian. Written from where it lies; after a read, a writable view into the one
            buffer all tensors of the point share, aligned to the element's size. Empty if an axis is 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: BytesLike


def nbytes_of(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes a tensor has; :class:`CheckpointError` where the format has no such tensor."""
    if dtype not in BITS_BY_DTYPE:
        raise CheckpointError(f"tensor {name!r}: dtype {dtype!r}; expected one of {', '.join(BITS_BY_DTYPE)}")
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise CheckpointError(f"tensor {name!r}: shape {shape}; expected integers from 0 on")
    bits = math.prod(shape) * BITS_BY_DTYPE[dtype]
    if bits % 8:
        raise CheckpointError(f"tensor {name!r}: {dtype} of shape {shape} does not fill whole bytes; pad it")
    return bits // 8


def bytes_of(part: TensorPart) -> memoryview:
    """The part's data as a flat view of bytes, checked against dtype and shape."""
    expected = nbytes_of(part.name, part.dtype, part.shape)
    view = memoryview(part.data)
    if view.nbytes != expected:
        raise CheckpointError(
            f"tensor {part.name!r}: {view.nbytes} bytes; {part.dtype} of shape {part.shape} has {expected}"
        )
    if not view.c_contiguous:
        raise CheckpointError(f"tensor {part.name!r}: its bytes are not contiguous; make it so before it is saved")
    return view.cast("B") if expected else memoryview(b"")
