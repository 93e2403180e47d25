"""Parse the statements of a user's function, and find the names that each statement reads, writes, changes and calls.

Only the source of the requested function is read. Names are looked up in their current values, so that ``model(x)`` is
recognized as the call of a module. No code of the script is executed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from samebits.training.group.calling_place import is_library
from samebits.training.state.script.expressions import Path, file_use, value_of
from samebits.training.state.script.fingerprints import (
    MISSING,
    attribute,
    attributes_of,
    getter_of,
    has_type,
    is_method,
    is_users_object,
    modules_of,
    plain_function,
)

TrainingTest = Callable[[object], bool]

_LONGEST_PATH = 4
_SILENT = frozenset({"print", "logging", "logger", "log", "tqdm", "wandb", "writer", "time", "warnings", "pbar"})
_CHANGES_TRAINING = frozenset(
    {
        *("step", "load_state_dict", "set_epoch", "record_batch", "record_indices", "add_param_group", "zero_grad"),
        *("requires_grad_", "update_parameters", "unscale_", "append", "extend", "add", "clear", "pop"),
    }
)
_MUTATORS = frozenset(
    {
        *("append", "appendleft", "extend", "insert", "pop", "popleft", "update", "add", "remove", "clear", "set"),
        *("setdefault", "popitem", "subtract", "discard", "extendleft", "rotate", "sort", "reverse", "fill", "put"),
    }
)
_OVERWRITE = frozenset({"copy_", "zero_", "fill_"})
"""Methods of a tensor that leave none of its numbers."""
_CHANGE_FIRST = frozenset(
    {"next", "heappush", "heappop", "heapify", "heapreplace", "heappushpop", "insort", "insort_left", "shuffle"}
)
"""Functions that change their first argument."""
_COPIES = frozenset({"deepcopy", "clone", "item", "tolist", "norm", "parameters_to_vector", "get_total_norm"})
"""Functions whose result keeps numbers of a tensor, and does not change with it."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PARAMETERS = frozenset({"parameters", "named_parameters", "param_groups"})


@dataclass
class Call:
    """A call of one of the user's functions, with its arguments."""

    function: types.FunctionType
    given: dict[str, Any]  # by parameter: a path of the caller, the names that its expression reads, or an object
    values: dict[str, Any]


@dataclass
class Statement:
    """A simple statement, or the header of a compound statement."""

    line: int
    guards: tuple[Statement, ...]
    loops: tuple[Statement, ...]
    reads: set[Path] = field(default_factory=set)
    writes: set[Path] = field(default_factory=set)
    changes: set[Path] = field(default_factory=set)  # values changed in place
    overwrites: set[Path] = field(default_factory=set)  # those of them of which nothing is left
    drawn: set[Path] = field(default_factory=set)  # objects on which a method is called, such as a generator
    calls: list[Call] = field(default_factory=list)
    is_sink: bool = False
    is_jump: bool = False
    is_return: bool = False
    gives_value: bool = False  # a return or yield of a value
    mentions: str = ""  # source code of an assignment
    memos: set[Path] = field(default_factory=set)  # dicts in a condition ``key not in memo``
    copies: bool = False  # copies the numbers of tensors
    never_until: int = 0  # the last line of a branch for an option that is not given
    runs: set[str] = field(default_factory=set)  # ``backward`` and ``step``, which run hooks
    by_value: bool = False  # part of the slice because its value is used
    by_effect: bool = False  # part of the slice because a function that it calls changes training

    @property
    def names(self) -> set[str]:
        """The variables that the statement reads, also as arguments of the user's functions."""
        paths = set(self.reads)
        for given in (one for call in self.calls for one in call.given.values()):
            paths |= {given} if isinstance(given, tuple) else given if type(given) is set else set()
        return {path[0] for path in paths if path}

    @property
    def is_relevant(self) -> bool:
        """Whether training depends on the statement."""
        return self.by_value or self.by_effect


