"""Convert a nested state with tensors to named tensor bytes and a plain tree, and back.

``take_apart`` replaces each tensor by its name, ``split`` also returns the bytes, and ``join`` rebuilds the state. Each
value is either restored exactly (type, dtype, strides and bits, at any depth) or refused when it is saved, with an
error that names its path. In the tree, ``{"$tensor": name}`` stands for a tensor, and ``{"$as": kind, …}`` for a value
of one of the other supported types. Strides and other properties are stored only if they differ from the default, so
checkpoints of earlier releases can be read by the same code.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from samebits.errors import CheckpointError
from samebits.store.checkpoint import TensorPart, Tree
from samebits.training import value_trees

_TENSOR = "$tensor"
_AS = "$as"

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
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_SAME_SIZE_IN_NUMPY = {  # substitutes for dtypes that numpy lacks
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")
"""All memory of this process. Slicing it costs a tenth of making a tensor's numpy array, and keeps nothing alive."""
_PLAIN = frozenset({type(None), bool, int, float, bytes})  # also str, if it is valid unicode
_NUMPY_KINDS = "biufc"
_ADVICE = "keep a tensor, a plain value, or an object with state_dict() and load_state_dict() there"
_DTYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_DTYPE.items()}
_EMPTY = torch.empty(0, dtype=torch.uint8)


NamedTensors: TypeAlias = list[tuple[str, torch.Tensor]]


def take_apart(state: Any, path: str) -> tuple[Tree, NamedTensors]:
    """Split the state into a plain tree and its tensors, which are named by their path below ``path``.

    Raises:
        CheckpointError: a value cannot be saved faithfully; the message names its path.
    """
    tensors: NamedTensors = []
    return _take_apart(state, path, tensors), tensors


def split(state: Any, path: str) -> tuple[Tree, list[TensorPart]]:
    """Split the state as :func:`take_apart` does, and return the tensors' bytes.

    CPU tensors are not copied, so they must not change until the parts are used.
    """
    tree, tensors = take_apart(state, path)
    return tree, parts_of(tensors)


def parts_of(tensors: NamedTensors) -> list[TensorPart]:
    """Convert tensors to the form that the checkpoint store accepts. Contiguous CPU tensors are not copied."""
    return [
        TensorPart(name, dtype_name(name, tensor), tuple(tensor.shape), bytes_of(tensor)) for name, tensor in tensors
    ]


def _take_apart(value: Any, path: str, tensors: NamedTensors) -> Tree:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is str:
        return value if _is_unicode(value) else {_AS: "str", "data": value.encode("utf-8", "surrogatepass")}
    if isinstance(value, torch.Tensor):
        return _tensor_taken(value, path, tensors)
    if kind is dict or kind is OrderedDict or kind is Counter or kind is defaultdict:
        return _mapping_taken(value, path, tensors)
    if kind is list or kind is tuple or kind is deque:
        items = [
            item if type(item) in _PLAIN else _take_apart(item, f"{path}.{index}", tensors)
            for index, item in enumerate(value)
        ]
        if kind is deque:
            return {_AS: "deque", "items": items, "maxlen": value.maxlen}
        return items if kind is list else tuple(items)
    if kind is set or kind is frozenset:
        items = [_key_taken(item, path) for item in value]
        return {_AS: kind.__name__, "items": sorted(items, key=repr)}  # the same order on every rank
    return _other_taken(value, path, tensors)


def _tensor_taken(tensor: torch.Tensor, path: str, tensors: NamedTensors) -> dict[str, Any]:
    if not value_trees.is_plain_tensor(tensor):
        raise _refusal(tensor, path)
    if tensor.is_meta:
        raise CheckpointError(f"{path}: a tensor on the meta device has no values, so it cannot be saved: {_ADVICE}")
    tag: dict[str, Any] = {_TENSOR: path}
    if tensor.dtype is torch.complex128:  # the file format lacks it
        tag["dtype"] = "complex128"
        tensors.append((path, torch.view_as_real(tensor.detach().resolve_conj())))
    else:
        dtype_name(path, tensor)
        tensors.append((path, tensor))
    if (strides := tensor.stride()) != value_trees.plain_strides(tensor.shape):
        tag["strides"] = strides
    if not tensor.is_cpu:
        tag["device"] = tensor.device.type
    if type(tensor) is nn.Parameter:
        tag["is_parameter"] = True
    if tensor.requires_grad and tensor.is_leaf:
        tag["requires_grad"] = True
    return tag


