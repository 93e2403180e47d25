"""The part of a script's functions that the next training step depends on, found in their source.

A backward slice: it begins where training is changed (``backward()``, ``optimizer.step()``, ``state.x = …``, a write to
a learning rate or to a parameter) and follows assignments, conditions and calls of the user's own functions back to the
names that are read. What only reaches a print, a logger or a timer is never part of it. Objects are asked only for what
``fingerprints.attribute`` reads, so nothing of the script is executed.
"""

from __future__ import annotations

import ast
import linecache
import math
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from runtime.training.group.calling_place import is_library
from runtime.training.state.fingerprints import MISSING, attribute, attributes_of, has_type, type_line

__all__ = ["Outside", "Path", "Place", "Script", "TrainingTest", "is_prefix"]

Path = tuple[str, ...]
"""``("cfg", "seen")`` for ``cfg.seen``."""
TrainingTest = Callable[[object], bool]

_LONGEST_PATH = 4
_MOST_FUNCTIONS = 80
_MOST_DEPTH = 6
_MOST_MODULES = 100
_SILENT = frozenset({"print", "logging", "logger", "log", "tqdm", "wandb", "writer", "time", "warnings", "pbar"})
_CHANGES_TRAINING = frozenset(
    {
        *("step", "load_state_dict", "set_epoch", "record_batch", "record_indices", "add_param_group", "zero_grad"),
        *("requires_grad_", "update_parameters", "unscale_", "append", "extend", "add", "clear", "pop"),
    }
)
_MUTATORS = frozenset(
    {"append", "appendleft", "extend", "insert", "pop", "popleft", "update", "add", "remove", "clear"}
)
_PARAMETERS = frozenset({"parameters", "named_parameters", "param_groups"})
_FRESH = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "deepcopy", "copy", "clone")
_ITERABLE = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "__len__", "forward")
"""The methods that a library calls of an object that is given to it as data."""


def is_prefix(short: Path, long: Path) -> bool:
    """Whether ``long`` is ``short`` or an attribute of it."""
    return long[: len(short)] == short


def _touch(one: Path, other: Path) -> bool:
    return is_prefix(one, other) or is_prefix(other, one)


@dataclass(frozen=True)
class Place:
    """A line of a file."""

    file: str
    line: int


@dataclass(frozen=True)
class Outside:
    """A value that lives longer than a call, by the object where its path begins, and the line that reads it."""

    owner: weakref.ref[Any]  # a function, whose cells and globals are meant, or an object
    path: Path
    read: Place


@dataclass
class _Call:
    function: types.FunctionType
    given: dict[str, Any]  # by parameter: a path of the caller, the names its expression reads, or an object
    values: dict[str, Any]


@dataclass
class _Step:
    """One statement, or the condition of one that has statements inside."""

    line: int
    guards: tuple[_Step, ...]
    loops: tuple[_Step, ...]
    reads: set[Path] = field(default_factory=set)
    writes: set[Path] = field(default_factory=set)
    changes: set[Path] = field(default_factory=set)  # in place
    drawn: set[Path] = field(default_factory=set)  # a method is called, as a generator's
    calls: list[_Call] = field(default_factory=list)
    is_sink: bool = False
    is_jump: bool = False
    is_return: bool = False
    mentions: str = ""  # its source, of an assignment
    memos: set[Path] = field(default_factory=set)  # of a condition ``key not in memo``
    by_value: bool = False  # part of the slice: its value is used
    by_effect: bool = False  # part of the slice: a function that it calls changes training

    @property
    def is_relevant(self) -> bool:
        return self.by_value or self.by_effect


@dataclass
class _Summary:
    """What a call of a function needs of its parameters and of the world outside, and whether it changes training."""

    needs: dict[str, dict[Path, Place]] = field(default_factory=dict)  # by parameter: the rest of the path
    outside: list[Outside] = field(default_factory=list)
    has_effect: bool = False