class Statements:
    """The statements of one function in source order, with nested statements after their compound statement.

    Args:
        values: known values of the function's parameters or locals.
        scope: looks up every other name.
        is_state, is_training: as for ``training_slice.ScriptFunctions``.
    """

    def __init__(
        self,
        code: types.CodeType,
        node: Any,
        values: Mapping[str, Any],
        scope: Callable[[str], Any],
        *,
        is_state: TrainingTest,
        is_training: TrainingTest,
    ) -> None:
        self.code = code
        self.node = node
        self._is_state = is_state
        self._is_training = is_training
        self._values = values
        self._scope = scope
        self.steps: list[Statement] = []
        self.batches: set[str] = set()  # variables of loops over a loader
        self.called: set[str] = set()  # names of methods called on objects that have no name themselves
        self._of: dict[ast.AST, Statement] = {}
        self._aliases: set[str] = set()  # names that refer to parameters or parameter groups
        self._sources: dict[str, Path] = {}  # loop variable → the path it iterates over
        self._body(node.body, (), ())

    def forget_values(self) -> None:
        """Drop all references to the script's objects, but keep the lines and names."""
        self._values, self._scope = {}, lambda name: MISSING
        for step in self.steps:
            step.calls.clear()

    # ---- statements

    def _body(self, body: Iterable[ast.stmt], guards: tuple[Statement, ...], loops: tuple[Statement, ...]) -> None:
        for node in body:
            step = self._of[node] = Statement(node.lineno, guards, loops)
            self.steps.append(step)
            self._statement(node, step)
            inner = (*guards, step)
            if isinstance(node, ast.If):
                self._body(node.body, inner, loops)
                self._body(node.orelse, inner, loops)
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
                self._body(node.body, inner, (*loops, step))
                self._body(node.orelse, guards, loops)
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                self._body(node.body, guards, loops)
            elif isinstance(node, (ast.Try, ast.TryStar)):
                self._body(node.body, guards, loops)
                for handler in node.handlers:
                    self._body(handler.body, guards, loops)
                self._body(node.orelse, guards, loops)
                self._body(node.finalbody, guards, loops)
            elif isinstance(node, ast.Match):
                for case in node.cases:
                    self._body(case.body, inner, loops)

    def _statement(self, node: ast.stmt, step: Statement) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self._read(value, step)
                for target in targets:
                    self._write(target, value, step)
                step.mentions = ast.unparse(value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._read(value, step)
                self._write(target, value, step)
                step.mentions = ast.unparse(value)
            case ast.AugAssign(target=target, value=value):
                self._read(value, step)
                self._read(target, step)
                self._write(target, value, step)
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                self._read(value, step)
                self._write(target, value, step)
                self._alias(target, value)
                if any(has_type(self.value((one.id,)), DataLoader) for one in ast.walk(value) if type(one) is ast.Name):
                    self.batches |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
                step.changes |= {path for path in [path_of(value)] if path}
            case ast.While(test=test) | ast.If(test=test):
                self._read(test, step)
                if isinstance(node, ast.If) and self._is_not_given(test):
                    step.never_until = node.body[-1].end_lineno or 0
                if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn):
                    step.memos |= {path for path in [path_of(test.comparators[0])] if path}
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for item in items:
                    self._read(item.context_expr, step)
                    if item.optional_vars is not None:
                        self._write(item.optional_vars, item.context_expr, step)
            case ast.Match(subject=subject):
                self._read(subject, step)
            case ast.Expr(value=value):
                self._read(value, step)
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                    receiver = root_of(value.func.value)
                    if receiver is not None and receiver in step.drawn:
                        self._change(receiver, step)
                step.is_return |= isinstance(value, (ast.Yield, ast.YieldFrom))
                step.gives_value |= step.is_return
            case ast.Return(value=value):
                if value is not None:
                    self._read(value, step)
                    step.gives_value = True
                step.is_return = step.is_jump = True
            case ast.Break() | ast.Continue() | ast.Raise():
                step.is_jump = True
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                step.writes.add((name,))
            case _:
                pass

    def _write(self, target: ast.expr, value: ast.expr, step: Statement) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._write(one, value, step)
        elif isinstance(target, ast.Starred):
            self._write(target.value, value, step)
        elif isinstance(target, ast.Subscript):
            self._read(target.slice, step)
            path = path_of(target.value) or root_of(target.value)
            if path:
                self._change(path, step)
                step.is_sink |= self._is_trained(path)
        elif path := path_of(target):
            step.writes.add(path)
            if len(path) > 1:
                owner = self.value(path[:1])
                is_ours = self._is_state(owner) and path[1] in attributes_of(owner).get("handlers", {})
                step.is_sink |= is_ours or (not self._is_state(owner) and self._is_trained(path[:-1]))
        elif isinstance(target, ast.Attribute):
            root = root_of(target.value)
            if root:
                self._change(root, step)
                step.is_sink |= self._is_trained(root)

    def _change(self, path: Path, step: Statement) -> None:
        step.changes.add(path)
        if path[0] in self._sources:
            step.changes.add(self._sources[path[0]])

    def _alias(self, target: ast.expr, value: ast.expr) -> None:
        """Record which loop variables are parameters or parameter groups."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and isinstance(target, ast.Tuple):
            if value.func.id == "zip" and len(target.elts) == len(value.args):
                for one, given in zip(target.elts, value.args, strict=True):
                    self._alias(one, given)
                return
            if value.func.id == "enumerate" and len(target.elts) == 2 and value.args:
                self._alias(target.elts[1], value.args[0])
                return
        source = path_of(value) or root_of(value)
        if source is not None:
            self._sources |= {one.id: source for one in ast.walk(target) if isinstance(one, ast.Name)}
        for inner in ast.walk(value):
            name = inner.id if isinstance(inner, ast.Name) else ""
            path = path_of(inner.value) if isinstance(inner, ast.Attribute) and inner.attr in _PARAMETERS else None
            if name in self._aliases or (path and self._is_training(self.value(path))):
                self._aliases |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}

    # ---- expressions

    def _read(self, node: ast.AST, step: Statement, hidden: frozenset[str] = frozenset()) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)) and (path := path_of(node)):
            if path[0] not in hidden:
                self._read_path(path, step)
        elif isinstance(node, ast.Call):
            self._call(node, step, hidden)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            names = {one.id for part in node.generators for one in ast.walk(part.target) if isinstance(one, ast.Name)}
            for child in ast.iter_child_nodes(node):
                self._read(child, step, hidden | names)
        elif isinstance(node, ast.comprehension):
            for child in (node.iter, *node.ifs):
                self._read(child, step, hidden)
        elif isinstance(node, ast.Lambda):
            names = {one.arg for one in arguments_of(node.args)}
            self._read(node.body, step, hidden | names)
        elif isinstance(node, ast.NamedExpr):
            self._read(node.value, step, hidden)
            step.writes.add((node.target.id,))
        elif not isinstance(node, ast.JoinedStr):
            for child in ast.iter_child_nodes(node):
                self._read(child, step, hidden)

    def _read_path(self, path: Path, step: Statement) -> None:
        """Record a read of the path, and of everything that a user's property or ``__getattr__`` on it reads."""
        step.reads.add(path[:_LONGEST_PATH])
        owner = self.value(path[:1])
        for size in range(1, len(path)):
            if owner is MISSING or has_type(owner, torch.Tensor):
                return
            getter = None if has_type(owner, type, types.ModuleType) else getter_of(owner, path[size])
            if getter is not None:
                function, receiver = getter
                names = (*function.__code__.co_varnames[:2], "", "")
                given = {names[0]: path[:size]} if receiver is owner else {names[0]: receiver, names[1]: path[:size]}
                values = {names[0]: owner} if receiver is owner else {names[0]: receiver, names[1]: owner}
                step.calls.append(Call(function, given, values))
                return
            owner = attribute(owner, path[size])

    def _call(self, node: ast.Call, step: Statement, hidden: frozenset[str]) -> None:
        path = path_of(node.func)
        arguments = [*node.args, *(one.value for one in node.keywords)]
        name = path[-1] if path else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if path and (path[0] in _SILENT or (name in ("tell", "report", "commit") and self._is_state_path(path))):
            return
        if name and (not path or path[0] in self._sources):
            self.called.add(name)
        if path and path[0] not in hidden and self._calls_users(node, path, step, hidden):
            return
        self._note_files(node, name, step)
        for one in arguments:
            self._read(one, step, hidden)
        receiver = path[:-1] if path else ()
        if not path and isinstance(node.func, ast.Attribute):
            self._read(node.func.value, step, hidden)
            receiver = root_of(node.func.value) or ()
            step.drawn |= {receiver} if receiver else set()
        elif not path:
            self._read(node.func, step, hidden)
        elif receiver and not has_type(self.value(receiver), types.ModuleType) and receiver[0] not in hidden:
            self._read_path(receiver, step)
            step.drawn.add(receiver)
        elif len(path) == 1 and path[0] not in hidden and self.value(path) is not MISSING:
            step.reads.add(path)
        step.copies |= name in _COPIES
        if receiver and receiver[0] not in hidden and (name in _MUTATORS or _is_in_place(name)):
            self._change(receiver, step)
        if len(receiver) == 1 and name in _OVERWRITE and receiver[0] not in self._sources:
            read = {one.id for given in arguments for one in ast.walk(given) if isinstance(one, ast.Name)}
            step.overwrites |= {receiver} if receiver[0] not in read else set()
        if name in _CHANGE_FIRST and node.args and (given := path_of(node.args[0])):
            step.changes.add(given)
        if self._changes_training(name, receiver, node):
            step.is_sink = True
            step.runs |= {name} & {"backward", "step"}

    def _note_files(self, node: ast.Call, name: str, step: Statement) -> None:
        """Record the files that a call uses, as values that the statement reads and writes."""
        used = file_use(node, name, self.simple)
        if not any(step.line <= guard.never_until for guard in step.guards):
            step.reads |= used.reads
        step.writes |= used.writes
        step.changes |= used.appends

    def _is_not_given(self, test: ast.expr) -> bool:
        """Return whether a condition needs an option that the script was started without."""
        match test:
            case ast.BoolOp(op=ast.And(), values=parts):
                return any(map(self._is_not_given, parts))
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return self._is_not_given(left)
        path, code = path_of(test), self.code
        if not path or path[0] in code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]:
            return False  # a local variable, which may change
        value = self.value(path)
        is_unset = value is None and (len(path) > 1 or path[0].isupper())
        is_off = value is False and type(self.value(path[:1])) is argparse.Namespace
        return is_unset or is_off or (type(value) is str and not value)

    def _changes_training(self, name: str, receiver: Path, node: ast.Call) -> bool:
        if name == "backward" and isinstance(node.func, ast.Attribute):
            return True
        in_place = _is_in_place(name)
        if receiver and (in_place or name in _CHANGES_TRAINING) and self._is_trained(receiver):
            return not self._is_state_path(receiver) or len(receiver) > 1
        is_function = not receiver or has_type(self.value(receiver), types.ModuleType)
        if name == "step" or (in_place and is_function and isinstance(node.func, (ast.Name, ast.Attribute))):
            paths = (path_of(one) or root_of(one) for one in node.args)
            return any(self._is_trained(path) for path in paths if path is not None)
        return False

    def _calls_users(self, node: ast.Call, path: Path, step: Statement, hidden: frozenset[str]) -> bool:
        """Record the call if it calls the user's own function, method or object, and return whether it does."""
        value = self.value(path)
        owner = self.value(path[:-1]) if len(path) > 1 else MISSING
        function = plain_function(value)
        bound: Any = None
        if function is None and is_users_object(value) and not has_type(value, nn.Module):
            function, bound = plain_function(attribute(value, "__call__")), path
        elif has_type(value, nn.Module):
            step.reads.add(path[:_LONGEST_PATH])
            for one in modules_of(value):
                forward = plain_function(attribute(one, "forward"))
                if forward is not None and not is_library(forward.__code__.co_filename):
                    first = next(iter(forward.__code__.co_varnames), "self")
                    step.calls.append(Call(forward, {first: one}, {first: one}))
                for hook in [hook for kept in _HOOKS for hook in attributes_of(one).get(kept, {}).values()]:
                    step.calls += calls_of(hook)
            for child in (*node.args, *(one.value for one in node.keywords)):
                self._read(child, step, hidden)
            return True
        elif function is not None and len(path) > 1 and is_method(function, path[-1], owner):
            is_plain = has_type(owner, type, types.ModuleType) and type(value) is not classmethod
            bound = None if is_plain or type(value) is staticmethod else path[:-1]
        if function is None or is_library(function.__code__.co_filename):
            return False
        names = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        given: dict[str, Any] = {}
        values: dict[str, Any] = {}
        if bound is not None and names:
            first = names.pop(0)
            given[first], values[first] = bound[:_LONGEST_PATH], self.value(bound)
        elif names and type(value) is types.MethodType:
            names.pop(0)
            given, values = dict(calls_of(value)[0].given), dict(calls_of(value)[0].values)
        pairs = [*zip(names, node.args, strict=False), *((one.arg or "", one.value) for one in node.keywords)]
        for name, one in pairs:
            argument = path_of(one)
            if argument and argument[0] not in hidden:
                given[name], values[name] = argument, self.value(argument)
            else:
                inner = Statement(step.line, (), ())
                self._read(one, inner, hidden)
                given[name] = inner.reads
                step.calls += inner.calls
                step.changes |= inner.changes
        call = Call(function, given, {name: one for name, one in values.items() if one is not MISSING})
        step.calls.append(call)
        return True

    # ---- values

    def simple(self, name: str, seen: frozenset[str] = frozenset()) -> Any:
        """Return the value of a name, or of the simple expression that is assigned to it once in this function."""
        found = self.value((name,))
        if found is not MISSING or name in seen:
            return found
        given = self._assigned.get(name, [])
        within = functools.partial(self.simple, seen=seen | {name})
        return value_of(given[0], within) if len(given) == 1 else MISSING

    @functools.cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        """The expressions that are assigned to each name."""
        found: dict[str, list[ast.expr]] = {}
        for one in (node for node in ast.walk(self.node) if isinstance(node, ast.Assign)):
            for target in one.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(one.value)
        return found

    def value(self, path: Path) -> Any:
        """Return the current value at the path, or ``MISSING``."""
        found = self._values.get(path[0], MISSING)
        if found is MISSING and path[0] not in self.code.co_varnames:
            found = self._scope(path[0])
        for name in path[1:]:
            if found is MISSING:
                return MISSING
            found = attribute(found, name)
        return found

    def _is_state_path(self, path: Path) -> bool:
        return self._is_state(self.value(path[:1]))

    def _is_trained(self, path: Path) -> bool:
        if path[0] in self._aliases:
            return True
        return any(
            (value := self.value(path[:size])) is not MISSING and self._is_training(value)
            for size in range(1, len(path) + 1)
        )