def _mapping_taken(value: Any, path: str, tensors: NamedTensors) -> Tree:
    tag: dict[str, Any] = {} if type(value) is dict else {_AS: type(value).__name__}
    if type(value) is defaultdict and value.default_factory is not None:
        tag["factory"] = factory = getattr(value.default_factory, "__name__", "")
        if value_trees.FACTORIES.get(factory) is not value.default_factory:
            raise CheckpointError(
                f"{path}: a defaultdict with the factory {value.default_factory!r} cannot be saved. Fix: use one of "
                f"{', '.join(value_trees.FACTORIES)}"
            )
    has_plain_keys = all(type(key) is int or (type(key) is str and _is_unicode(key)) for key in value)
    items: Any
    if has_plain_keys and _TENSOR not in value and _AS not in value:
        items = {
            key: item if type(item) in _PLAIN else _take_apart(item, f"{path}.{key}", tensors)
            for key, item in value.items()
        }
    else:
        tag.setdefault(_AS, "dict")
        items = [
            [_key_taken(key, path), _take_apart(item, f"{path}.{index}", tensors)]
            for index, (key, item) in enumerate(value.items())
        ]
    return {**tag, "items": items} if tag else items


def _key_taken(key: Any, path: str) -> Tree:
    """Convert a dict key or a set element, which may not be a tensor."""
    found: NamedTensors = []
    taken = _take_apart(key, f"{path}, its key {key!r}", found)
    if found:
        raise CheckpointError(
            f"{path}: a tensor as a key or in a set cannot be saved. Fix: keep it as a value of a dict"
        )
    return taken