class Script:
    """The user's functions, as far as they were read.

    Args:
        is_state: whether an object is the state.
        is_training: whether an object is trained with, or restored, by the state.
        is_late: whether to stop reading; what is not read is not reported.
    """

    def __init__(self, is_state: TrainingTest, is_training: TrainingTest, is_late: Callable[[], bool]) -> None:
        self.is_state = is_state
        self.is_training = is_training
        self.is_late = is_late
        self.read: dict[types.CodeType, Function] = {}
        self._summaries: dict[tuple[types.CodeType, bool, int], _Summary] = {}

    def function(self, code: types.CodeType, values: Mapping[str, Any], scope: Callable[[str], Any]) -> Function | None:
        """Read one, or return None if its source is not to be had.

        Args:
            values: of its parameters or locals, as far as they are known.
            scope: looks up every other name.
        """
        if self.is_late() or len(self.read) >= _MOST_FUNCTIONS or is_library(code.co_filename):
            return None
        node = _source_of(code)
        if node is None:
            return None
        found = self.read[code] = Function(self, code, node, values, scope)
        return found

    def summary(self, call: _Call, *, for_value: bool, depth: int) -> _Summary:
        """Of a call of a user's function; an empty one for a function that cannot be read."""
        function = call.function
        key = function.__code__, for_value, id(call.values.get("self"))
        if key not in self._summaries:
            self._summaries[key] = _Summary()  # of a recursion
            read = None
            if depth < _MOST_DEPTH:
                read = self.function(function.__code__, call.values, scope_of(function))
            if read is not None:
                self._summaries[key] = read.summary(function, for_value=for_value, depth=depth + 1)
        return self._summaries[key]

    def forget_values(self) -> None:
        """Keep no reference to anything of the script's; lines and names stay."""
        self._summaries.clear()
        for function in self.read.values():
            function.forget_values()

    def changing_line(self, path: Path, beside: types.CodeType | None) -> Place | None:
        """The line that changes the value of this name or attribute, as far as the functions that were read show."""
        if beside in self.read:
            found = self.read[beside].changing_line(path)
            if found is not None:
                return found
        for code, function in self.read.items():
            for step in function.steps:
                for one in (*step.writes, *step.changes, *step.drawn):
                    is_same = one[-1] == path[-1] and (len(one) > 1) == (len(path) > 1)
                    if is_same and code is not beside and (len(path) > 1 or path[0] not in code.co_varnames):
                        return Place(code.co_filename, step.line)
        return None

    def expand(self, value: object, read: Place, depth: int = 0) -> list[Outside] | None:
        """What an object depends on that is used whole; None where it is a plain value, to be looked at itself."""
        if depth > _MOST_DEPTH:
            return []
        if has_type(value, torch.utils.data.DataLoader):
            own = attributes_of(value)
            parts = [own.get("batch_sampler"), own.get("sampler"), own.get("collate_fn")]
            parts += [own.get("dataset")] if own.get("num_workers") == 0 else []  # else it is in other processes
            return [one for part in parts for one in self.expand(part, read, depth + 1) or ()]
        if has_type(value, torch.utils.data.Dataset) and is_library_type(value):
            return self.expand(attributes_of(value).get("dataset"), read, depth + 1) or []
        if has_type(value, torch.utils.data.Sampler) and is_library_type(value):
            return []
        call = None
        found: list[Outside] = []
        if type(value) is types.FunctionType:
            call = _Call(value, {}, {})
            found += self.summary(call, for_value=True, depth=depth + 1).outside
            return found
        if is_users_object(value):
            for name in _ITERABLE:
                method = _plain_function(attribute(value, name))
                if method is not None and not is_library(method.__code__.co_filename):
                    found += self.of_method(method, value, depth)
            return found
        return None

    def of_method(self, method: types.FunctionType, owner: object, depth: int) -> list[Outside]:
        """What the result of this object's method depends on."""
        first = next(iter(method.__code__.co_varnames), "self")
        summary = self.summary(_Call(method, {first: owner}, {first: owner}), for_value=True, depth=depth + 1)
        found = list(summary.outside)
        if _can_be_referred_to(owner):
            for rest, place in summary.needs.get(first, {}).items():
                found += [Outside(weakref.ref(owner), rest, place)] if rest else []
        return found


