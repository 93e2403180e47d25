"""Look for hidden state: values outside the state that later training steps read and that a recovery loses.

After a loss, ``elastic.run`` calls the training function again, so a script recovers exactly only if everything that
its next step depends on is in the state. The values that the function keeps elsewhere are fingerprinted during the
first commits, once after the first epoch, and at a few later commits. Values that changed are reported with their
lines. A look calls none of the script's code, draws no random numbers, copies nothing, and keeps no references
afterwards.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import math
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn

from samebits.core.reports import OF_HIDDEN_STATE
from samebits.service import log
from samebits.training.group.calling_place import is_library
from samebits.training.state.attributes import is_plain
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.script.expressions import Path, is_numeric, value_of
from samebits.training.state.script.fingerprints import (
    MISSING,
    OF_A_FILE,
    OPAQUE_ITERATORS,
    ScriptFile,
    attribute,
    attributes_of,
    fingerprint,
    has_type,
    is_users_object,
    items_of,
    modules_of,
    scope_of,
)
from samebits.training.state.script.first_step import EmptyValues, is_empty
from samebits.training.state.script.statements import Call, calls_of
from samebits.training.state.script.training_slice import Function, Outside, ScriptFunctions, SourceLine

MOST_S = 0.05
"""Limit on the calling thread's CPU seconds for all looks in a job, in addition to a share of the job's time."""
_SHARE = 0.001
"""The share of the time since the first look that later looks may take."""
_MOST_S_AT_LENGTH = 5.0
_FIRST, _LAST, _LAST_AT_LENGTH = 2, 4, 12  # numbers of commits
_LATER = (5, 6, 8, 10, 13, 16, 20, 25, *(2**power * part // 4 for power in range(5, 13) for part in (4, 5, 6, 7)), 8192)
"""Numbers of the later commits with a look, for values that begin to change late; saved commits have one, too."""
_MOST_WATCHED = 200
_MOST_FRAMES = 64
NAMED = 5
"""The most findings that a message names."""
_MOST_MESSAGES = 8
HIDDEN_MESSAGES = "_hidden"
"""The name of the messages in a point; no value of a state can have it."""
_SETTINGS: dict[str, Callable[[], object]] = {
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "torch's number of threads": torch.get_num_threads,
    "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled,
}
"""Settings of the process that decide the bits, and that a process which takes its place has as at its start."""
_ATOMS = (int, float, bool, str, bytes, type(None))
_OF_OPTIMIZERS = ("state", "param_groups", "defaults")
"""Attributes of an optimizer that a recovery restores, or that no step changes."""
_WRAPPED = ("optimizer", "scheduler", "module", "_optimizer", "_forward_module")
_KINDS = {"random": "random.Random", "numpy": "NumPy generator", "generator": "torch.Generator", "module": "module"}
_KINDS |= {"file": "file", "queue": "queue"}


@dataclass(frozen=True)
class HiddenChange:
    """A value that changed outside the state, and the line that changes it.

    Attributes:
        is_of_module: whether it belongs to a module whose parameters are in the state.
        taken_from: what each call of the training function takes it from, such as "weights"; empty if it has changed.
    """

    name: str
    kind: str
    place: SourceLine
    is_of_module: bool = False
    taken_from: str = ""

    def __str__(self) -> str:
        kind = f", a {self.kind}" if self.kind else ""
        return f"{self.name[:60]} ({FilePath(self.place.file).name}:{self.place.line}{kind})"


class HiddenMessages:
    """Warnings about hidden state that are saved in checkpoints, so that later processes can repeat them.

    Attributes:
        named: the messages, oldest first.
    """

    def __init__(self) -> None:
        self.named: list[str] = []
        self._lost: list[str] = []

    def add(self, text: str) -> None:
        """Add a message to later checkpoints, up to a limited number of messages."""
        if text not in self.named and len(self.named) < _MOST_MESSAGES:
            self.named.append(text)

    def load(self, texts: Sequence[str]) -> None:
        """Take over the messages of a checkpoint that this process has loaded."""
        for text in texts:
            if text not in self.named:
                self._lost.append(text)
                self.add(text)

    def take_lost(self) -> list[str]:
        """Return the messages about changes that another process has seen and this process has lost.

        Each message is returned once.
        """
        found, self._lost = self._lost, []
        return found


def sentences_of(findings: Sequence[HiddenChange], *, any_world_size: bool = False) -> list[str]:
    """Return messages that together name all findings, a few in each message."""
    sources = sorted({one.taken_from for one in findings})
    parts = [[one for one in findings if one.taken_from == source] for source in sources]
    return [
        sentence_of(part[first : first + NAMED], any_world_size=any_world_size)
        for part in parts
        for first in range(0, len(part), NAMED)
    ]


def sentence_of(findings: Sequence[HiddenChange], *, any_world_size: bool = False) -> str:
    """Return a message that names the findings, in one printable line.

    Args:
        any_world_size: whether the state otherwise gives the same bits at any world size.
    """
    names = [str(one) for one in findings[:NAMED]]
    more = len(findings) - NAMED
    names += [f"{more} more, listed in rank 0's log,"] if more > 0 else []
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    it = "it" if len(findings) == 1 else "them"
    gives = ", and may give other bits"
    gives = ", so a recovery or another world size may give other bits" if any_world_size else gives
    does = f"changed outside the state, and later steps read {it}: a recovery does not restore {it}"
    sources = {one.taken_from for one in findings}
    if len(sources) == 1 and (source := sources.pop()):
        taken = "is taken" if len(findings) == 1 else "are taken"
        does = f"{taken} from the {source} in each call of the training function: a recovery takes later values"
    text = f"{OF_HIDDEN_STATE}{listed} {does}{gives}. Fix: {_fix_of(findings, it)}"
    return "".join(one if one.isprintable() else "?" for one in text)


def _fix_of(findings: Sequence[HiddenChange], it: str) -> str:
    """Return where to keep the values, which depends on whether they belong to a module of the state."""
    in_module = sum(one.is_of_module for one in findings)
    if all(one.taken_from == "optimizer" for one in findings):
        return f"take {it} before the training function is called, or keep {it} in TorchState(…)"
    if all(one.kind == "file" for one in findings):
        return f"keep the values that are read from {it} in TorchState(…)"
    if not in_module:
        return f"keep {it} in TorchState(…)"
    if in_module == len(findings):
        return f"keep {it} in the module: register_buffer() for a tensor, otherwise get_extra_state()"
    return f"keep {it} in TorchState(…), and those of a module in register_buffer() or get_extra_state()"


@dataclass(frozen=True)
class _WatchedValue:
    """A watched value, located in a frame of a function or in an attribute of another object."""

    owner: types.CodeType | weakref.ref[Any]
    path: Path
    read: SourceLine
    modulus: int | None = None
    is_advanced: bool = False
    taken: tuple[str, SourceLine] | None = None  # what each call takes it from, and the line


@dataclass(frozen=True)
class _TakenValue:
    """A local variable that each call takes from an optimizer or schedule, and that the loop reads."""

    code: types.CodeType
    name: str
    value: ast.expr
    place: SourceLine
    loop: tuple[int, int]  # first and last line


_Place = tuple[int, str]
"""The id of an object and the name of an attribute: two paths may lead to one value."""


class HiddenStateLook:
    """The search for hidden state in one process.

    Attributes:
        findings: all findings that were reported.
        has_ended: whether later commits need no look, because nothing can be watched.

    Args:
        function: the training function as the script defines it.
        state: the state that it commits.
        tell: called with new findings.
        at_length: whether to look at more commits and for longer, for runs that take steps twice.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        state: object,
        tell: Callable[[list[HiddenChange]], None],
        at_length: bool = False,
    ) -> None:
        self._function = function
        self._state = weakref.ref(state)
        self._tell = tell
        self._limit_s = self._most_s = _MOST_S_AT_LENGTH if at_length else MOST_S
        self._last = _LAST_AT_LENGTH if at_length else _LAST
        self._commits = 0
        self._epochs: tuple[int, ...] = ()  # the first epoch, until it has ended
        self._watched: list[_WatchedValue] = []
        self._prints: dict[_WatchedValue, Any] = {}
        self._moved: dict[_WatchedValue, None] = {}
        self._taken: dict[_TakenValue, Any] = {}  # with their fingerprints
        self._outdated: dict[_TakenValue, None] = {}  # those that a new call would set differently
        self._places: dict[_WatchedValue, list[_Place]] = {}
        self._in_modules: set[_WatchedValue] = set()  # values that belong to a module of the state
        self._of_call: set[_WatchedValue] = set()  # values that each call of the function creates
        self._told: set[str | _Place] = set()
        self._script: ScriptFunctions | None = None
        self.findings: list[HiddenChange] = []
        self.set_at_first: list[HiddenChange] = []
        self._before: EmptyValues | None = None  # until the first look
        self._first: list[tuple[_WatchedValue, HiddenChange]] = []  # set by the first step from data, until reported
        self._began = 0.0
        self._started = math.inf  # when the first look began
        self._looked_at = 0  # the last commit with a look
        self._is_new_call = False
        self._settings: dict[str, object] = {}
        self.has_ended = False
        self.spent_s = 0.0

    def called(self) -> None:
        """Record that the training function is about to be called, so that its local variables will be new."""
        self._is_new_call = True
        if self._before is None and not self._commits:
            began = time.thread_time()
            self._before = EmptyValues(self._function, _objects_of(self._state()))
            self.spent_s += time.thread_time() - began

    def committed(self, *, is_again: bool = False) -> bool:
        """Search if this commit is due for a search, and return whether later commits may be.

        Args:
            is_again: whether this is another pass of a step, for which the function was called again and has new
                locals.
        """
        self._commits += not is_again
        if self._commits < _FIRST:
            self._is_new_call = False
            return True
        is_new_call = is_again or (self._is_new_call and self._commits > _FIRST)
        self._is_new_call = False
        if not is_new_call and not self._is_due():
            return True
        return self._bounded(functools.partial(self._begin_again, compares=not is_again) if is_new_call else self._look)

    def saving(self) -> bool:
        """Search before the current commit is saved, and return whether later commits may need a search.

        If all processes die after a change and before the next search, no process is left that has seen the change. A
        recovery then begins at a saved commit, and repeats all later steps.
        """
        if self._commits <= self._last or self._looked_at == self._commits:
            return True
        return self._bounded(self._look)

    def _bounded(self, look: Callable[[], bool]) -> bool:
        """Run the search, unless searches have already taken too long in total."""
        now = time.monotonic()
        self._started = min(self._started, now)
        self._limit_s = self._most_s + _SHARE * (now - self._started)
        if self.spent_s > self._limit_s:
            return True
        self._looked_at = self._commits
        self._began = time.thread_time() - self.spent_s
        try:
            self.has_ended = not look()
        except Exception as error:
            _not_done(error)
            self.has_ended = True
        self.spent_s = time.thread_time() - self._began
        return not self.has_ended

    def _is_due(self) -> bool:
        is_early = self._commits <= self._last or self._commits in _LATER
        return is_early or (bool(self._epochs) and self._epochs != epochs_of(self._state()))

    def _is_late(self) -> bool:
        return time.thread_time() - self._began > self._limit_s

    def _look(self) -> bool:
        frames = {one.f_code: one for one in _frames(self._function)}
        state = self._state()
        if not frames or state is None:
            return False
        handled = _Handled(state)
        if self._commits == _FIRST:
            self._watched = self._find(frames.values(), handled)[:_MOST_WATCHED]
            self._compare_taken(frames)
            self._prints = self._fingerprints(frames, handled)
            self._find_set_at_first(frames, handled)
            self._epochs = epochs_of(state)
            self._settings = {name: read() for name, read in _SETTINGS.items()}
            return True
        self._compare_taken(frames)
        prints = self._fingerprints(frames, handled)
        for one, before in self._prints.items():
            if one in prints and prints[one] != before:
                self._moved[one] = None
        self._prints.update(prints)
        if self._commits >= self._last and self._epochs != epochs_of(state):
            self._epochs = ()
        if self._commits >= _LAST:
            self._report()
        return True

    def _compare_taken(self, frames: dict[types.CodeType, types.FrameType], *, is_new_call: bool = False) -> None:
        """Find local variables that a new call of the training function would set differently.

        Args:
            is_new_call: whether another call has just set them, so that they may differ from before.
        """
        for one, before in self._taken.items():
            frame = frames.get(one.code)
            if frame is None or not one.loop[0] <= frame.f_lineno <= one.loop[1]:
                continue
            look = functools.partial(_of_frame, frame)
            now, again = look(one.name), value_of(one.value, look)
            if not is_numeric(now):
                continue
            self._taken[one] = fingerprint(now, _nothing)
            if (again is not MISSING and fingerprint(again, _nothing) != self._taken[one]) or (
                is_new_call and before not in (None, self._taken[one])
            ):
                self._outdated[one] = None

    def _find_set_at_first(self, frames: dict[types.CodeType, types.FrameType], handled: _Handled) -> None:
        """Find the watched values that were empty before the function's first call, and hold data now."""
        before, self._before = self._before, None
        script = self._script
        if script is None:
            return
        for one in self._prints:
            if self._is_late():
                return
            if one.taken is not None:
                source, place_taken = one.taken
                finding = replace(self._finding(one), place=place_taken, taken_from=source)
                self.set_at_first.append(finding)
                self._first.append((one, finding))
                continue
            local_of = one.owner if isinstance(one.owner, types.CodeType) and _is_local(one) else None
            if local_of is not None:
                is_new = len(one.path) == 1 and script.read[local_of].is_set_once(one.path[0])
            else:
                is_new = before is not None and before.holds(*self._places[one][-1])
            if not is_new or is_empty(self._value(one, frames, handled)):
                continue
            finding, place = self._finding(one), script.line_from_data(_path_in_source(one), is_local_of=local_of)
            self.set_at_first.append(finding)
            if place is not None:
                self._first.append((one, replace(finding, place=place)))

    def _changed_settings(self) -> list[HiddenChange]:
        """Return the settings that have changed since the first search, with the training function's first line."""
        code: types.CodeType = self._function.__code__  # else there is no frame to look at
        place = SourceLine(code.co_filename, code.co_firstlineno)
        return [
            HiddenChange(name, "", place)
            for name, first in self._settings.items()
            if name not in self._told and _SETTINGS[name]() != first
        ]

    def _begin_again(self, *, compares: bool) -> bool:
        """Compare with the current values from now on, because the current call has created some of them.

        Args:
            compares: whether to report values that outlive a call and have changed since the last look, which a
                recovery has just lost on another rank.
        """
        frames = {one.f_code: one for one in _frames(self._function)}
        state = self._state()
        if not frames or state is None:
            return False
        self._compare_taken(frames, is_new_call=compares)
        prints = self._fingerprints(frames, _Handled(state))
        if compares:
            self._moved |= {
                one: None
                for one, now in prints.items()
                if one in self._prints and now != self._prints[one] and not _is_local(one)
            }
        self._prints |= prints
        self._report()
        return True

    def _find(self, frames: Iterable[types.FrameType], handled: _Handled) -> list[_WatchedValue]:
        self._script = script = ScriptFunctions(handled.is_state, handled.is_training, self._is_late)
        script.hooks = _hooks_of(self._state())
        found: list[_WatchedValue] = []
        outside: set[_WatchedValue] = set()
        for frame in frames:
            scope = functools.partial(_of_frame, frame)
            function = script.function(frame.f_code, dict(frame.f_locals), scope)
            if function is None:
                continue
            function.slice(for_value=False, depth=0)
            loops = function.loops_at(frame.f_lineno)
            exposed: dict[Path, SourceLine] = {}
            for loop in loops:
                exposed |= self._exposed_in(function, loop, loops)
            if loops and frame.f_code is getattr(self._function, "__code__", None):
                exposed |= _read_at_start(function, loops[0])
            if not loops:  # each call gets its arguments anew, and the caller's frame shows where they come from
                is_called_again = frame.f_code is not getattr(self._function, "__code__", None)
                own = function.code.co_varnames[0 if is_called_again else function.code.co_argcount :]
                last = math.inf if is_called_again else frame.f_lineno  # files that it reads afterwards are its results
                exposed = {
                    path: place
                    for path, place in function.exposed(function.node.body, 0).items()
                    if path[0] not in own and (place.line <= last or not path[0].startswith(OF_A_FILE))
                }
            for path, place in exposed.items():
                if function.is_memo(path):
                    continue
                named = path[0] if loops and len(path) == 1 else ""
                taken = function.taken_by_call(named, loops[-1].lineno) if named else None
                modulus, is_advanced = function.modulus(path), function.is_advanced(path)
                watched = _WatchedValue(frame.f_code, path, place, modulus, is_advanced, taken)
                reached = list(self._expand(script, watched, frame, handled))
                (self._of_call if _is_local(watched) else outside).update(reached)
                found += reached
            for one in function.called_outside(0):
                reached = list(self._expand(script, _WatchedValue(one.owner, one.path, one.read), frame, handled))
                owner = one.owner()
                is_local = owner is not None and any(owner is value for value in frame.f_locals.values())
                (self._of_call if is_local else outside).update(reached)
                found += reached
        self._of_call -= outside
        script.forget_values()
        return list(dict.fromkeys(found))

    def _exposed_in(self, function: Function, loop: Any, loops: list[Any]) -> dict[Path, SourceLine]:
        """Return the values that an iteration takes over from before, apart from those computed from the state."""
        found: dict[Path, SourceLine] = {}
        for path, place in function.exposed(loop.body, 0, loop).items():
            name, is_local = path[0], path[0] in function.code.co_varnames
            if is_local and (taken := function.taken_from_optimizer(name, loops[0].lineno)) is not None:
                lines = loops[0].lineno, loops[0].end_lineno or 0
                self._taken[_TakenValue(function.code, name, *taken, lines)] = None
            is_restored = is_local and function.is_restored(name, loop.lineno)
            if not is_restored or (len(path) == 1 and function.taken_by_call(name, loops[-1].lineno) is not None):
                found[path] = place
        return found

    def _expand(
        self, script: ScriptFunctions, watched: _WatchedValue, frame: types.FrameType, handled: _Handled, depth: int = 0
    ) -> Iterator[_WatchedValue]:
        value = self._value(watched, {frame.f_code: frame}, handled)
        if value is MISSING or depth > 4:
            return
        parts: list[Outside] | None = script.expand(value, watched.read)
        if parts is None or items_of(value) is not None or is_users_object(value):
            yield watched
        for one in parts or ():
            yield from self._expand(script, _WatchedValue(one.owner, one.path, one.read), frame, handled, depth + 1)

    def _fingerprints(
        self, frames: dict[types.CodeType, types.FrameType], handled: _Handled
    ) -> dict[_WatchedValue, Any]:
        found = {}
        for one in self._watched:
            if self._is_late():
                break
            value = self._value(one, frames, handled)
            if value is MISSING:
                continue
            if type(value) is int and one.modulus:
                value %= one.modulus
            if type(value) in OPAQUE_ITERATORS and one.is_advanced:
                value = self._commits
            found[one] = fingerprint(value, handled.is_handled)
        if sys.version_info < (3, 13):
            for frame in frames.values():
                if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                    frame.f_locals.clear()  # otherwise the frame would keep a copy of its locals, and so the batch
        return found

    def _value(self, one: _WatchedValue, frames: dict[types.CodeType, types.FrameType], handled: _Handled) -> Any:
        """Return the current value, or ``MISSING`` if it does not exist or the state restores it."""
        path = one.path
        if path[0].startswith(OF_A_FILE):
            self._places[one] = [(0, path[0])]
            return ScriptFile(path[0].removeprefix(OF_A_FILE))
        if isinstance(one.owner, types.CodeType):
            frame = frames.get(one.owner)
            value = MISSING if frame is None else _of_frame(frame, path[0])
            path = path[1:]
        else:
            owner = one.owner()
            value = MISSING if owner is None else owner
            if type(owner) is types.FunctionType:
                value, path = scope_of(owner)(path[0]), path[1:]
        places = self._places[one] = [(0, one.path[0])] if len(path) < len(one.path) else []
        for name in path:
            places.append((id(value), name))
            holder = value
            is_restored = handled.is_handled(value) and not handled.is_restored_in_part(value)
            if value is MISSING or handled.is_state(value) or is_restored:
                return MISSING
            inner = attribute(value, name)
            if has_type(value, torch.Tensor, enum.Enum) or (has_type(value, dict) and not _is_in(value, name)):
                break  # an attribute or a method of the object
            value = value if type(inner) in (property, types.FunctionType, types.GetSetDescriptorType) else inner
            if not handled.is_restored_in_part(holder):
                continue
            if is_plain(value) or name in _OF_OPTIMIZERS or _is_in_extra_state(holder, name):
                return MISSING
            if has_type(holder, nn.Module):
                self._in_modules.add(one)
        if has_type(value, torch.utils.data.DataLoader):
            return value  # its dataset may have state, even if its position is restored
        return MISSING if handled.is_state(value) or handled.is_handled(value) else value

    def _report(self) -> None:
        assert self._script is not None
        are_locals_restored = getattr(self._state(), "are_locals_restored", False)
        restored = self._of_call if are_locals_restored else set[_WatchedValue]()
        changed = [one for one in self._moved if one not in restored and self._is_changed_here(one)]
        moved = sorted(changed, key=lambda one: self._line_of(one) is None)
        self._moved.clear()
        findings = self._changed_settings()
        findings += [
            HiddenChange(one.name, "", one.place, taken_from="optimizer")
            for one in self._outdated
            if one.name not in self._told and not are_locals_restored
        ]
        self._outdated.clear()
        self._told |= {one.name for one in findings}
        holders = {place for one in moved for place in self._places[one][:-1]}
        for one in moved:
            finding, place = self._finding(one), self._places[one][-1]
            if place not in holders and not {finding.name, place} & self._told:
                findings.append(finding)
                self._told |= {finding.name, *self._places[one]}
        for one, finding in self._first:
            if one not in restored and not {finding.name, self._places[one][-1]} & self._told:
                findings.append(finding)
                self._told |= {finding.name, *self._places[one]}
        self._first.clear()
        self.findings += findings
        if findings:
            self._tell(findings)

    def _is_changed_here(self, one: _WatchedValue) -> bool:
        """Return whether functions of the slice change the value; a queue may be filled by another thread."""
        assert self._script is not None
        is_queue = type(self._prints[one]) is tuple and self._prints[one][0] == "queue"
        return not is_queue or self._script.is_changed_by(_path_in_source(one))

    def _line_of(self, one: _WatchedValue) -> SourceLine | None:
        """Return the line that changes the value."""
        assert self._script is not None
        owner = one.owner if isinstance(one.owner, types.CodeType) else one.owner()
        code = owner.__code__ if type(owner) is types.FunctionType else owner
        return self._script.changing_line(_path_in_source(one), code if isinstance(code, types.CodeType) else None)

    def _finding(self, one: _WatchedValue) -> HiddenChange:
        kind = _KINDS.get(self._prints[one][0], "") if type(self._prints[one]) is tuple else ""
        is_variable = len(one.path) > 1 and one.path[-2] == "environ"
        name = f"{'.'.join(one.path[:-1])}[{one.path[-1]!r}]" if is_variable else ".".join(one.path)
        if one.path[0].startswith(OF_A_FILE):
            name = FilePath(one.path[0].removeprefix(OF_A_FILE)).name
            return HiddenChange(name, kind, self._line_of(one) or one.read)
        owner = None if isinstance(one.owner, types.CodeType) else one.owner()
        if owner is not None and type(owner) is not types.FunctionType:
            name = f"{(owner if has_type(owner, type) else type(owner)).__name__}.{name}"
        return HiddenChange(name, kind, self._line_of(one) or one.read, one in self._in_modules)


