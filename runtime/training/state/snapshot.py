"""A nested state with tensors ↔ named tensor bytes and a plain tree: the form in which it is stored and sent.

``take_apart`` takes the tensors out of a state (anything ``state_dict()`` returns) and leaves their names, ``split``
gives their bytes as well; ``join`` puts them back. Values that are neither tensors nor plain are refused by their path
when the state is saved, not when it is missed.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from runtime.errors import CheckpointError
from runtime.store.checkpoint import TensorPart, Tree

_TENSOR = "$tensor"  # {"$tensor": name} stands where a tensor was

_NAME_OF_DTYPE = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_SAME_SIZE_IN_NUMPY = {  # of what numpy has no name for
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")
"""All of this process's: a slice of it costs a tenth of what numpy makes of a tensor, and keeps nothing alive."""
_PLAIN = (type(None), bool, int, float, str, bytes)
_DTYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_DTYPE.items()}


NamedTensors: TypeAlias = list[tuple[str, torch.Tensor]]


def take_apart(state: Any, path: str) -> tuple[Tree, NamedTensors]:
    """The state's plain tree and its tensors as they are, named by their path below ``path``.

    Raises:
        CheckpointError: a value that cannot be saved faithfully, named by its path.
    """
    tensors: NamedTensors = []
    return _take_apart(state, path, tensors), tensors


def split(state: Any, path: str) -> tuple[Tree, list[TensorPart]]:
    """As :func:`take_apart`, with the tensors' bytes.

    CPU tensors are not copied: they must not change until the parts were used.
    """
    tree, tensors = take_apart(state, path)
    return tree, parts_of(tensors)


def parts_of(tensors: NamedTensors) -> list[TensorPart]:
    """The tensors as the store takes them; what is contiguous and on the CPU is not copied."""
    return [
        TensorPart(name, dtype_name(name, tensor), tuple(tensor.shape), bytes_of(tensor)) for name, tensor in tensors
    ]


def _take_apart(value: Any, path: str, tensors: NamedTensors) -> Tree:
    if isinstance(value, torch.Tensor):
        tensors.append((path, value))
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(f"{path}: its keys must be texts or integers to be saved")
        return {key: _take_apart(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [_take_apart(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else tuple(items)
    if isinstance(value, enum.Enum) or type(value) not in _PLAIN:
        raise CheckpointError(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved: keep a tensor, a plain "
            "value, or an object with state_dict() and load_state_dict() there"
        )
    return value


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """The store's name of the tensor's dtype; :class:`CheckpointError` where it has none."""
    dtype = _NAME_OF_DTYPE.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise CheckpointError(f"{name}: a tensor of {tensor.dtype}, {tensor.layout} cannot be saved")
    return dtype


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; a view of its memory where it is a contiguous CPU tensor."""
    return _view_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def in_place(tensors: NamedTensors) -> dict[str, TensorPart]:
    """Those tensors, by name, whose bytes lie in their own memory as the store has them.

    Good only as long as the tensors are there, as they are: the parts do not keep them.
    """
    found = {}
    for name, one in tensors:
        dtype = _NAME_OF_DTYPE.get(one.dtype)
        if dtype is not None and _lies_plainly(one):
            address, size_bytes = one.data_ptr(), one.nbytes
            if address or not size_bytes:  # else its storage was taken away
                found[name] = TensorPart(name, dtype, tuple(one.shape), _MEMORY[address : address + size_bytes])
    return found


def _view_of(tensor: torch.Tensor) -> memoryview:
    """Of any shape, as the tensor: to have all of them flat costs more than all else that is done to a small one."""
    known = _SAME_SIZE_IN_NUMPY.get(tensor.dtype)
    return (tensor if known is None else tensor.view(known)).numpy().data


def _lies_plainly(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


_OF_A_STATE: Mapping[tuple[str, ...], type] = {
    ("commits",): int,
    ("due",): dict,
    ("shared",): dict,
    ("shared", "steps"): int,
    ("shared", "values"): dict,
    ("own",): dict,
}


def join(tree: Tree, parts: Mapping[str, TensorPart], live: Mapping[str, torch.Tensor] | None = None) -> Any:
    """The state that ``take_apart`` took apart. Tensors are on the CPU and share the parts' memory.

    Args:
        tree, parts: what was saved.
        live: tensors whose own memory a part is, by name: they come back themselves.
    """
    if isinstance(tree, dict):
        if len(tree) == 1 and _TENSOR in tree:
            name = tree[_TENSOR]
            if type(name) is str and live and name in live:
                return live[name]
            if type(name) is not str or name not in parts:
                raise CheckpointError(f"the point's state has a tensor {name!r}, and its data has none of that name")
            return _tensor(parts[name])
        return {key: join(item, parts, live) for key, item in tree.items()}
    if isinstance(tree, list):
        return [join(item, parts, live) for item in tree]
    if isinstance(tree, tuple):
        return tuple(join(item, parts, live) for item in tree)
    return tree


def state_in(
    tree: Tree, parts: Mapping[str, TensorPart], live: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """As :func:`join`, of a point: what a rank saves of its state.

    Raises:
        CheckpointError: it is no state.
    """
    found = join(tree, parts, live)
    if isinstance(found, dict):
        found = {"commits": 0, "due": {}, **found}
    for path, kind in _OF_A_STATE.items():
        inner = found
        for key in path:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if type(inner) is not kind:
            raise CheckpointError(
                f"the point holds no state as runtime.elastic saves it: {'.'.join(path)} is {type(inner).__name__} and "
                f"no {kind.__name__}; `samebits ckpt export` can write its tensors, as safetensors"
            )
    return dict(found)


def _tensor(part: TensorPart) -> torch.Tensor:
    dtype = _DTYPE_OF_NAME.get(part.dtype)
    if dtype is None:
        raise CheckpointError(f"{part.name}: torch has no dtype for {part.dtype}")
    if 0 in part.shape:
        return torch.empty(part.shape, dtype=dtype)
    return torch.frombuffer(part.data, dtype=torch.uint8).view(dtype).reshape(part.shape)