class Function:
    """The statements of one function, and which of them training depends on."""

    def __init__(
        self, script: Script, code: types.CodeType, node: Any, values: Mapping[str, Any], scope: Callable[[str], Any]
    ) -> None:
        self.code = code
        self.node = node
        self._script = script
        self._values = values
        self._scope = scope
        self.steps: list[_Step] = []
        self._of: dict[ast.AST, _Step] = {}
        self._aliases: set[str] = set()  # of parameters and their groups
        self._sources: dict[str, Path] = {}  # by loop variable: what it is taken from
        self._body(node.body, (), ())

    # ---- what others ask

    def slice(self, *, for_value: bool, depth: int) -> None:
        """Mark the statements that training, or the returned value, depends on."""
        wanted: set[Path] = set()
        for step in self.steps:
            step.by_value = step.by_effect = False
        changed = True
        while changed and not self._script.is_late():
            changed = False
            sinks = {id(loop) for step in self.steps if self._is_sink(step, depth) for loop in step.loops}
            has_sink = any(self._is_sink(step, depth) for step in self.steps)
            guards = {id(guard) for step in self.steps if step.is_relevant for guard in step.guards}
            for step in self.steps:
                by_value = step.is_sink or id(step) in guards or (for_value and step.is_return)
                by_value |= any(_touch(one, path) for one in step.writes | step.changes for path in wanted)
                if step.is_jump:
                    by_value |= id(step.loops[-1]) in sinks if step.loops and not step.is_return else has_sink
                by_effect = self._is_sink(step, depth)
                if (by_value, by_effect) != (step.by_value, step.by_effect):
                    step.by_value, step.by_effect = by_value, by_effect
                    changed = True
                needed = set(self._needs(step, depth)) if step.is_relevant else set()
                if not needed <= wanted:
                    wanted |= needed
                    changed = True

    def summary(self, function: types.FunctionType, *, for_value: bool, depth: int) -> _Summary:
        """Of any call of this function."""
        self.slice(for_value=for_value, depth=depth)
        found = _Summary(has_effect=any(step.is_sink or step.by_effect for step in self.steps))
        parameters = {one.arg for one in _arguments(self.node.args)}
        own = set(self.code.co_varnames)
        for path, place in self.exposed(self.node.body, depth).items():
            if path[0] in parameters:
                found.needs.setdefault(path[0], {}).setdefault(path[1:], place)
            elif path[0] not in own and not self._is_constant(path) and not self.is_memo(path):
                found.outside.append(Outside(weakref.ref(function), path, place))
        found.outside += self.called_outside(depth)
        return found

    def called_outside(self, depth: int) -> list[Outside]:
        """What the functions that the slice calls depend on besides their arguments."""
        found = []
        for step in self.steps:
            for call, summary in self._summaries(step, depth):
                found += summary.outside
                for name, given in call.given.items():
                    if not isinstance(given, (tuple, set)) and _can_be_referred_to(given):
                        found += [
                            Outside(weakref.ref(given), rest, place)
                            for rest, place in summary.needs.get(name, {}).items()
                            if rest
                        ]
        return found

    def forget_values(self) -> None:
        """As :meth:`Script.forget_values`."""
        self._values, self._scope = {}, lambda name: MISSING
        for step in self.steps:
            step.calls.clear()

    def loops_at(self, line: int) -> list[Any]:
        """The loops around a line, the outermost first."""
        kinds = (ast.For, ast.While, ast.AsyncFor)
        return [one for one in _own_nodes(self.node) if isinstance(one, kinds) and _spans(one, line)]

    def exposed(self, body: list[ast.stmt], depth: int, header: ast.AST | None = None) -> dict[Path, Place]:
        """What relevant statements read that nothing before them in ``body`` has written, each with a line."""
        found: dict[Path, Place] = {}
        written: set[Path] = set()
        if header is not None:
            self._expose(header, written, found, depth)
        self._walk(body, written, found, depth)
        return found

    def is_restored(self, name: str, before: int) -> bool:
        """Whether this local is derived from the state when the function is entered, or anew in each step."""
        for step in self.steps:
            if (name,) in step.writes and self._is_of_state(step):
                is_before = step.line < before
                if is_before or not any(path[0] == name for path in step.reads):
                    return True
        return False

    def is_advanced(self, path: Path) -> bool:
        """Whether ``next()`` is called with it, or a loop walks over it."""
        return any(path in step.changes for step in self.steps)

    def is_memo(self, path: Path) -> bool:
        """Whether values only enter this dict where their key is missing, as in a cache of pure results."""
        found = [step for step in self.steps if path in step.changes]
        return bool(found) and all(any(path in guard.memos for guard in step.guards) for step in found)

    def modulus(self, path: Path) -> int | None:
        """``k``, if what training depends on reads this number as ``n % k`` only."""
        found: set[int] = set()
        for node, step in self._of.items():
            if not step.is_relevant or path not in step.reads or path in step.writes:
                continue
            moduli: list[ast.AST] = []
            for one in (inner for head in _heads(node) for inner in ast.walk(head)):
                if (
                    isinstance(one, ast.BinOp)
                    and isinstance(one.op, ast.Mod)
                    and path in map(_path, _summands(one.left))
                ):
                    by = (
                        one.right.value
                        if isinstance(one.right, ast.Constant)
                        else self.value(_path(one.right) or ("",))
                    )
                    if type(by) is not int or by < 1:
                        return None
                    found.add(by)
                    moduli.append(one)
            reads = sum(_path(one) == path for head in _heads(node) for one in ast.walk(head))
            if reads != len(moduli):
                return None
        return math.lcm(*found) if found else None

    def changing_line(self, path: Path) -> Place | None:
        """The line that changes it: in a loop rather than before it, from its last value rather than to a constant."""
        found = [step for step in self.steps if any(_touch(one, path) for one in step.writes | step.changes)]
        found = found or [step for step in self.steps if any(_touch(one, path) for one in step.drawn)]
        if not any(step.loops or step.is_relevant for step in found):
            return None
        best = max(found, key=lambda step: (bool(step.loops), step.is_relevant, path in step.reads, bool(step.reads)))
        return Place(self.code.co_filename, best.line)

    # ---- the slice

    def _is_sink(self, step: _Step, depth: int) -> bool:
        if step.is_sink:
            return True
        return any(self._script.summary(call, for_value=False, depth=depth).has_effect for call in step.calls)

    def _summaries(self, step: _Step, depth: int) -> Iterator[tuple[_Call, _Summary]]:
        for call in step.calls:
            if step.by_value:
                yield call, self._script.summary(call, for_value=True, depth=depth)
            elif step.by_effect:
                yield call, self._script.summary(call, for_value=False, depth=depth)

    def _needs(self, step: _Step, depth: int) -> Iterator[Path]:
        if step.by_value:
            yield from step.reads
        for call, summary in self._summaries(step, depth):
            for name, rests in summary.needs.items():
                given = call.given.get(name, ())
                if isinstance(given, tuple) and given:
                    yield from ((*given, *rest)[:_LONGEST_PATH] for rest in rests)
                elif isinstance(given, set):
                    yield from given

    def _is_of_state(self, step: _Step) -> bool:
        if any(one in step.mentions for one in _FRESH):
            return False
        return any(self._script.is_state(self.value((path[0],))) for path in step.reads) or any(
            self._script.is_training(self.value(path)) for path in step.reads
        )

    def _is_constant(self, path: Path) -> bool:
        value = self.value(path[:1])
        return type(value) in (types.FunctionType, types.BuiltinFunctionType, type) and len(path) == 1

    # ---- what is read before it is written

    def _walk(self, body: list[ast.stmt], written: set[Path], found: dict[Path, Place], depth: int) -> bool:
        """Add what is exposed; return whether control leaves the block early."""
        for node in body:
            self._expose(node, written, found, depth)
            if isinstance(node, ast.If):
                branches = [(set(written), one) for one in (node.body, node.orelse)]
                left = [(set_, self._walk(block, set_, found, depth)) for set_, block in branches]
                staying = [set_ for set_, leaves in left if not leaves]
                if not staying:
                    return True
                written |= set.intersection(*staying)
            elif isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
                self._walk(node.body, written, found, depth)  # taken for one that runs at least once
                self._walk(node.orelse, written, found, depth)
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                if self._walk(node.body, written, found, depth):
                    return True
            elif isinstance(node, (ast.Try, ast.TryStar)):
                before = set(written)
                self._walk(node.body, written, found, depth)
                for handler in node.handlers:
                    self._walk(handler.body, set(before), found, depth)
                self._walk(node.orelse, written, found, depth)
                self._walk(node.finalbody, written, found, depth)
            elif isinstance(node, ast.Match):
                for case in node.cases:
                    self._walk(case.body, set(written), found, depth)
            elif isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
                return True
        return False

    def _expose(self, node: ast.AST, written: set[Path], found: dict[Path, Place], depth: int) -> None:
        step = self._of.get(node)
        if step is None:
            return
        if step.is_relevant:
            for path in self._needs(step, depth):
                if not any(is_prefix(one, path) for one in written):
                    found.setdefault(path, Place(self.code.co_filename, step.line))
        written |= step.writes

    # ---- statements

    def _body(self, body: Iterable[ast.stmt], guards: tuple[_Step, ...], loops: tuple[_Step, ...]) -> None:
        for node in body:
            step = self._of[node] = _Step(node.lineno, guards, loops)
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

    def _statement(self, node: ast.stmt, step: _Step) -> None:
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
                step.changes |= {path for path in [_path(value)] if path}
            case ast.While(test=test) | ast.If(test=test):
                self._read(test, step)
                if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn):
                    step.memos |= {path for path in [_path(test.comparators[0])] if path}
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
                    receiver = _root(value.func.value)
                    if receiver is not None and receiver in step.drawn:
                        self._change(receiver, step)
                step.is_return |= isinstance(value, (ast.Yield, ast.YieldFrom))
            case ast.Return(value=value):
                if value is not None:
                    self._read(value, step)
                step.is_return = step.is_jump = True
            case ast.Break() | ast.Continue() | ast.Raise():
                step.is_jump = True
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                step.writes.add((name,))
            case _:
                pass

    def _write(self, target: ast.expr, value: ast.expr, step: _Step) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._write(one, value, step)
        elif isinstance(target, ast.Starred):
            self._write(target.value, value, step)
        elif isinstance(target, ast.Subscript):
            self._read(target.slice, step)
            path = _path(target.value) or _root(target.value)
            if path:
                self._change(path, step)
                step.is_sink |= self._is_trained(path)
        elif path := _path(target):
            step.writes.add(path)
            if len(path) > 1:
                owner = self.value(path[:1])
                is_ours = self._script.is_state(owner) and path[1] in attributes_of(owner).get("handlers", {})
                step.is_sink |= is_ours or (not self._script.is_state(owner) and self._is_trained(path[:-1]))
        elif isinstance(target, ast.Attribute):
            root = _root(target.value)
            if root:
                self._change(root, step)
                step.is_sink |= self._is_trained(root)

    def _change(self, path: Path, step: _Step) -> None:
        step.changes.add(path)
        if path[0] in self._sources:
            step.changes.add(self._sources[path[0]])

    def _alias(self, target: ast.expr, value: ast.expr) -> None:
        """Note which loop variables are parameters or their groups."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and isinstance(target, ast.Tuple):
            if value.func.id == "zip" and len(target.elts) == len(value.args):
                for one, given in zip(target.elts, value.args, strict=True):
                    self._alias(one, given)
                return
            if value.func.id == "enumerate" and len(target.elts) == 2 and value.args:
                self._alias(target.elts[1], value.args[0])
                return
        source = _path(value) or _root(value)
        if source is not None:
            self._sources |= {one.id: source for one in ast.walk(target) if isinstance(one, ast.Name)}
        for one in ast.walk(value):
            name = one.id if isinstance(one, ast.Name) else ""
            is_group = isinstance(one, ast.Attribute) and one.attr in _PARAMETERS
            path = _path(one.value) if isinstance(one, ast.Attribute) and is_group else None
            if name in self._aliases or (path and self._script.is_training(self.value(path))):
                self._aliases |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}

    # ---- expressions

    def _read(self, node: ast.AST, step: _Step, hidden: frozenset[str] = frozenset()) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)) and (path := _path(node)):
            if path[0] not in hidden:
                step.reads.add(path[:_LONGEST_PATH])
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
            names = {one.arg for one in _arguments(node.args)}
            self._read(node.body, step, hidden | names)
        elif isinstance(node, ast.NamedExpr):
            self._read(node.value, step, hidden)
            step.writes.add((node.target.id,))
        elif not isinstance(node, ast.JoinedStr):
            for child in ast.iter_child_nodes(node):
                self._read(child, step, hidden)

    def _call(self, node: ast.Call, step: _Step, hidden: frozenset[str]) -> None:
        path = _path(node.func)
        arguments = [*node.args, *(one.value for one in node.keywords)]
        name = path[-1] if path else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if path and (path[0] in _SILENT or (name in ("tell", "report", "commit") and self._is_state_path(path))):
            return
        if path and path[0] not in hidden and self._calls_users(node, path, step, hidden):
            return
        for one in arguments:
            self._read(one, step, hidden)
        receiver = path[:-1] if path else ()
        if not path and isinstance(node.func, ast.Attribute):
            self._read(node.func.value, step, hidden)
            receiver = _root(node.func.value) or ()
            step.drawn |= {receiver} if receiver else set()
        elif not path:
            self._read(node.func, step, hidden)
        elif receiver and not has_type(self.value(receiver), types.ModuleType) and receiver[0] not in hidden:
            step.reads.add(receiver[:_LONGEST_PATH])
            step.drawn.add(receiver)
        elif len(path) == 1 and path[0] not in hidden and self.value(path) is not MISSING:
            step.reads.add(path)
        if receiver and receiver[0] not in hidden and (name in _MUTATORS or _is_in_place(name)):
            self._change(receiver, step)
        if name == "next" and node.args and (given := _path(node.args[0])):
            step.changes.add(given)
        step.is_sink |= self._changes_training(name, receiver, node)

    def _changes_training(self, name: str, receiver: Path, node: ast.Call) -> bool:
        if name == "backward" and isinstance(node.func, ast.Attribute):
            return True
        in_place = _is_in_place(name)
        if receiver and (in_place or name in _CHANGES_TRAINING) and self._is_trained(receiver):
            return not self._is_state_path(receiver) or len(receiver) > 1
        is_function = not receiver or has_type(self.value(receiver), types.ModuleType)
        if name == "step" or (in_place and is_function and isinstance(node.func, (ast.Name, ast.Attribute))):
            return any(
                self._is_trained(path) for one in node.args for path in [_path(one) or _root(one)] if path is not None
            )
        return False

    def _calls_users(self, node: ast.Call, path: Path, step: _Step, hidden: frozenset[str]) -> bool:
        """Note a call of the user's own function, method or object; return whether it was one."""
        value = self.value(path)
        owner = self.value(path[:-1]) if len(path) > 1 else MISSING
        function = _plain_function(value)
        bound: Any = None
        if function is None and is_users_object(value) and not has_type(value, nn.Module):
            function, bound = _plain_function(attribute(value, "__call__")), path
        elif has_type(value, nn.Module):
            step.reads.add(path[:_LONGEST_PATH])
            for one in _modules_of(value):
                forward = _plain_function(attribute(one, "forward"))
                if forward is not None and not is_library(forward.__code__.co_filename):
                    first = next(iter(forward.__code__.co_varnames), "self")
                    step.calls.append(_Call(forward, {first: one}, {first: one}))
            for child in (*node.args, *(one.value for one in node.keywords)):
                self._read(child, step, hidden)
            return True
        elif function is not None and len(path) > 1 and path[-1] not in attributes_of(owner):
            is_plain = type(value) is staticmethod or has_type(owner, type, types.ModuleType)
            bound = None if is_plain else path[:-1]
        if function is None or is_library(function.__code__.co_filename):
            return False
        names = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        given: dict[str, Any] = {}
        values: dict[str, Any] = {}
        if bound is not None and names:
            first = names.pop(0)
            given[first], values[first] = bound[:_LONGEST_PATH], self.value(bound)
        pairs = [*zip(names, node.args, strict=False), *((one.arg or "", one.value) for one in node.keywords)]
        for name, one in pairs:
            argument = _path(one)
            if argument and argument[0] not in hidden:
                given[name], values[name] = argument, self.value(argument)
            else:
                inner = _Step(step.line, (), ())
                self._read(one, inner, hidden)
                given[name] = inner.reads
                step.calls += inner.calls
                step.changes |= inner.changes
        call = _Call(function, given, {name: one for name, one in values.items() if one is not MISSING})
        step.calls.append(call)
        return True

    # ---- values

    def value(self, path: Path) -> Any:
        """What the path names at this moment, or ``MISSING``."""
        found = self._values.get(path[0], MISSING)
        if found is MISSING and path[0] not in self.code.co_varnames:
            found = self._scope(path[0])
        for name in path[1:]:
            if found is MISSING:
                return MISSING
            found = attribute(found, name)
        return found

    def _is_state_path(self, path: Path) -> bool:
        return self._script.is_state(self.value(path[:1]))

    def _is_trained(self, path: Path) -> bool:
        if path[0] in self._aliases:
            return True
        return any(
            (value := self.value(path[:size])) is not MISSING and self._script.is_training(value)
            for size in range(1, len(path) + 1)
        )