def _other_taken(value: Any, path: str, tensors: NamedTensors) -> Tree:
    kind = type(value)
    if kind is complex:
        return {_AS: "complex", "real": value.real, "imag": value.imag}
    if kind is bytearray:
        return {_AS: "bytearray", "data": bytes(value)}
    if kind is range:
        return {_AS: "range", "of": (value.start, value.stop, value.step)}
    if kind is torch.Size:
        return {_AS: "Size", "items": list(value)}
    if kind is torch.dtype:
        return {_AS: "dtype", "name": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {_AS: "device", "name": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and (isinstance(value, numpy.generic) or kind is numpy.ndarray):
        dtype = value.dtype
        if dtype.kind in _NUMPY_KINDS and dtype.isnative and dtype.char not in "gG":  # a long double is not portable
            if kind is numpy.ndarray:
                return _array_taken(value, path, tensors)
            if kind is dtype.type:
                return {_AS: "number", "dtype": dtype.str, "data": value.tobytes()}
    raise _refusal(value, path)


def _array_taken(array: Any, path: str, tensors: NamedTensors) -> dict[str, Any]:
    """Convert a NumPy array. Its bytes are stored like a tensor's, in C or Fortran order."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = array.reshape(-1, order=order)
    flat = flat if flat.flags.c_contiguous and flat.flags.writeable else flat.copy()
    tensors.append((path, torch.from_numpy(flat.view("u1")) if flat.size else _EMPTY))
    return {_AS: "array", "data": {_TENSOR: path}, "dtype": array.dtype.str, "shape": array.shape, "order": order}


def _refusal(value: object, path: str) -> CheckpointError:
    kind = type(value)
    return CheckpointError(f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be saved: {_ADVICE}")


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Return the checkpoint store's name for the tensor's dtype, or raise :class:`CheckpointError`."""
    dtype = _NAME_OF_DTYPE.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise CheckpointError(f"{name}: a tensor of {tensor.dtype}, {tensor.layout} cannot be saved: {_ADVICE}")
    return dtype


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes. For a contiguous CPU tensor, they are a view of its memory."""
    return _view_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def in_place(tensors: NamedTensors) -> dict[str, TensorPart]:
    """Return the tensors whose memory already has the store's layout, by name.

    The result holds no references, so it is valid only while the tensors exist unchanged.
    """
    found = {}
    for name, one in tensors:
        dtype = _NAME_OF_DTYPE.get(one.dtype)
        if dtype is not None and _lies_plainly(one):
            address, size_bytes = one.data_ptr(), one.nbytes
            if address or not size_bytes:  # an address of 0 means that the storage was freed
                found[name] = TensorPart(name, dtype, tuple(one.shape), _MEMORY[address : address + size_bytes])
    return found


def _view_of(tensor: torch.Tensor) -> memoryview:
    """Return a view in the tensor's shape, because flattening a small tensor takes longer than everything else."""
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


def join(
    tree: Tree,
    parts: Mapping[str, TensorPart],
    live: Mapping[str, torch.Tensor] | None = None,
    *,
    on_devices: bool = False,
) -> Any:
    """Rebuild the state that ``take_apart`` has split. Plain CPU tensors share the parts' memory.

    Args:
        tree, parts: the saved tree and its parts.
        live: tensors, by name, whose memory already holds a part; they are returned as they are.
        on_devices: put each tensor on a device of its original type, if there is one; otherwise on the CPU.

    Raises:
        CheckpointError: the tree was not saved by any version of this program.
    """
    try:
        return _joined(tree, lambda tag: _tensor(tag, parts, live or {}, on_devices))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"a restore point holds a value that this program cannot rebuild: {error!r}") from None


def _joined(tree: Tree, tensor: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        if _TENSOR in tree:
            return tensor(tree)
        if _AS in tree:
            return _rebuilt(tree, tensor)
        return {key: _joined(item, tensor) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_joined(item, tensor) for item in tree]
    if isinstance(tree, tuple):
        return tuple(_joined(item, tensor) for item in tree)
    return tree


def state_in(
    tree: Tree,
    parts: Mapping[str, TensorPart],
    live: Mapping[str, torch.Tensor] | None = None,
    *,
    on_devices: bool = False,
) -> dict[str, Any]:
    """Rebuild a point's state as :func:`join` does, and check that it is a state.

    Raises:
        CheckpointError: the point does not hold a state.
    """
    found = join(tree, parts, live, on_devices=on_devices)
    if isinstance(found, dict):
        found = {"commits": 0, "due": {}, **found}
    for path, kind in _OF_A_STATE.items():
        inner = found
        for key in path:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if type(inner) is not kind:
            raise CheckpointError(
                f"the point does not hold a state saved by samebits.elastic: {'.'.join(path)} is "
                f"{type(inner).__name__} instead of {kind.__name__}; `samebits ckpt export` can write its tensors as "
                "safetensors"
            )
    return dict(found)


def _rebuilt(tag: dict[str, Any], tensor: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """Rebuild a value of one of the types that ``take_apart`` supports."""
    match tag[_AS]:
        case "dict":
            return dict(_pairs(tag, tensor))
        case "OrderedDict":
            return OrderedDict(_pairs(tag, tensor))
        case "Counter":
            return value_trees.rebuilt(Counter(), _pairs(tag, tensor))
        case "defaultdict":
            factory = value_trees.FACTORIES[tag["factory"]] if "factory" in tag else None
            return defaultdict(factory, _pairs(tag, tensor))
        case "deque":
            return deque(_joined(tag["items"], tensor), tag["maxlen"])
        case "set":
            return set(_joined(tag["items"], tensor))
        case "frozenset":
            return frozenset(_joined(tag["items"], tensor))
        case "str":
            return tag["data"].decode("utf-8", "surrogatepass")
        case "complex":
            return complex(tag["real"], tag["imag"])
        case "bytearray":
            return bytearray(tag["data"])
        case "range":
            return range(*tag["of"])
        case "Size":
            return torch.Size(tag["items"])
        case "dtype":
            return _torch_dtype(tag["name"])
        case "device":
            return torch.device(tag["name"])
        case "number":
            return _numpy(tag["dtype"], tag["data"], (), "C")[()]
        case "array":
            return _numpy(tag["dtype"], tensor(tag["data"]).numpy().tobytes(), tag["shape"], tag["order"])
    raise CheckpointError(f"a restore point holds a {tag[_AS]!r}, which this program does not recognize")


def _pairs(tag: dict[str, Any], tensor: Callable[[dict[str, Any]], torch.Tensor]) -> list[tuple[Any, Any]]:
    items = tag["items"]
    pairs = items.items() if isinstance(items, dict) else items
    return [(_joined(key, tensor), _joined(item, tensor)) for key, item in pairs]


def _numpy(dtype_name: str, data: bytes, shape: tuple[int, ...], order: Any) -> Any:
    import numpy  # imported here because jobs without NumPy values do not need it

    dtype = numpy.dtype(dtype_name)
    if dtype.kind not in _NUMPY_KINDS:
        raise CheckpointError(f"a restore point holds NumPy values of dtype {dtype_name!r}")
    array = numpy.empty(shape, dtype, order)
    array.reshape(-1, order=order)[:] = numpy.frombuffer(data, dtype)
    return array


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"a restore point names the dtype {name!r}, which torch {torch.__version__} lacks")
    return found


def _tensor(
    tag: dict[str, Any], parts: Mapping[str, TensorPart], live: Mapping[str, torch.Tensor], on_devices: bool
) -> torch.Tensor:
    name = tag[_TENSOR]
    if type(name) is not str or (name not in live and name not in parts):
        raise CheckpointError(f"the point's state refers to a tensor {name!r} that its data lacks")
    found = live.get(name)
    is_live = found is not None
    tensor = _values_of(parts[name]) if found is None else found
    if tag.get("dtype") == "complex128":
        tensor = torch.view_as_complex(tensor)
    strides = tuple(tag["strides"]) if "strides" in tag else value_trees.plain_strides(tensor.shape)
    if tensor.stride() != strides:
        tensor, is_live = value_trees.laid_out(tensor, strides), False
    if is_live:
        return tensor
    if on_devices and "device" in tag and torch.get_device_module(tag["device"]).is_available():
        tensor = tensor.to(tag["device"])
    if tag.get("is_parameter"):
        return nn.Parameter(tensor, tag.get("requires_grad", False))
    return tensor.requires_grad_() if tag.get("requires_grad") else tensor


def _values_of(part: TensorPart) -> torch.Tensor:
    dtype = _DTYPE_OF_NAME.get(part.dtype)
    if dtype is None:
        raise CheckpointError(f"{part.name}: torch has no dtype for {part.dtype}")
    if 0 in part.shape:
        return torch.empty(part.shape, dtype=dtype)
    return torch.frombuffer(part.data, dtype=torch.uint8).view(dtype).reshape(part.shape)
