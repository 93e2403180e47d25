"""Find the values that a process's first step sets from data, and that later steps only read.

A cached first batch, statistics of the first forward pass, and the first loss as a baseline never change again, so a
comparison of two later commits does not show them. Values that were empty before the training function's first call
are therefore remembered, and the statement that fills one is read: if it uses a batch, a loss, a gradient or a random
number, a new process would compute another value. Shapes, devices and constants are not data, so a cached mask is no
finding.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator, Set
from typing import Any, TypeGuard

from torch import nn
from torch.optim import Optimizer

from samebits.training.state.script.fingerprints import (
    MISSING,
    attributes_of,
    has_type,
    is_environment,
    is_users_object,
    modules_of,
    plain_function,
    scope_of,
)

_MOST_OBJECTS = 400
_MOST_DEPTH = 3
_SHAPES = frozenset({"shape", "device", "dtype", "ndim", "layout", "requires_grad", "is_cuda", "names", "training"})
_OF_SHAPE = frozenset(
    {
        *("size", "dim", "numel", "stride", "nelement", "element_size", "get_device", "is_floating_point"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "is_contiguous", "storage_offset"),
    }
)
"""Methods of a tensor whose result does not depend on its numbers."""
_LIKE = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as", "cuda"})
"""Methods that take only the shape or the type of their arguments."""
_BLIND = frozenset(
    {
        *("len", "isinstance", "type", "range", "id", "hasattr", "callable", "is_tensor", "is_floating_point", "numel"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "result_type", "broadcast_shapes", "signature"),
    }
)
_DRAWS = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "multinomial", "bernoulli", "normal"),
        *("uniform", "choice", "choices", "sample", "random", "gauss", "shuffle", "permutation", "random_sample"),
    }
)
_DRAWING = frozenset({"torch", "np", "numpy", "random"})
_TENSORS_ONLY = frozenset(
    {
        *("detach", "backward", "item", "std", "var", "mean", "norm", "clone", "cpu", "numpy", "size", "shape", "dim"),
        *("device", "dtype", "float", "half", "double", "long", "view", "reshape", "permute", "transpose", "unsqueeze"),
        *("squeeze", "flatten", "requires_grad", "square", "abs", "amax", "amin", "tolist", "grad", "pow", "ndim"),
    }
)
"""Attributes that show that a parameter or a loop's variable is a tensor."""
_OF_A_LOSS = frozenset({"backward", "detach", "item", "grad"})
"""Attributes that show that any variable holds the result of a computation."""
_PARAMETERS = frozenset({"parameters", "named_parameters", "param_groups", "buffers", "named_buffers"})
_DATA = "*data"
"""Stands for a gradient, a random number or a parameter among the names of an expression."""


def is_empty(value: object) -> bool:
    """Return whether a value is one with which scripts mark what is not yet computed."""
    return value is MISSING or value is None or (type(value) in (list, dict, set, tuple) and not value)


class EmptyValues:
    """The values outside a state that were empty at one moment, without references to anything.

    Args:
        function: the training function; what it can reach is read, up to a limited number of objects.
        more: objects to read besides, such as those of the state.
    """

    def __init__(self, function: Any, more: Iterable[object]) -> None:
        self._empty: set[tuple[int, str]] = set()
        self._filled: set[tuple[int, str]] = set()
        self._seen: set[int] = set()
        plain = plain_function(function)
        if plain is None:
            return
        scopes: list[types.FunctionType] = [plain]
        for value in plain.__globals__.values():
            scopes += [value] if type(value) is types.FunctionType and value.__globals__ is plain.__globals__ else []
        waiting = [(one, 0) for one in more]
        for scope in scopes[:_MOST_OBJECTS]:
            look = scope_of(scope)
            for name in {*scope.__code__.co_names, *scope.__code__.co_freevars, *scope.__code__.co_varnames}:
                value = look(name)
                if is_empty(value) and value is not MISSING:
                    self._empty.add((0, name))
                elif type(value) is dict:
                    waiting += [(one, 1) for one in list(value.values())[:16]]
                elif type(value) is types.ModuleType and is_environment(kept := attributes_of(value).get("environ")):
                    self._remember_environment(kept)
                elif is_environment(value):
                    self._remember_environment(value)
                elif type(value) in (list, tuple):
                    waiting += [(one, 1) for one in value[:16]]
                else:
                    waiting.append((value, 0))
        self._follow(waiting)

    def holds(self, owner: int, name: str) -> bool:
        """Return whether the attribute of the object with this id was empty; id 0 stands for a scope."""
        return (owner, name) in self._empty or (owner in self._seen and (owner, name) not in self._filled)

    def _remember_environment(self, environment: Any) -> None:
        self._seen.add(id(environment))
        self._filled |= {(id(environment), name) for name in environment}

    def _follow(self, waiting: list[tuple[Any, int]]) -> None:
        while waiting and len(self._seen) < _MOST_OBJECTS:
            value, depth = waiting.pop()
            is_module = has_type(value, nn.Module)
            is_followed = is_module or has_type(value, Optimizer) or type(value) is types.FunctionType
            if value is MISSING or id(value) in self._seen or not (is_followed or is_users_object(value)):
                continue
            for one in modules_of(value) if is_module else (value,):
                self._seen.add(id(one))
                for name, inner in attributes_of(one).items():
                    (self._empty if is_empty(inner) else self._filled).add((id(one), name))
                    if depth < _MOST_DEPTH and not name.startswith("_"):
                        waiting.append((inner, depth + 1))
                for name in ("_parameters", "_buffers", "_modules") if is_module else ():
                    self._filled |= {(id(one), inner) for inner in attributes_of(one).get(name, {})}