def calls_of(value: object) -> list[Call]:
    """Return the call of a user's function or bound method as a one-item list; empty for other values."""
    function = plain_function(value)
    if function is None or is_library(function.__code__.co_filename):
        return []
    if type(value) is not types.MethodType or isinstance(value.__self__, (tuple, set)):
        return [Call(function, {}, {})]
    first = next(iter(function.__code__.co_varnames), "self")
    return [Call(function, {first: value.__self__}, {first: value.__self__})]


# ---- syntax


def path_of(node: ast.AST | None) -> Path | None:
    """Return the names in an expression such as ``a.b.c``, or None for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else None


def root_of(node: ast.AST | None) -> Path | None:
    """Return the longest attribute path at the start of an expression, such as ``a.b`` in ``a.b[0].c()``."""
    while node is not None:
        if path := path_of(node):
            return path
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func.value if isinstance(node.func, ast.Attribute) else None
        else:
            return None
    return None


def arguments_of(given: ast.arguments) -> list[ast.arg]:
    """Return all parameters of a function."""
    more = [one for one in (given.vararg, given.kwarg) if one is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *more]


def heads_of(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a statement except nested statements."""
    return [one for one in ast.iter_child_nodes(node) if not isinstance(one, (ast.stmt, ast.excepthandler))]


def summands_of(node: ast.expr) -> list[ast.expr]:
    """Return the operands of ``a + b + c``, or a list of the expression itself if it is not a sum."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*summands_of(node.left), node.right]
    return [node]


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
