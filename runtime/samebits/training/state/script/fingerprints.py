"""Compute cheap fingerprints of values that a script keeps between steps, to detect changes.

A fingerprint consists of plain numbers and strings and holds no reference to the value. Computing it runs no user code:
types are compared by identity, and attributes are read from ``__dict__``. Tensors are never read. Values of unknown
types have a constant fingerprint, so their changes are never reported.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import enum
import functools
import itertools
import os
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits.training.group.calling_place import is_library

MISSING: Any = object()
_UNKNOWN = ("?",)
_MOST_DEPTH = 4
_ENDS = 4  # elements read from each end of a sequence
_MOST_ITEMS = 64  # limit on items of a dict or set, and on a module's tensors
_MOST_FOLLOWED = 16  # functions and objects that are followed in a container
_MOST_MODULES = 100
_MOST_BYTES = 65536  # limit on arrays that are hashed completely
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_FIELD: Any = type(collections.namedtuple("_Pair", "one other").one)  # type: ignore[attr-defined]
_OF_THE_SEAT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that a recovery sets."""
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
OPAQUE_ITERATORS = (enumerate, zip, map, filter, itertools.cycle, itertools.chain, itertools.islice)
"""Iterators whose position cannot be read."""
OF_A_FILE = "file "
"""Marks a name that stands for a file."""
_type_mro: Callable[[object], tuple[type, ...]] = type.__dict__["__mro__"].__get__


class ScriptFile:
    """A file that the script writes and reads itself.

    Args:
        name: its path, absolute or relative to the current folder.
    """

    def __init__(self, name: str) -> None:
        self.name = name


def type_line(value: object) -> tuple[type, ...]:
    """Return the classes that the value's type inherits from, without calling its metaclass."""
    line: tuple[type, ...] = _type_mro(type(value))
    return line


def has_type(value: object, *kinds: type) -> bool:
    """Return whether the value has one of these types. Unlike isinstance, this runs no user code."""
    return any(one in kinds for one in type_line(value))


def is_environment(value: object) -> bool:
    """Return whether the value is ``os.environ``."""
    return type(value) is os._Environ


def attributes_of(value: object) -> Mapping[str, Any]:
    """Return the value's own ``__dict__``, or an empty one."""
    kept: Any
    if type(value) is threading.local:
        return vars(value)  # those of the calling thread
    for one in type_line(value):
        kept = one.__dict__.get("__dict__")
        if kept is not None:
            if type(kept) not in (types.GetSetDescriptorType, types.MemberDescriptorType):
                return {}
            found = kept.__get__(value)
            return found if type(found) is dict else {}
    found = object.__getattribute__(value, "__dict__") if type(value) is types.ModuleType else {}
    return found if type(found) is dict else {}


def attribute(value: object, name: str) -> Any:
    """Return a stored attribute, or ``MISSING``, without calling a property or ``__getattr__``.

    The attributes of ``os.environ`` are its variables.
    """
    if is_environment(value):
        return MISSING if name in _OF_THE_SEAT else value.get(name, MISSING)  # type: ignore[attr-defined]
    if issubclass(type(value), type):
        line: tuple[type, ...] = _type_mro(value)
        return next((one.__dict__[name] for one in line if name in one.__dict__), MISSING)
    own = attributes_of(value)
    if name in own:
        return own[name]
    if has_type(value, nn.Module):
        for kept in ("_modules", "_parameters", "_buffers"):
            if name in own.get(kept, {}):
                return own[kept][name]
    for one in type_line(value):
        if name in one.__dict__:
            found = one.__dict__[name]
            is_stored = type(found) is _FIELD or (type(found) is types.MemberDescriptorType and name in _slots(one))
            return found.__get__(value) if is_stored else found
    if has_type(value, dict) and any("__getattr__" in one.__dict__ for one in type_line(value)):
        return dict.get(value, name, MISSING)  # type: ignore[call-overload]
    return MISSING


def getter_of(owner: object, name: str) -> tuple[types.FunctionType, object] | None:
    """Return the user's function that computes this attribute, and its first argument.

    Return None if no function of the user computes it.
    """
    found = next((one.__dict__[name] for one in type_line(owner) if name in one.__dict__), MISSING)
    if type(found) is not property and name in attributes_of(owner):
        return None
    function, receiver = None, owner
    if type(found) is property:
        function = plain_function(found.fget)
    elif type(found) is functools.cached_property:
        function = plain_function(found.func)
    elif found is not MISSING:
        receiver = found
        function = plain_function(attribute(found, "__get__")) if is_users_object(found) else None
    elif attribute(owner, name) is MISSING:
        function = plain_function(attribute(owner, "__getattr__"))
    return None if function is None or is_library(function.__code__.co_filename) else (function, receiver)


def _slots(owner: type) -> Collection[str]:
    slots = owner.__dict__.get("__slots__", ())
    return (slots,) if type(slots) is str else slots if type(slots) in (list, tuple) else ()