def fills_from_data(node: ast.AST, body: Any, batches: Set[str]) -> bool:
    """Return whether a statement keeps the result of a batch, a loss, a gradient or a random number.

    Args:
        node: the statement.
        body: its function.
        batches: the function's variables that are known to hold batches.
    """
    keys = set(_names(node.targets[0].slice)) if _is_item(node) else set()  # a result for a key is pure
    data = _names_of_data(body, batches) - keys
    return any(set(_names(one)) & data for one in _sources(node))


def _is_item(node: ast.AST) -> TypeGuard[Any]:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)


def _sources(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions whose result a statement keeps."""
    match node:
        case ast.Assign(value=value) | ast.AugAssign(value=value):
            yield value
        case ast.AnnAssign(value=value) if value is not None:
            yield value
        case ast.Expr(value=ast.Call(args=args, keywords=keywords)):
            yield from (*args, *(one.value for one in keywords))


def _names_of_data(body: Any, batches: Set[str]) -> set[str]:
    """Return the names of a function's parameters and variables that hold data."""
    found, nodes = {_DATA, *batches}, list(ast.walk(body))
    shown = {
        one.value.id
        for one in nodes
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.attr in _TENSORS_ONLY
    }
    found |= {
        one.value.id
        for one in nodes
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.attr in _OF_A_LOSS
    }
    given = [one.arg for one in (*body.args.posonlyargs, *body.args.args, *body.args.kwonlyargs)]
    found |= {name for name in given if name in shown and name not in ("self", "cls", "state")}
    before = -1
    while len(found) != before:
        before = len(found)
        for node in nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    found |= _targets(targets) if set(_names(value)) & found else set()
                case ast.AugAssign(target=target, value=value):
                    found |= _targets([target]) if set(_names(value)) & found else set()
                case ast.For(target=target, iter=value):
                    names = _targets([target])
                    is_data = bool(set(_names(value)) & found)
                    found |= names if is_data else names & shown
    return found


def _targets(targets: Iterable[ast.expr]) -> set[str]:
    """Return the local names that an assignment binds."""
    found: set[str] = set()
    for one in targets:
        if isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, (ast.Tuple, ast.List)):
            found |= _targets(one.elts)
        elif isinstance(one, ast.Starred):
            found |= _targets([one.value])
    return found


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names whose numbers an expression uses."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Attribute(attr="grad"):
            yield _DATA
        case ast.Attribute(attr=attr, value=value):
            if attr not in _SHAPES:
                yield from _names(value)
        case ast.Call(func=func, args=args, keywords=keywords):
            name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
            receiver = func.value if isinstance(func, ast.Attribute) else None
            if name in _BLIND:
                return
            is_seeded = any(one.arg == "generator" for one in keywords)
            if name in _PARAMETERS or name == "next" or (name in _DRAWS and not is_seeded and _root(func) in _DRAWING):
                yield _DATA
            if name not in _LIKE:
                for one in (*args, *(one.value for one in keywords)):
                    yield from _names(one)
            if receiver is not None and name not in _OF_SHAPE:
                yield from _names(receiver)
        case ast.Lambda() | ast.JoinedStr():
            return
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _names(child)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
