"""Warn about training loops that would not reproduce the same bits after a loss.

During the first steps, the code that calls ``commit()`` is inspected for: a batch taken before the previous commit, a
loop that commits the number of the step just taken, changes after the commit, data whose position is not in the state,
gradients that are never cleared, and counters outside the state. These are only warnings, because such a loop is
correct as long as no rank is lost.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from samebits.service import log
from samebits.training.group.calling_place import calling_place, is_library
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.script.after_commit import change_after_commit, loop_around

_LOOKED_AT = 4  # number of commits; a loop's habits show in its first steps
_SKIPS = frozenset({"islice", "manual_seed", "set_epoch"})  # calls that derive a position from the step
_DATA_AT = 3  # the commit at which a position in the state must have moved
_CLEARING = ("zero_grad", "grad")
_LOADS = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


class LastBatch:
    """The last training batch that a ``DataLoader`` of this process has yielded.

    A batch taken under ``no_grad`` belongs to an evaluation.

    Attributes:
        sampler: the loader's sampler, usually a BatchSampler; None for an iterable dataset, and before the first batch.
        place: the line of the script that took the batch.
    """

    def __init__(self) -> None:
        self.is_looked_at = False
        self.sampler: object = None
        self.place = ""

    def look(self, *, at_it: bool) -> None:
        """Start or stop watching."""
        self.is_looked_at, self.sampler, self.place = at_it, None, ""

    def taken(self, sampler: object) -> None:
        """Record a batch."""
        if self.is_looked_at and torch.is_grad_enabled():
            self.sampler, self.place = sampler, calling_place()


last_batch = LastBatch()


class LoopHabits:
    """Checks of the training loop during the first commits of a process.

    Args:
        modules: modules of the state, whose forward passes show which batch a step uses.
        counters: the names of the state's plain values.
        values: returns the state's current values by name.
        has_position: returns whether samples were recorded with a sampler of the state.
        has_left_gradients: returns whether a step used gradient tensors that existed at the last commit; None if
            unknown yet.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        counters: Collection[str],
        values: Callable[[], Mapping[str, Any]],
        *,
        has_position: Callable[[], bool],
        has_left_gradients: Callable[[], bool | None],
    ) -> None:
        self._counters = counters
        self._values = values
        self._has_position = has_position
        self._has_left_gradients = has_left_gradients
        self._knows_gradients = False
        self._commits = 0
        self._counted: Mapping[str, int] = {}  # the state's own integers at the first commit
        self._used: list[weakref.ref[torch.Tensor]] = []
        self._used_before: list[weakref.ref[torch.Tensor]] = []
        self._at_commit: list[weakref.ref[torch.Tensor]] = []
        self._hooks = [one.register_forward_pre_hook(self._forward, with_kwargs=True) for one in modules]

    def committed(self, state: object, frame: FrameType) -> None:
        """Check the loop that called the state's ``commit()``."""
        self._look_at_gradients(frame)
        if self._commits >= _LOOKED_AT:
            return
        self._commits += 1
        if self._commits == 1:
            last_batch.look(at_it=True)
            self._counted = self._whole_numbers(state)
        if self._commits == 2:  # a change in the first iteration has ended the job by now
            self._look_after_commit(state, frame)
        if self._commits == _DATA_AT:
            self._look_at_data(state, frame)
        if self._commits == 1 and not self._has_position():
            self._look_at_loop(frame)
        self._used, self._used_before = [], self._used
        self._at_commit = [weakref.ref(one) for value in frame.f_locals.values() for one in _tensors(value)]
        if self._commits == _LOOKED_AT:
            self._end()

    def _end(self) -> None:
        last_batch.look(at_it=False)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._at_commit, self._used, self._used_before = [], [], [], []

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._commits >= _LOOKED_AT:
            return  # restoring a commit restores the modules' hooks
        for given in _tensors([*args, *kwargs.values()]):
            if _is_among(given, self._at_commit) and not _is_among(given, self._used_before):
                log.warn(
                    f"{calling_place()}: this batch was taken before the last commit, for the step after it: "
                    "after a loss, the repeated step gets a different batch. Fix: take each batch in the step "
                    "that uses it"
                )
                self._commits = _LOOKED_AT
                self._end()
                return
            self._used.append(weakref.ref(given))

    def _look_at_gradients(self, frame: FrameType) -> None:
        """Warn, from the second commit on, if a step's gradients are added to the previous step's."""
        if self._knows_gradients or (has_left := self._has_left_gradients()) is None:
            return
        self._knows_gradients = True
        if has_left and not _may_clear_gradients(frame):
            log.warn(
                f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}: no line of this script clears the gradients, "
                "so each backward() adds to earlier ones, which a commit does not include: results after a loss "
                "differ. Fix: call optimizer.zero_grad() in each step, before backward()"
            )

    def _look_after_commit(self, state: object, frame: FrameType) -> None:
        change = change_after_commit(frame, state, self._values())
        if change is not None:
            line, text = change
            log.warn(
                f"{Path(frame.f_code.co_filename).name}:{line}: {text} comes after the commit of line "
                f"{frame.f_lineno}, in the same loop, where a recovery at that commit would not repeat it: the job "
                "will end with exit code 95 at the step after it. Fix: do it before state.commit()"
            )

    def _whole_numbers(self, state: object) -> Mapping[str, int]:
        values = {name: getattr(state, name) for name in self._counters}
        return {name: value for name, value in values.items() if type(value) is int}

    def _look_at_data(self, state: object, frame: FrameType) -> None:
        """Warn about a loader whose position the state does not restore, unless the script restores it."""
        own, place = _samplers_in(last_batch.sampler), last_batch.place
        held = [one for one in self._values().values() if not isinstance(one, (nn.Module, torch.optim.Optimizer))]
        elastic = next((one for one in own if isinstance(one, ElasticSampler)), None)
        if not own or self._whole_numbers(state) != self._counted or self._keeps_place(frame, held):
            return
        if elastic is None:
            kind = type(own[-1]).__name__
            log.warn(
                f"{place}: the batches of this loop come from a {kind}, whose position is not part of the state: after "
                "a loss, the epoch starts over in a different order. Fix: DataLoader(…, sampler=sampler) with "
                "sampler = samebits.ElasticSampler(data, shuffle=True, seed=1), TorchState(…, sampler=sampler), and "
                "sampler.record_batch(batch, batch_size) before state.commit()"
            )
        elif not any(elastic is one for one in held):
            log.warn(
                f"{place}: the sampler of this loader is not part of the state: after a loss, the epoch starts over. "
                "Fix: TorchState(…, sampler=sampler)"
            )
        elif not elastic.was_told:
            log.warn(
                f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}: the sampler is not told which samples are "
                "done: after a loss, the epoch starts over. Fix: call sampler.record_batch(batch, batch_size) before "
                "this commit, with the loader's own batch_size"
            )

    @staticmethod
    def _keeps_place(frame: FrameType, held: Collection[object]) -> bool:
        """Return whether the script may compute its data position from the step or from the loader's state."""
        names = frame.f_code.co_names
        skips = "completed_steps" in names and not _SKIPS.isdisjoint(names)
        return skips or any(hasattr(one, "dataset") and not isinstance(one, ElasticSampler) for one in held)

    def _look_at_loop(self, frame: FrameType) -> None:
        name = _counted_by_loop(frame)
        if name in self._counters:
            log.warn(
                f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}: state.{name} is the loop's own variable, so "
                "this commit saves the number of the step just done, and that step is repeated after a loss. Fix: "
                f"loop with `while state.{name} < n:` and add 1 to state.{name} before state.commit()"
            )