def fingerprint(value: object, is_handled: Callable[[object], bool], depth: int = 0) -> Any:
    """Return a small value that changes when ``value`` changes, or a constant if the state restores ``value``."""
    kind = type(value)
    if kind in (int, bool, str, bytes, type(None)):
        return (kind.__name__, value if kind in (int, bool) else hash(value))
    if kind is float:
        return ("float", float.hex(value))  # type: ignore[arg-type]
    if depth > _MOST_DEPTH or is_handled(value):
        return _UNKNOWN
    following = depth + 1
    if has_type(value, torch.Tensor):
        return _tensor(value)
    for one in (list, tuple, collections.deque):
        if has_type(value, one):
            return _sequence(value, one, is_handled, following)
    if has_type(value, dict):
        all_items: Any = (collections.OrderedDict if kind is collections.OrderedDict else dict).items
        items: list[Any] = list(itertools.islice(all_items(value), _MOST_ITEMS))
        inner = tuple((fingerprint(key, is_handled, 9), fingerprint(one, is_handled, following)) for key, one in items)
        return ("dict", dict.__len__(value), inner)  # type: ignore[arg-type]
    if kind in (set, frozenset):
        plain = sorted(hash(one) for one in itertools.islice(value, _MOST_ITEMS) if type(one) in (int, str))  # type: ignore[call-overload]
        return ("set", len(value), tuple(plain))  # type: ignore[arg-type]
    if kind in _NAMESPACES:
        return fingerprint(dict(attributes_of(value)), is_handled, depth)
    return _library_object(value, is_handled, following)


def _tensor(value: Any) -> Any:
    pointer = value.untyped_storage().data_ptr() if value.layout is torch.strided and not value.is_meta else 0
    return ("tensor", pointer, value._version, tuple(value.shape), str(value.dtype))


def _sequence(value: Any, kind: Any, is_handled: Callable[[object], bool], depth: int) -> Any:
    size = kind.__len__(value)  # a subclass may override its length and items
    places = range(size) if size <= 2 * _ENDS else (*range(_ENDS), *range(size - _ENDS, size))
    items = tuple(fingerprint(kind.__getitem__(value, one), is_handled, depth) for one in places)
    return (type(value).__name__, size, items)


def items_of(value: Any) -> list[Any] | None:
    """Return the first items of a list, tuple, deque, dict or ``functools.partial``, or None for other values."""
    for one in (list, tuple, collections.deque):
        if has_type(value, one):
            return list(itertools.islice(one.__iter__(value), _MOST_FOLLOWED))
    if has_type(value, dict):
        return list(itertools.islice(dict.values(value), _MOST_FOLLOWED))
    return [value.func, *value.args, *value.keywords.values()] if type(value) is functools.partial else None


def _library_object(value: Any, is_handled: Callable[[object], bool], depth: int) -> Any:
    kind = type(value)
    if has_type(value, random.Random):
        is_plain = kind.getstate is random.Random.getstate
        return ("random", hash(value.getstate())) if is_plain else _UNKNOWN
    if has_type(value, torch.Generator):
        return ("generator", hash(value.get_state().numpy().tobytes()))
    if kind.__module__.partition(".")[0] == "numpy" and "numpy" in sys.modules:
        return _numpy(value)
    if kind is types.GeneratorType:
        frame = value.gi_frame
        if frame is None or any(map(is_handled, frame.f_locals.values())):
            return _UNKNOWN
        return _variables(frame.f_locals, is_handled, depth)
    own = attributes_of(value)
    if "_num_yielded" in own:  # a DataLoader's iterator
        return _UNKNOWN if is_handled(own.get("_index_sampler")) else ("loader", own["_num_yielded"])
    if kind in _ITERATORS:
        return ("iterator", value.__length_hint__())
    if kind is itertools.count:
        return ("count", repr(value))
    if kind in (array.array, bytearray):
        return ("array", len(value), hash(bytes(memoryview(value).cast("B")[:_MOST_BYTES])))
    if kind is contextvars.ContextVar:
        return ("context", fingerprint(value.get(None), is_handled, depth))
    if kind is functools.partial:
        return ("partial", *(fingerprint(one, is_handled, depth) for one in (value.args, value.keywords)))
    if has_type(value, enum.Enum):
        return ("enum", kind.__qualname__, own.get("_name_"))
    if has_type(value, queue.Queue):
        return ("queue", fingerprint(own.get("queue"), is_handled, depth))
    if kind is queue.SimpleQueue:
        return ("queue", value.qsize())
    if kind is ScriptFile:
        return _file(value.name)
    if has_type(value, nn.Module):
        tensors = tuple(_tensor(one) for one in itertools.islice(_tensors_of(value), _MOST_ITEMS))
        return ("module", tensors, tuple(_settings_of(one) for one in modules_of(value) if is_library_type(one)))
    if has_type(value, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler):
        return _variables(attributes_of(value), is_handled, depth)
    return (*_UNKNOWN, kind.__qualname__)