# ---- objects


def scope_of(function: types.FunctionType) -> Callable[[str], Any]:
    """Look up names as this function would: its cells, then its module."""

    def look(name: str) -> Any:
        names = function.__code__.co_freevars
        if name in names and function.__closure__ is not None:
            try:
                return function.__closure__[names.index(name)].cell_contents
            except ValueError:  # not filled yet
                return MISSING
        return function.__globals__.get(name, MISSING)

    return look


def is_library_type(value: object) -> bool:
    """Whether the value's class is not the user's own."""
    return not is_users_object(value)


def is_users_object(value: object) -> bool:
    """Whether it is an instance of a class that the script or a module beside it defines."""
    kind = type(value)
    if value is MISSING or kind in (types.FunctionType, types.ModuleType, type) or kind.__module__ == "builtins":
        return False
    functions = (_plain_function(one) for one in kind.__dict__.values())
    return any(one is not None and not is_library(one.__code__.co_filename) for one in functions)


def _plain_function(value: object) -> types.FunctionType | None:
    """The function under decorators, or None."""
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


def _modules_of(value: Any) -> Iterator[Any]:
    waiting, seen = [value], 0
    while waiting and seen < _MOST_MODULES:
        one = waiting.pop()
        seen += 1
        yield one
        waiting += [inner for inner in attributes_of(one).get("_modules", {}).values() if inner is not None]


