"""Find the part of the script's source code that the next training step depends on.

This is a backward slice. It begins where the script changes training (``backward()``, ``optimizer.step()``, ``state.x =
…``, a write to a learning rate or to a parameter). From there it follows assignments, conditions and calls of the
user's own functions back to the names that are read. Values that only reach a print, a logger or a timer are not part
of the slice. Objects are read only through ``fingerprints.attribute``, so no code of the script is executed.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from samebits.training.group.calling_place import is_library
from samebits.training.state.script.expressions import Path
from samebits.training.state.script.fingerprints import (
    MISSING,
    attribute,
    attributes_of,
    can_be_referred_to,
    defaults_of,
    has_type,
    is_library_type,
    is_users_object,
    items_of,
    modules_of,
    plain_function,
    scope_of,
    type_line,
)
from samebits.training.state.script.first_step import fills_from_data
from samebits.training.state.script.statements import (
    Call,
    Statement,
    Statements,
    TrainingTest,
    arguments_of,
    calls_of,
    heads_of,
    path_of,
    root_of,
    summands_of,
)

_LONGEST_PATH = 4
_MOST_FUNCTIONS = 80
_MOST_DEPTH = 6
_FRESH = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "deepcopy", "copy", "clone")
_KEEPS_VALUES = frozenset(
    {
        *("eval", "train", "requires_grad_", "to", "cuda", "cpu", "parameters", "named_parameters", "buffers"),
        *("named_buffers", "modules", "named_modules", "children", "state_dict", "items", "values", "keys", "get"),
        *("forward", "detach", "clone", "share_memory", "sum", "mean", "norm", "square", "view", "reshape"),
    }
)
"""Methods that change no value of a module, dict or tensor, apart from its place."""
_ATOMS = (int, float, bool, str, bytes, type(None))
_OF_GROUPS = frozenset({"param_groups", "get_last_lr", "_last_lr"})
_NOT_CALLED = frozenset(
    {
        *("__init__", "__new__", "__post_init__", "__del__", "__init_subclass__", "__set_name__", "__hash__"),
        *("__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getattr__"),
        *("__getattribute__", "__setattr__"),
    }
)
"""Special methods that neither Python nor a library calls on an object that it gets as data."""


def is_prefix(short: Path, long: Path) -> bool:
    """Return whether ``long`` equals ``short`` or is an attribute of it."""
    return long[: len(short)] == short


def _touch(one: Path, other: Path) -> bool:
    return is_prefix(one, other) or is_prefix(other, one)


@dataclass(frozen=True)
class SourceLine:
    """A line of a file."""

    file: str
    line: int


@dataclass(frozen=True)
class Outside:
    """A value that outlives a function call: the object at the start of its path, and the line that reads it."""

    owner: weakref.ref[Any]  # an object, or a function, which stands for its cells and globals
    path: Path
    read: SourceLine


@dataclass
class _Summary:
    """The parameters and outside values that a call depends on, and whether the call changes training."""

    needs: dict[str, dict[Path, SourceLine]] = field(default_factory=dict)  # parameter → rest of the path
    outside: list[Outside] = field(default_factory=list)
    has_effect: bool = False


class ScriptFunctions:
    """The user's functions whose source has been read.

    Attributes:
        hooks: the calls of hooks by the method that runs them, ``backward`` or ``step``.

    Args:
        is_state: returns whether an object is the state.
        is_training: returns whether an object takes part in training or is restored by the state.
        is_late: returns whether to stop reading; functions that were not read are not reported.
    """

    def __init__(self, is_state: TrainingTest, is_training: TrainingTest, is_late: Callable[[], bool]) -> None:
        self.is_state = is_state
        self.is_training = is_training
        self.is_late = is_late
        self.read: dict[types.CodeType, Function] = {}
        self.hooks: Mapping[str, list[Call]] = {}
        self._summaries: dict[tuple[types.CodeType, bool, int], _Summary] = {}

    def function(self, code: types.CodeType, values: Mapping[str, Any], scope: Callable[[str], Any]) -> Function | None:
        """Analyze a function's source; return None if the source is not available.

        Args:
            code: the function's code.
            values: known values of the function's parameters or locals.
            scope: looks up every other name.
        """
        if self.is_late() or len(self.read) >= _MOST_FUNCTIONS or is_library(code.co_filename):
            return None
        node = _source_of(code)
        if node is None:
            return None
        found = self.read[code] = Function(self, code, node, values, scope)
        return found

    def summary(self, call: Call, *, for_value: bool, depth: int) -> _Summary:
        """Return the summary of a call, which is empty if the function's source cannot be read."""
        function = call.function
        key = function.__code__, for_value, id(call.values.get("self"))
        if key not in self._summaries:
            self._summaries[key] = _Summary()  # ends recursive calls
            read = None
            if depth < _MOST_DEPTH:
                values = {**defaults_of(function), **call.values}
                read = self.function(function.__code__, values, scope_of(function))
            if read is not None:
                self._summaries[key] = read.summary(function, for_value=for_value, depth=depth + 1)
        return self._summaries[key]

    def forget_values(self) -> None:
        """Drop all references to the script's objects, but keep the lines and names."""
        self._summaries.clear()
        self.hooks = {}
        for function in self.read.values():
            function.forget_values()

    def changing_line(self, path: Path, beside: types.CodeType | None) -> SourceLine | None:
        """Return the line that changes this name or attribute in a function that has been read, or None."""
        function = self.read.get(beside) if beside is not None else None
        found = None if function is None else function.changing_line(path, is_prefix)
        if found is not None:
            return found
        for code, other in self.read.items():
            for step in other.steps:
                for one in (*step.writes, *step.changes, *step.drawn):
                    is_same = one[-1] == path[-1] and (len(one) > 1) == (len(path) > 1)
                    if is_same and code is not beside and (len(path) > 1 or path[0] not in code.co_varnames):
                        return SourceLine(code.co_filename, step.line)
        return None if function is None else function.changing_line(path, _touch)

    def is_changed_by(self, path: Path) -> bool:
        """Return whether a function that has been read changes this value in place."""
        return any(
            one[-1] == path[-1] and (len(one) > 1) == (len(path) > 1)
            for function in self.read.values()
            for step in function.steps
            for one in step.changes
        )

    def line_from_data(self, path: Path, *, is_local_of: types.CodeType | None) -> SourceLine | None:
        """Return the first line that computes this value from data; None if no line does, or one counts it on.

        Args:
            path: the value.
            is_local_of: the function whose local variable it is; None for a value that outlives the call.
        """
        found: list[SourceLine] = []
        for code, function in self.read.items():
            if is_local_of not in (None, code) or (
                is_local_of is None and path[0] in code.co_varnames and len(path) < 2
            ):
                continue
            for node, step in function.statements():
                if any(one[-1] == path[-1] and (len(one) > 1) == (len(path) > 1) for one in step.writes | step.changes):
                    found += (
                        [SourceLine(code.co_filename, step.line)]
                        if fills_from_data(node, function.node, function.batches)
                        else []
                    )
        return min(found, key=lambda one: one.line, default=None)

    def expand(self, value: object, read: SourceLine, depth: int = 0) -> list[Outside] | None:
        """Return the values that an object depends on when it is used as a whole, or None if it is a plain value."""
        if depth > _MOST_DEPTH:
            return []
        if has_type(value, torch.utils.data.DataLoader):
            own = attributes_of(value)
            parts = [own.get("batch_sampler"), own.get("sampler"), own.get("collate_fn")]
            parts += [own.get("dataset")] if own.get("num_workers") == 0 else []  # else other processes use it
            return [one for part in parts for one in self.expand(part, read, depth + 1) or ()]
        if has_type(value, torch.utils.data.Dataset) and is_library_type(value):
            return self.expand(attributes_of(value).get("dataset"), read, depth + 1) or []
        if has_type(value, torch.utils.data.Sampler) and is_library_type(value):
            return []
        if type(value) is functools.partial and plain_function(value.func) is not None:
            return self._of_partial(value, depth)
        if (items := items_of(value)) is not None:
            return [one for item in items for one in self.expand(item, read, depth + 1) or ()]
        if type(value) is types.FunctionType:
            return self.summary(Call(value, {}, {}), for_value=True, depth=depth + 1).outside
        if type(value) is types.MethodType:
            return [one for call in calls_of(value) for one in self.of_method(call.function, value.__self__, depth)]
        if not is_users_object(value):
            return None
        called = {name for one in self.read.values() for name in one.called} if depth else set()
        names = {name for one in type_line(value) for name in one.__dict__ if name[:2] == name[-2:] == "__"}
        found: list[Outside] = []
        for name in sorted((names - _NOT_CALLED) | called | {"forward"}):
            method = plain_function(attribute(value, name))
            if method is not None and not is_library(method.__code__.co_filename):
                found += self.of_method(method, value, depth)
        return found

    def _of_partial(self, value: functools.partial[Any], depth: int) -> list[Outside]:
        function = plain_function(value.func)
        assert function is not None
        given = {**dict(zip(function.__code__.co_varnames, value.args, strict=False)), **value.keywords}
        summary = self.summary(Call(function, {}, given), for_value=True, depth=depth + 1)
        needs = [(given[name], rest, place) for name in given for rest, place in summary.needs.get(name, {}).items()]
        return summary.outside + [
            Outside(weakref.ref(one), rest, place) for one, rest, place in needs if rest and can_be_referred_to(one)
        ]

    def of_method(self, method: types.FunctionType, owner: object, depth: int) -> list[Outside]:
        """Return the values on which the result of this object's method depends."""
        first = next(iter(method.__code__.co_varnames), "self")
        summary = self.summary(Call(method, {first: owner}, {first: owner}), for_value=True, depth=depth + 1)
        found = list(summary.outside)
        if can_be_referred_to(owner):
            for rest, place in summary.needs.get(first, {}).items():
                found += [Outside(weakref.ref(owner), rest, place)] if rest else []
        return found