def _variables(values: Mapping[str, Any], is_handled: Callable[[object], bool], depth: int) -> Any:
    """Return a fingerprint of the variables of a generator, an optimizer or a scheduler."""
    return tuple((name, fingerprint(values[name], is_handled, depth)) for name in sorted(values)[:_MOST_ITEMS])


def _file(name: str) -> Any:
    try:
        found = Path(name).stat()
    except (OSError, ValueError):
        return ("file", None)
    return ("file", found.st_ino, found.st_size, found.st_mtime_ns)


def _numpy(value: Any) -> Any:
    import numpy as np  # the script has loaded it already

    kind = type(value)
    if kind is np.random.Generator:
        return ("numpy", hash(repr(value.bit_generator.state)))
    if kind is np.random.RandomState:
        _, keys, position, *rest = value.get_state()
        return ("numpy", hash(keys.tobytes()), int(position), repr(rest))
    if kind is np.ndarray and value.dtype.kind in "biufc":
        flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
        part = flat if value.nbytes <= _MOST_BYTES else flat[:1024]
        return ("ndarray", value.shape, value.dtype.str, hash(np.ascontiguousarray(part).tobytes()))
    if has_type(value, np.generic) and value.dtype.kind in "biuf":
        return ("scalar", repr(value.item()))
    return _UNKNOWN


def _settings_of(module: Any) -> Any:
    """Return the public numbers and texts of a library's module, such as a criterion's ``label_smoothing``."""
    own = attributes_of(module)
    return tuple(
        (name, fingerprint(own[name], bool, 9))
        for name in sorted(own)
        if name != "training" and not name.startswith("_") and type(own[name]) in (int, float, bool, str)
    )


def _tensors_of(module: Any) -> Any:
    own = attributes_of(module)
    for kept in ("_parameters", "_buffers"):
        yield from (one for one in own.get(kept, {}).values() if one is not None)
    for inner in own.get("_modules", {}).values():
        if inner is not None:
            yield from _tensors_of(inner)


# ---- objects


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the parameters' default values that can change between calls, so no numbers, strings, bytes or None."""
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    found = {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}
    return {name: one for name, one in found.items() if type(one) not in (int, float, bool, str, bytes, type(None))}


def scope_of(function: types.FunctionType) -> Callable[[str], Any]:
    """Return a function that looks a name up in the function's defaults, then its closure, then its module."""
    defaults = defaults_of(function)

    def look(name: str) -> Any:
        if name in defaults:
            return defaults[name]
        names = function.__code__.co_freevars
        if name in names and function.__closure__ is not None:
            try:
                return function.__closure__[names.index(name)].cell_contents
            except ValueError:  # an empty cell
                return MISSING
        return function.__globals__.get(name, MISSING)

    return look


def is_library_type(value: object) -> bool:
    """Return whether the value's class comes from a library, not from the user."""
    return not is_users_object(value)


def is_users_object(value: object) -> bool:
    """Return whether the value is an instance of a class that the script or a module beside it defines."""
    kind = type(value)
    if value is MISSING or kind in (types.FunctionType, types.ModuleType, type) or kind.__module__ == "builtins":
        return False
    functions = (plain_function(one) for one in kind.__dict__.values())
    return any(one is not None and not is_library(one.__code__.co_filename) for one in functions)


def plain_function(value: object) -> types.FunctionType | None:
    """Return the function under decorators, or None."""
    for _ in range(8):
        if type(value) in (staticmethod, classmethod) or type(value) is types.MethodType:
            value = value.__func__  # type: ignore[attr-defined]
        inner = attributes_of(value).get("__wrapped__") if value is not MISSING else None
        if type(value) is types.FunctionType and (inner is None or not is_library(value.__code__.co_filename)):
            return value
        if inner is None:
            return None
        value = inner
    return None


def is_method(function: types.FunctionType, name: str, owner: object) -> bool:
    """Return whether the function is a method of the owner, even if the owner itself stores a wrapper of it.

    A learning rate schedule stores such a wrapper of ``optimizer.step``.
    """
    if name not in attributes_of(owner):
        return True
    return any(plain_function(one.__dict__.get(name, MISSING)) is function for one in type_line(owner))


def modules_of(value: Any) -> Iterator[Any]:
    """Yield a module and the modules inside it, up to a limit."""
    waiting, seen = [value], 0
    while waiting and seen < _MOST_MODULES:
        one = waiting.pop()
        seen += 1
        yield one
        waiting += [inner for inner in attributes_of(one).get("_modules", {}).values() if inner is not None]


def can_be_referred_to(value: object) -> bool:
    """Return whether the value supports weak references."""
    return any("__weakref__" in one.__dict__ for one in type_line(value)) or type(value) is types.FunctionType