def _can_be_referred_to(value: object) -> bool:
    return any("__weakref__" in one.__dict__ for one in type_line(value)) or type(value) is types.FunctionType


# ---- source


def _source_of(code: types.CodeType) -> Any:
    lines = linecache.getlines(code.co_filename)
    first = code.co_firstlineno
    last = max((end for one in _codes(code) for _, end, _, _ in one.co_positions() if end), default=0)
    if not lines or not first <= last <= len(lines):
        return None
    is_indented = lines[first - 1][:1] in " \t"
    for extra in range(6):  # brackets that close behind the last instruction
        text = "".join(lines[first - 1 : last + extra])
        try:
            tree = ast.parse(f"if 1:\n{text}" if is_indented else text)
        except (SyntaxError, ValueError):
            continue
        ast.increment_lineno(tree, first - 2 if is_indented else first - 1)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((one for one in ast.walk(tree) if isinstance(one, kinds) and one.name == code.co_name), None)
    return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if type(one) is types.CodeType:
            yield from _codes(one)


def _path(node: ast.AST | None) -> Path | None:
    """``a.b.c`` as its names; None for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else None


def _root(node: ast.AST | None) -> Path | None:
    """The longest path with which an expression such as ``a.b[0].c()`` begins."""
    while node is not None:
        if path := _path(node):
            return path
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func.value if isinstance(node.func, ast.Attribute) else None
        else:
            return None
    return None


def _arguments(given: ast.arguments) -> list[ast.arg]:
    more = [one for one in (given.vararg, given.kwarg) if one is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *more]


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of functions inside, the outer ones first."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)


def _heads(node: ast.AST) -> list[ast.AST]:
    """The parts of a statement without the statements inside."""
    return [one for one in ast.iter_child_nodes(node) if not isinstance(one, (ast.stmt, ast.excepthandler))]


def _summands(node: ast.expr) -> list[ast.expr]:
    return (
        [*_summands(node.left), node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else [node]
    )


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _spans(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))