class Function(Statements):
    """The statements of one function. Each is marked if training depends on it."""

    def __init__(self, script: ScriptFunctions, *given: Any) -> None:
        super().__init__(*given, is_state=script.is_state, is_training=script.is_training)
        self._script = script

    # ---- interface

    def slice(self, *, for_value: bool, depth: int) -> None:
        """Mark the statements on which training, or with ``for_value`` the returned value, depends."""
        wanted: set[Path] = set()
        for_value &= any(step.is_return and step.gives_value for step in self.steps)
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
        """Summarize calls of this function."""
        self.slice(for_value=for_value, depth=depth)
        found = _Summary(has_effect=any(step.is_sink or step.by_effect for step in self.steps))
        parameters = {one.arg for one in arguments_of(self.node.args)}
        own = set(self.code.co_varnames)
        defaults = defaults_of(function)
        for path, place in self.exposed(self.node.body, depth).items():
            if path[0] in parameters:
                found.needs.setdefault(path[0], {}).setdefault(path[1:], place)
                found.outside += [Outside(weakref.ref(function), path, place)] if path[0] in defaults else []
            elif path[0] not in own and not self._is_constant(path) and not self.is_memo(path):
                found.outside.append(Outside(weakref.ref(function), path, place))
        found.outside += self.called_outside(depth)
        return found

    def called_outside(self, depth: int) -> list[Outside]:
        """Return the values outside the function that the calls in the slice depend on, apart from their arguments."""
        found = []
        for step in self.steps:
            for call, summary in self._summaries(step, depth):
                found += summary.outside
                for name, given in call.given.items():
                    if not isinstance(given, (tuple, set)) and can_be_referred_to(given):
                        found += [
                            Outside(weakref.ref(given), rest, place)
                            for rest, place in summary.needs.get(name, {}).items()
                            if rest
                        ]
        return found

    def loops_at(self, line: int) -> list[Any]:
        """Return the loops around a line, outermost first."""
        kinds = (ast.For, ast.While, ast.AsyncFor)
        return [
            one
            for one in _own_nodes(self.node)
            if isinstance(one, kinds) and one.lineno <= line <= (one.end_lineno or line)
        ]

    def exposed(self, body: list[ast.stmt], depth: int, header: ast.AST | None = None) -> dict[Path, SourceLine]:
        """Return the names that relevant statements read before ``body`` writes them, with the lines of the reads."""
        found: dict[Path, SourceLine] = {}
        written: set[Path] = set()
        if header is not None:
            self._expose(header, written, found, depth)
        self._walk(body, written, found, depth)
        return found

    def is_restored(self, name: str, before: int) -> bool:
        """Return whether this local variable is computed from the state on entry, or computed anew in each step."""
        for step in self.steps:
            if (name,) not in step.writes:
                continue
            if step.line < before:
                is_restored = self._is_of_state(step) and not self._begins_anew(name, step)
                if is_restored or self._is_refilled(name, step) or self._is_written_back(name, step):
                    return True
            elif self._is_of_state(step) and not any(path[0] == name for path in step.reads):
                return True
        return False

    def _is_written_back(self, name: str, step: Statement) -> bool:
        """Return whether a rate that is taken from the optimizer is also kept there, as in ``group["lr"] = lr``."""
        if not any(one in _OF_GROUPS for path in step.reads for one in path):
            return False
        return any(
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and name in one.names
            for node, one in self._of.items()
            if one.is_sink and one.loops
        )

    def _is_refilled(self, name: str, step: Statement) -> bool:
        """Return whether this and all other statements that set the variable take it from a loader of the state."""
        sources = step.names - {name}
        others = [one for one in self.steps if (name,) in one.writes and one is not step]
        return self._is_from_loader(step) and all(sources & one.names for one in others)

    def _is_from_loader(self, step: Statement) -> bool:
        """Return whether a statement takes data from a loader that the state restores, also by another variable."""
        waiting, seen = [step], {id(step)}
        while waiting:
            one = waiting.pop()
            values = map(self.value, ((name,) for name in one.names))
            if any(has_type(value, torch.utils.data.DataLoader) and self._is_training(value) for value in values):
                return True
            names = {(name,) for name in one.names}
            before = [other for other in self.steps if other.line < one.line and other.writes & names]
            waiting += [other for other in before if id(other) not in seen]
            seen |= {id(other) for other in before}
        return False

    def _begins_anew(self, name: str, step: Statement) -> bool:
        """Return whether a new call creates this value from the model or optimizer, but cannot restore its changes.

        A schedule begins at its first step again, and an average at the current weights. A number is left out, because
        a script may write it back.
        """
        value = self.value((name,))
        sources = [self.value(path[:size]) for path in step.reads for size in (1, len(path))]
        if any(self._is_state(one) for one in sources) or self._is_from_loader(step) or value is MISSING:
            return False
        return type(value) not in _ATOMS

    def taken_from_optimizer(self, name: str, before: int) -> tuple[ast.expr, SourceLine] | None:
        """Return the expression that sets this local once, outside loops, to a value of an optimizer or schedule."""
        found = [(node, step) for node, step in self._of.items() if (name,) in step.writes | step.changes]
        if len(found) != 1:
            return None
        node, step = found[0]
        value = _assigned_to(name, node)
        if value is None or step.loops or step.guards or step.line >= before:
            return None
        names = {one.id for one in ast.walk(value) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        names -= {one.id for one in ast.walk(value) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        is_of_groups = any(isinstance(one, ast.Attribute) and one.attr in _OF_GROUPS for one in ast.walk(value))
        is_of_groups |= any(_is_group(self.value((one,))) for one in names)
        changing = {path[0] for one in self.steps if one.loops for path in one.writes}
        return (value, SourceLine(self.code.co_filename, step.line)) if is_of_groups and not names & changing else None

    def is_advanced(self, path: Path) -> bool:
        """Return whether the script calls ``next()`` on the value, or a loop iterates over it."""
        return any(path in step.changes for step in self.steps)

    def statements(self) -> Iterator[tuple[ast.AST, Statement]]:
        """Yield all statements with what they read and write."""
        yield from self._of.items()

    def is_set_once(self, name: str) -> bool:
        """Return whether a local is empty before the loops, and filled only where it is found empty."""
        steps = [(node, step) for node, step in self._of.items() if (name,) in step.writes | step.changes]
        inside = [step for _, step in steps if step.loops]
        before = [node for node, step in steps if not step.loops]
        is_empty = bool(before) and all(
            isinstance(one, (ast.Assign, ast.AnnAssign)) and _is_empty_literal(one.value) for one in before
        )
        return (
            is_empty
            and bool(inside)
            and all(any(path[0] == name for guard in step.guards for path in guard.reads) for step in inside)
        )

    def taken_by_call(self, name: str, before: int) -> tuple[str, SourceLine] | None:
        """Return what each call takes this local from before the line ``before``, and the line, if it keeps it.

        It is the weights, or a loader that the state restores. A copy of a part of the weights, as in ``model[0]``, is
        left out, because the part may be frozen.
        """
        writes = [(node, step) for node, step in self._of.items() if (name,) in step.writes]
        if len(writes) != 1:
            return None
        node, step = writes[0]
        if step.line >= before or len(step.guards) > len(step.loops):
            return None
        is_batch = any(isinstance(one, ast.Call) and path_of(one.func) == ("next",) for one in ast.walk(node))
        source = "weights" if self._copies_weights(node, step) else ""
        source = "data loader" if is_batch and self._is_from_loader(step) else source
        calls = [one for one in _own_nodes(self.node) if isinstance(one, ast.Call)] if source else []
        changes = [path[0] for node, other in self._of.items() for path in other.changes if not _keeps_values(node)]
        if not source or name in changes or any(_may_change(one, name, before) for one in calls):
            return None
        return source, SourceLine(self.code.co_filename, step.line)

    def _copies_weights(self, node: ast.AST, step: Statement) -> bool:
        is_part = any(isinstance(one, ast.Subscript) for one in ast.walk(node))
        copied = [self.value(path) for path in step.reads] if step.copies and not is_part else []
        return any(_has_trained_weights(one) for one in copied if self._is_training(one))

    def is_memo(self, path: Path) -> bool:
        """Return whether values are only added to this dict for missing keys, as in a cache of pure results."""
        found = [(node, step) for node, step in self._of.items() if path in step.changes]
        return bool(found) and all(
            any(path in guard.memos for guard in step.guards) and not fills_from_data(node, self.node, self.batches)
            for node, step in found
        )

    def modulus(self, path: Path) -> int | None:
        """Return ``k`` if the slice uses this number only as ``n % k``, otherwise None."""
        found: set[int] = set()
        for node, step in self._of.items():
            if not step.is_relevant or path not in step.reads or path in step.writes:
                continue
            moduli: list[ast.AST] = []
            for one in (inner for head in heads_of(node) for inner in ast.walk(head)):
                if (
                    isinstance(one, ast.BinOp)
                    and isinstance(one.op, ast.Mod)
                    and path in map(path_of, summands_of(one.left))
                ):
                    by = (
                        one.right.value
                        if isinstance(one.right, ast.Constant)
                        else self.value(path_of(one.right) or ("",))
                    )
                    if type(by) is not int or by < 1:
                        return None
                    found.add(by)
                    moduli.append(one)
            reads = sum(path_of(one) == path for head in heads_of(node) for one in ast.walk(head))
            if reads != len(moduli):
                return None
        return math.lcm(*found) if found else None

    def changing_line(self, path: Path, reaches: Callable[[Path, Path], bool]) -> SourceLine | None:
        """Return the line that changes the value.

        Lines in loops are preferred, and updates are preferred over constant assignments.

        Args:
            path: the value.
            reaches: returns whether a change of the second path changes the value at the first.
        """
        found = [step for step in self.steps if any(reaches(path, one) for one in step.writes | step.changes)]
        found = found or [step for step in self.steps if any(reaches(path, one) for one in step.drawn)]
        if not any(step.loops or step.is_relevant for step in found):
            return None
        best = max(found, key=lambda step: (bool(step.loops), step.is_relevant, path in step.reads, bool(step.reads)))
        return SourceLine(self.code.co_filename, best.line)

    # ---- the slice

    def _is_sink(self, step: Statement, depth: int) -> bool:
        if step.is_sink:
            return True
        return any(self._script.summary(call, for_value=False, depth=depth).has_effect for call in step.calls)

    def _summaries(self, step: Statement, depth: int) -> Iterator[tuple[Call, _Summary]]:
        for call in (*step.calls, *(one for name in step.runs for one in self._script.hooks.get(name, ()))):
            if step.by_value:
                yield call, self._script.summary(call, for_value=True, depth=depth)
            elif step.by_effect:
                yield call, self._script.summary(call, for_value=False, depth=depth)

    def _needs(self, step: Statement, depth: int) -> Iterator[Path]:
        if step.by_value:
            yield from step.reads
        for call, summary in self._summaries(step, depth):
            for name, rests in summary.needs.items():
                given = call.given.get(name, ())
                if isinstance(given, tuple) and given:
                    yield from ((*given, *rest)[:_LONGEST_PATH] for rest in rests)
                elif isinstance(given, set):
                    yield from given

    def _is_of_state(self, step: Statement) -> bool:
        if any(one in step.mentions for one in _FRESH):
            return False
        return any(self._is_state(self.value((path[0],))) for path in step.reads) or any(
            self._is_training(self.value(path)) for path in step.reads
        )

    def _is_constant(self, path: Path) -> bool:
        value = self.value(path[:1])
        return type(value) in (types.FunctionType, types.BuiltinFunctionType, type) and len(path) == 1

    # ---- reads before writes

    def _walk(self, body: list[ast.stmt], written: set[Path], found: dict[Path, SourceLine], depth: int) -> bool:
        """Add names that are read before they are written, and return whether control leaves the block early."""
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
                self._walk(node.body, written, found, depth)  # assumed to run at least once
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

    def _expose(self, node: ast.AST, written: set[Path], found: dict[Path, SourceLine], depth: int) -> None:
        step = self._of.get(node)
        if step is None:
            return
        if step.is_relevant:
            for path in self._needs(step, depth):
                if not any(is_prefix(one, path) for one in written | step.overwrites):
                    found.setdefault(path, SourceLine(self.code.co_filename, step.line))
        written |= step.writes | step.overwrites


def _assigned_to(name: str, node: ast.AST) -> ast.expr | None:
    """Return the expression that an assignment gives to this name."""
    match node:
        case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
            return value
        case ast.AnnAssign(target=ast.Name(id=target), value=value) if target == name:
            return value
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = zip(targets, values, strict=False)
            return next((value for one, value in pairs if path_of(one) == (name,)), None)
    return None


def _is_group(value: object) -> bool:
    """Return whether the value is a parameter group of an optimizer."""
    return type(value) is dict and "params" in value and "lr" in value


def _is_empty_literal(node: ast.expr | None) -> bool:
    match node:
        case ast.Constant(value=None) | ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
    return False


def _has_trained_weights(value: object) -> bool:
    """Return whether a module or parameter is trained, so that its values differ from step to step."""
    if type(value) is nn.Parameter:
        return value.requires_grad
    modules = modules_of(value) if has_type(value, nn.Module) else ()
    weights = [one for module in modules for one in attributes_of(module).get("_parameters", {}).values()]
    return any(type(one) is nn.Parameter and one.requires_grad for one in weights)


def _keeps_values(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name in _KEEPS_VALUES
    return False


def _may_change(node: ast.Call, name: str, before: int) -> bool:
    """Return whether a call may change the values of this variable, apart from calls after the line ``before``."""
    if isinstance(node.func, ast.Attribute) and (root_of(node.func.value) or ("",))[0] == name:
        return node.func.attr not in _KEEPS_VALUES
    given = [*node.args, *(one.value for one in node.keywords)]
    return node.lineno < before and any((path_of(one) or ("",))[0] == name for one in given)


# ---- source


def _source_of(code: types.CodeType) -> Any:
    lines = linecache.getlines(code.co_filename)
    first = code.co_firstlineno
    last = max((end for one in _codes(code) for _, end, _, _ in one.co_positions() if end), default=0)
    if not lines or not first <= last <= len(lines):
        return None
    is_indented = lines[first - 1][:1] in " \t"
    for extra in range(6):  # closing brackets may follow the last instruction
        text = "".join(lines[first - 1 : last + extra])
        try:
            tree = _Plain().visit(ast.parse(f"if 1:\n{text}" if is_indented else text))
        except (SyntaxError, ValueError):
            continue
        ast.increment_lineno(tree, first - 2 if is_indented else first - 1)
        if code.co_name == "<lambda>":
            return _lambda_of(code, tree)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((one for one in ast.walk(tree) if isinstance(one, kinds) and one.name == code.co_name), None)
    return None


def _lambda_of(code: types.CodeType, tree: ast.AST) -> Any:
    """Return a lambda in the form of a function that returns the lambda's expression."""
    places = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            body = node.body
            ends = body.end_lineno or body.lineno, body.end_col_offset or 0
            if places and (body.lineno, body.col_offset) <= min(places) and max(places) < ends:
                own = {one.arg for one in arguments_of(node.args)}
                result: ast.stmt = ast.Expr(body) if _returns_none(body, own) else ast.Return(body)
                ast.copy_location(result, body)
                return ast.copy_location(ast.FunctionDef("_", node.args, [result], []), node)
    return None


def _returns_none(node: ast.expr, parameters: set[str]) -> bool:
    """Return whether an expression only adds to a container, which is not a parameter, such as a tensor."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr="append" | "extend" | "add" | "update")):
            root = root_of(owner)
            return root is not None and root[0] not in parameters
    return False


class _Plain(ast.NodeTransformer):
    """Simplifies dynamic attribute access.

    ``getattr(a, "b")``, ``vars(a)["b"]`` and ``a.__dict__["b"]`` become ``a.b``, and ``globals()["b"]`` becomes ``b``.
    ``os.environ["B"]``, ``os.environ.get("B")`` and ``os.getenv("B")`` become ``os.environ.B``, which
    ``fingerprints.attribute`` reads.
    """

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                return _attribute(node, owner, name, ast.Load())
            case ast.Call(func=ast.Attribute(value=owner, attr=method), args=[ast.Constant(value=str(name)), *rest]):
                if method == "getenv" and path_of(owner) == ("os",):
                    return _attribute(node, _attribute(node, owner, "environ", ast.Load()), name, ast.Load())
                if method == "get" and _is_environment(owner):
                    return _attribute(node, owner, name, ast.Load())
                if method in ("setdefault", "pop") and _is_environment(owner):
                    variable = _attribute(node, owner, name, ast.Load())
                    function = _attribute(node, variable, method, ast.Load())
                    return ast.copy_location(ast.Call(function, rest, node.keywords), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Subscript(value=ast.Call(func=ast.Name(id="globals")), slice=ast.Constant(value=str(name))):
                return ast.copy_location(ast.Name(name, node.ctx), node)
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars"), args=[owner]) | ast.Attribute(value=owner, attr="__dict__"),
                slice=ast.Constant(value=str(name)),
            ):
                return _attribute(node, owner, name, node.ctx)
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))) if _is_environment(owner):
                return _attribute(node, owner, name, node.ctx)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        match node.value:
            case ast.Call(
                func=ast.Name(id="setattr") | ast.Attribute(attr="__setattr__"),
                args=[owner, ast.Constant(value=str(name)), value],
            ):
                target = _attribute(node, owner, name, ast.Store())
                return ast.copy_location(ast.Assign([target], value), node)
        return node


def _is_environment(node: ast.expr) -> bool:
    return path_of(node) in (("os", "environ"), ("environ",))


def _attribute(node: ast.AST, owner: ast.expr, name: str, context: ast.expr_context) -> ast.expr:
    return ast.copy_location(ast.Attribute(owner, name, context), node)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if type(one) is types.CodeType:
            yield from _codes(one)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes outside nested functions, outer nodes first."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)