def _may_clear_gradients(frame: FrameType) -> bool:
    """Return whether the script, or a module of the user that it imports, mentions ``zero_grad`` or ``grad``."""
    named = (getattr(one, "__module__", getattr(one, "__name__", None)) for one in frame.f_globals.values())
    modules = (sys.modules.get(one) for one in {name for name in named if isinstance(name, str)})
    files = {frame.f_code.co_filename, *(file for one in modules if (file := getattr(one, "__file__", None)))}
    return any(_uses_gradients("".join(linecache.getlines(file))) for file in files if not is_library(file))


def _uses_gradients(source: str) -> bool:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # not pure Python, for example a notebook, so nothing is known
        return True
    is_empty = not tree.body
    return is_empty or any(isinstance(one, ast.Attribute) and one.attr in _CLEARING for one in ast.walk(tree))


class OutsideCounters:
    """Numbers outside the state that the training function changes, and that a recovery does not restore.

    Args:
        function: the training function as the script defines it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._first: dict[str, float] | None = None

    def begin(self) -> None:
        """Compare the numbers with their initial values. Called before each call of the training function."""
        code = getattr(self._function, "__code__", None)
        if code is None:
            return
        now = dict(self._numbers(code))
        if self._first is None:
            self._first = now
            return
        for name, value in now.items():
            first = self._first.get(name, value)
            if value != first:
                log.warn(
                    f"{Path(code.co_filename).name}:{code.co_firstlineno}: {name} was {first} when training began in "
                    f"this process and is {value} as it begins again: a variable outside the state is not restored. "
                    f"Fix: move it into the state, TorchState(…, {name}={first})"
                )
                self._first[name] = value

    def _numbers(self, code: CodeType) -> Iterator[tuple[str, float]]:
        cells = zip(code.co_freevars, self._function.__closure__ or (), strict=True)
        values = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
        stored = {one.argval for one in _instructions(code) if one.opname in ("STORE_GLOBAL", "STORE_DEREF")}
        values |= {name: self._function.__globals__[name] for name in stored & self._function.__globals__.keys()}
        for name, value in values.items():
            if name in stored and type(value) in (int, float):
                yield name, value


def _samplers_in(sampler: object) -> list[object]:
    """Return a batch sampler and the samplers it draws from, outermost first."""
    found: list[object] = []
    while sampler is not None and not any(sampler is one for one in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def _counted_by_loop(frame: FrameType) -> str | None:
    """Return ``x`` if the innermost loop around the current instruction is ``for state.x in …``, otherwise None."""
    instructions, begins, _ = loop_around(frame)
    for number, one in enumerate(instructions):
        if one.offset == begins and one.opname == "FOR_ITER":
            load, store = instructions[number + 1 : number + 3]
            return store.argval if load.opname in _LOADS and store.opname == "STORE_ATTR" else None
    return None


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):
        yield from (one for one in value[:8] if isinstance(one, torch.Tensor))
    elif type(value) is dict:
        yield from (one for one in list(value.values())[:8] if isinstance(one, torch.Tensor))


def _is_among(tensor: torch.Tensor, references: list[weakref.ref[torch.Tensor]]) -> bool:
    return any(one() is tensor for one in references)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True