def _is_in_extra_state(holder: object, name: str) -> bool:
    """Return whether a module's own ``get_extra_state`` reads this attribute; its result belongs to a commit."""
    if not has_type(holder, nn.Module):
        return False
    code = getattr(type(holder).get_extra_state, "__code__", None)  # type: ignore[attr-defined]
    return code is not None and code is not nn.Module.get_extra_state.__code__ and name in code.co_names


def _read_at_start(function: Function, loop: Any) -> dict[Path, SourceLine]:
    """Return the values outside the function that it reads before its loop, as each call does."""
    own = {*function.code.co_varnames, *function.code.co_cellvars}
    whole = function.exposed(function.node.body, 0)
    return {path: place for path, place in whole.items() if path[0] not in own and place.line < loop.lineno}


def _nothing(value: object) -> bool:
    return False


_OF_MODULES = ("_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _hooks_of(state: Any) -> dict[str, list[Call]]:
    """Return the calls of the user's hooks that ``backward()`` and an optimizer's ``step()`` run."""
    found: dict[str, list[Call]] = {"backward": [], "step": []}
    for value in _objects_of(state):
        for one in modules_of(value) if has_type(value, nn.Module) else ():
            own = attributes_of(one)
            found["backward"] += [call for name in _OF_MODULES for call in _hook_calls(own.get(name), one)]
            for parameter in own.get("_parameters", {}).values():
                if type(parameter) is nn.Parameter:  # reading an attribute of a subclass may run its code
                    kept = (getattr(parameter, name, None) for name in _OF_PARAMETERS)
                    found["backward"] += [call for hooks in kept for call in _hook_calls(hooks, parameter)]
        if has_type(value, torch.optim.Optimizer):
            own = attributes_of(value)
            found["step"] += [call for name in _OF_STEPS for call in _hook_calls(own.get(name), value)]
    return found


def _hook_calls(hooks: Any, owner: object) -> list[Call]:
    """Return the calls of these hooks, each with the owner as its first argument.

    A hook of a parameter gets the gradient instead, which belongs to training as well.
    """
    found = [call for hook in list((hooks or {}).values()) for call in calls_of(hook)]
    for call in found:
        code = call.function.__code__
        name = next((one for one in code.co_varnames[: code.co_argcount] if one not in call.given), "")
        call.given, call.values = {**call.given, name: owner}, {**call.values, name: owner}
    return found


def _objects_of(state: Any) -> list[object]:
    return [handler.value for handler in attributes_of(state).get("handlers", {}).values()]


def _is_in(value: Any, name: str) -> bool:
    return name in attributes_of(value) or dict.__contains__(value, name)


def _path_in_source(one: _WatchedValue) -> Path:
    """Return the path as functions spell it: that of an object begins with a name of its own in each of them."""
    owner = one.owner if isinstance(one.owner, types.CodeType) else one.owner()
    return one.path if isinstance(owner, (types.CodeType, types.FunctionType)) else ("", *one.path)


def _is_local(one: _WatchedValue) -> bool:
    """Return whether the value is new in each call of the function, like a local variable."""
    owner = one.owner
    return isinstance(owner, types.CodeType) and one.path[0] in (*owner.co_varnames, *owner.co_cellvars)


class _Handled:
    """The objects that the state restores at this moment, by identity."""

    def __init__(self, state: Any) -> None:
        self._state = id(state)
        self._objects: set[int] = set()
        self._modules: list[Any] = []
        for handler in attributes_of(state).get("handlers", {}).values():
            value = handler.value
            if type(value) in _ATOMS:
                continue
            self._objects.add(id(value))
            if has_type(value, nn.Module):
                self._modules.append(value)
                self._objects |= {id(one) for one in value.modules()}
                self._objects |= {id(one) for one in (*value.parameters(), *value.buffers())}

    @functools.cached_property
    def _storages(self) -> set[int | None]:
        """The memory of the modules' tensors, to which other tensors may refer, as ``p.data`` does."""
        tensors = (one for module in self._modules for one in (*module.parameters(), *module.buffers()))
        return {_storage_of(one) for one in tensors if type(one) in (torch.Tensor, nn.Parameter)} - {None}

    def is_state(self, value: object) -> bool:
        return id(value) == self._state

    def is_handled(self, value: object) -> bool:
        """Return whether a recovery restores the value, so that its changes need no report."""
        if type(value) in _ATOMS or value is MISSING:
            return False
        if id(value) in self._objects:
            return True
        if type(value) in (torch.Tensor, nn.Parameter):
            return _storage_of(value) in self._storages
        own = attributes_of(value)
        if has_type(value, torch.utils.data.DataLoader, torch.utils.data.Sampler):
            return any(one in own and self.is_handled(own[one]) for one in ("sampler", "batch_sampler"))
        if has_type(value, nn.Module):
            return any(id(one) in self._objects for one in _first_tensors(own))
        return any(name in own and self.is_handled(own[name]) for name in _WRAPPED) and is_wrapper(value)

    def is_restored_in_part(self, value: object) -> bool:
        """Return whether a recovery restores only the value's tensors and plain attributes."""
        return id(value) in self._objects and has_type(value, nn.Module, torch.optim.Optimizer)

    def is_training(self, value: object) -> bool:
        """Return whether changing the value affects training."""
        if type(value) in _ATOMS or value is MISSING:
            return False
        kinds = torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
        return self.is_handled(value) or has_type(value, *kinds)


def _storage_of(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() or None if value.layout is torch.strided and not value.is_meta else None


def is_wrapper(value: object) -> bool:
    """Return whether a library object only wraps another object, as Accelerate's optimizers do."""
    is_torch = type(value).__module__.startswith("torch.")
    return is_library(getattr(sys.modules.get(type(value).__module__), "__file__", None) or "") and not is_torch


def _first_tensors(own: Any) -> Iterator[Any]:
    """Yield the parameters and buffers of the first submodules that have any."""
    waiting = [own]
    for _ in range(64):
        if not waiting:
            return
        one = waiting.pop()
        yield from one.get("_parameters", {}).values()
        yield from one.get("_buffers", {}).values()
        waiting += [attributes_of(inner) for inner in one.get("_modules", {}).values() if inner is not None]


def epochs_of(state: Any) -> tuple[int, ...]:
    """Return the epochs of the state's samplers, or the state's ``epoch`` attribute if there is no sampler."""
    own = attributes_of(state)
    found = tuple(one.epoch for one in own.get("_samplers", ()) if has_type(one, ElasticSampler))
    return found or ((own["epoch"],) if type(own.get("epoch")) is int else ())


def _frames(function: Callable[..., Any]) -> list[types.FrameType]:
    """Return the user's frames from the one that commits outwards to the training function.

    The list is empty if the training function is not on the stack.
    """
    code = getattr(function, "__code__", None)
    found: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return []
        if not is_library(frame.f_code.co_filename):
            found.append(frame)
        if frame.f_code is code:
            return found
        frame = frame.f_back
    return []


def _of_frame(frame: types.FrameType, name: str) -> Any:
    for names in (frame.f_locals, frame.f_globals):
        if name in names:
            return names[name]
    return MISSING


def _not_done(error: Exception) -> None:
    log.LOGGER.debug("the look for hidden state was not done: %s: %s", type(error).__name__, error)
