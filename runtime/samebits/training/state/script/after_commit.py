"""Find changes that a loop makes after its ``commit()``, because a recovery at that commit does not repeat them.

A recovery at a commit calls the training function again, which enters the loop at its next iteration. Code after the
loop is repeated, because the loop's condition is evaluated first. :class:`RestOfTurn` detects when the iteration that
contains a commit ends, and which lines run until then. :func:`change_after_commit` finds such changes in the source
before they happen.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import torch

from samebits.training.group.calling_place import is_library

_NOTHING = ("CACHE", "EXTENDED_ARG", "NOP", "POP_TOP", "PRECALL")
_CHANGES = ("append", "step", "update", "update_parameters", "record_batch", "record_indices")


def loop_around(frame: FrameType) -> tuple[list[dis.Instruction], int, int]:
    """Return the instructions of the frame's code, and the innermost loop around the current one.

    The loop is given by its first and last positions, which are -1 if there is no loop.
    """
    instructions = [one for one in dis.get_instructions(frame.f_code) if one.opname != "CACHE"]
    jumps = [(one.argval, one.offset) for one in instructions if "JUMP_BACKWARD" in one.opname]
    begins = max((begin for begin, end in jumps if begin <= frame.f_lasti <= end), default=-1)
    return instructions, begins, max((end for begin, end in jumps if begin == begins), default=-1)


class Instruction(NamedTuple):
    """One instruction of a function.

    Attributes:
        code: the function's code.
        offset: the instruction's offset.
        body: the lines of the loop's body.
        loop_ends: the end of the innermost loop around the instruction; -1 if there is none.
        is_followed: whether more of the loop runs after the instruction in the same iteration.
    """

    code: CodeType
    offset: int
    body: range
    loop_ends: int
    is_followed: bool

    @classmethod
    def present(cls, frame: FrameType) -> Instruction:
        """Return the frame's current instruction."""
        instructions, _, ends = loop_around(frame)
        body = _body_around(frame.f_code, frame.f_lineno)
        return cls(frame.f_code, frame.f_lasti, body, ends, _is_followed(instructions, frame.f_lasti, ends))

    def is_passed_by(self, frame: FrameType) -> bool:
        """Return whether a frame has moved past this instruction within the same iteration of the loop.

        A loop's condition belongs to the next iteration: Python puts a copy of the condition at the loop's end.
        """
        return self.offset < frame.f_lasti <= self.loop_ends and frame.f_lineno in self.body


def _body_around(code: CodeType, line: int) -> range:
    """Return the lines of the body of the function's innermost loop around a line."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):  # for example in a notebook
        tree = ast.Module([], [])
    around: list[ast.AST] = [tree]  # the nodes that contain the line, outermost first
    for node in around:
        children = ast.iter_child_nodes(node)
        around += [one for one in children if getattr(one, "lineno", line) <= line <= getattr(one, "end_lineno", line)]
    bodies = [
        range(one.body[0].lineno, (one.body[-1].end_lineno or line) + 1)
        for one in around
        if isinstance(one, ast.For | ast.AsyncFor | ast.While) and one.lineno >= code.co_firstlineno
    ]
    return max((one for one in bodies if line in one), key=lambda one: one.start, default=range(line, sys.maxsize))


def _is_followed(instructions: list[dis.Instruction], offset: int, ends: int) -> bool:
    """Return whether more of the loop follows.

    Lines are compared, because Python copies the condition to the loop's end.
    """
    own = next((one.positions for one in reversed(instructions) if one.offset <= offset), None)
    if own is None or own.end_lineno is None or own.end_col_offset is None:
        return True
    return any(
        offset < one.offset <= ends
        and "JUMP" not in one.opname
        and one.opname not in _NOTHING
        and one.positions is not None
        and (one.positions.lineno or 0, one.positions.col_offset or 0) >= (own.end_lineno, own.end_col_offset)
        for one in instructions
    )


class TurnWatcher(Protocol):
    """Interface that :class:`RestOfTurn` calls to compare values during one iteration of a loop."""

    def has_changed(self) -> bool:
        """Return whether anything seems to differ from the commit."""

    def new_line_comes(self) -> None:
        """Called before a line after the commit runs for the first time."""

    def turn_ends(self, line: str) -> None:
        """Called at the end of the iteration.

        ``line`` is the line that made a change, or "" if there is none or it is unknown.
        """


Lines = set[tuple[CodeType, int]]
"""Lines of code, each as the function's code and the line number."""


class RestOfTurn:
    """Follows the lines that a loop runs between a commit and its next iteration.

    Values are compared before lines that no earlier iteration has run, so a change is found with its line, and a loop
    that always runs the same lines pays nothing. If an exception interrupts an iteration, its end is not reported,
    because a lost peer may have interrupted it between a change and its reversal.

    Python 3.12 and later report only the lines of the followed functions (``sys.monitoring``). Python 3.11 must trace
    the thread.

    Args:
        commits: the current instruction of each frame, from the commit's frame to the loop's.
        known: the lines that earlier iterations have run; this iteration's lines are added when it ends.
        watcher: notified of new lines and of the iteration's end.

    Attributes:
        is_over: True once lines are no longer followed.
    """

    def __init__(self, commits: list[tuple[FrameType, Instruction]], known: Lines, watcher: TurnWatcher) -> None:
        self._frames = [frame for frame, _ in commits]
        self._loop = commits[-1][1]
        self._known, self._watcher = known, watcher
        self._lines: Lines = set()
        self._present = (self._frames[0].f_code, self._frames[0].f_lineno)
        self._found: str | None = None
        self.is_over = self._is_unwinding = False
        self._source = (_Tracing if _MONITORING is None else _Monitoring)(self._frames, self)

    @staticmethod
    def is_possible() -> bool:
        """Return whether lines can be followed.

        On Python 3.11 they cannot if a debugger or coverage tool traces the thread.
        """
        return sys.gettrace() is None if _MONITORING is None else _monitoring_tool() is not None

    def line_comes(self, frame: FrameType) -> None:
        """Handle a line that a frame is about to run."""
        if frame is self._frames[-1] and not self._loop.is_passed_by(frame):
            self._end()
            return
        line = (frame.f_code, frame.f_lineno)
        is_new, was_new = line not in self._known, self._present in self._lines
        if (is_new or was_new) and self._found is None and self._watcher.has_changed():
            self._found = _named(self._present) if was_new else ""
        if is_new:
            self._lines.add(line)
            self._watcher.new_line_comes()
        self._present = line
        self._is_unwinding = False

    def raises(self) -> None:
        """Handle an exception that was raised in a followed frame, or has reached it."""
        self._is_unwinding = True

    def returns(self, frame: FrameType) -> None:
        """Handle a frame's return, or an exception that leaves the frame."""
        if not self._frames or frame is not self._frames[-1]:
            return
        if self._is_unwinding:
            self.stop()
        else:
            self._end()

    def end(self) -> None:
        """End the iteration when the training function returns, unless it has ended already."""
        if not self.is_over:
            self._end()

    def stop(self) -> None:
        """Stop following lines."""
        if not self.is_over:
            self.is_over = True
            self._source.stop()
            self._frames = []  # frames keep the locals of the script's functions alive

    def _end(self) -> None:
        self.stop()
        line = self._found
        if line is None and self._present in self._lines and self._watcher.has_changed():
            line = _named(self._present)
        self._known |= self._lines
        self._watcher.turn_ends(line or "")


class _Tracing:
    """Follows the frames of one iteration with ``sys.settrace``, which requires tracing the calling thread."""

    def __init__(self, frames: list[FrameType], turn: RestOfTurn) -> None:
        self._frames, self._turn = frames, turn
        for frame in frames:
            frame.f_trace = self._traced
        sys.settrace(_trace_no_call)

    def stop(self) -> None:
        sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames = []

    def _traced(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            self._turn.line_comes(frame)
        elif event == "return":
            self._turn.returns(frame)
        else:
            self._turn.raises()
        return None if self._turn.is_over else self._traced


def _trace_no_call(_frame: FrameType, _event: str, _argument: object) -> None:
    """Return None, so that functions that are called after the commit are not traced."""


_MONITORING: Any = getattr(sys, "monitoring", None)
"""Python 3.12 and later. Events are limited to single functions, so other functions run at full speed."""
_NAME = "samebits"


def _monitoring_tool() -> int | None:
    """Return an unassigned ``sys.monitoring`` tool number for SameBits, or None if none is free."""
    for number in (4, 3):
        name = _MONITORING.get_tool(number)
        if name is None:
            _MONITORING.use_tool_id(number, _NAME)
        if name in (None, _NAME):
            return number
    return None


class _Monitoring:
    """Follows the functions whose frames take part in one iteration with ``sys.monitoring``."""

    def __init__(self, frames: list[FrameType], turn: RestOfTurn) -> None:
        self._frames, self._turn = frames, turn
        self._tool = _monitoring_tool()
        self._codes = {frame.f_code for frame in frames}
        events = _MONITORING.events
        _MONITORING.register_callback(self._tool, events.LINE, self._line)
        _MONITORING.register_callback(self._tool, events.PY_RETURN, self._return)
        self._listen(events.LINE | events.PY_RETURN)

    def stop(self) -> None:
        self._listen(0)
        for event in (_MONITORING.events.LINE, _MONITORING.events.PY_RETURN):
            _MONITORING.register_callback(self._tool, event, None)

    def _listen(self, events: int) -> None:
        for code in self._codes:
            _MONITORING.set_local_events(self._tool, code, events)

    def _line(self, _code: CodeType, _line: int) -> None:
        frame = sys._getframe(1)
        if any(frame is one for one in self._frames):  # rather than another call of the same function
            self._turn.line_comes(frame)

    def _return(self, _code: CodeType, _offset: int, _value: object) -> None:
        frame = sys._getframe(1)
        if any(frame is one for one in self._frames):
            self._turn.returns(frame)


def _named(line: tuple[CodeType, int]) -> str:
    return f"{Path(line[0].co_filename).name}:{line[1]}"


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def to_loop(frame: FrameType, present: Callable[[FrameType], Instruction]) -> list[tuple[FrameType, Instruction]]:
    """Return the frames from the one that commits to that of the innermost loop around it, each with its instruction.

    Args:
        frame: the frame that commits.
        present: :meth:`Instruction.present`, or a cached version of it.

    Returns:
        Empty if no loop of the script is around the commit, or nothing runs after the commit.
    """
    found: list[tuple[FrameType, Instruction]] = []
    outer: FrameType | None = frame
    while outer is not None and not is_library(outer.f_code.co_filename):
        one = present(outer)
        found.append((outer, one))
        if one.loop_ends >= 0:
            return found if len(found) > 1 or one.is_followed else []
        outer = outer.f_back
    return []


def runs_more_after_loops(code: CodeType) -> bool:
    """Return whether a function has statements after its last loop."""
    found = [(one.offset, one.positions.lineno or 0) for one in dis.get_instructions(code) if one.positions]
    ends = max((one.offset for one in dis.get_instructions(code) if "JUMP_BACKWARD" in one.opname), default=-1)
    last_line = max((line for offset, line in found if offset <= ends), default=0)
    return ends >= 0 and any(line > last_line for offset, line in found if offset > ends)


def line_after(commit: Instruction) -> str:
    """Return the committing function's current line, such as ``train.py:12``, if it is after the commit in the loop.

    A recovery at the commit begins with the loop's next iteration. Return "" if the current code belongs to that
    iteration or is outside the loop.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not commit.code:
        frame = frame.f_back
    return _place(frame) if frame is not None and commit.is_passed_by(frame) else ""


def change_after_commit(frame: FrameType, state: object, values: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the line and description of the first change to the state between the current commit and the loop's end.

    Return None if there is none.

    Args:
        frame: the frame that commits.
        state, values: the committed object, and its values by name.
    """
    instructions, _, ends = loop_around(frame)
    behind = [one for one in instructions if frame.f_lasti < one.offset <= ends]
    for number, one in enumerate(behind):
        text = _change(frame, behind[number:], state, values)
        if text:
            return (one.positions.lineno if one.positions else None) or frame.f_lineno, text
    return None


def _change(frame: FrameType, code: list[dis.Instruction], state: object, values: Mapping[str, Any]) -> str:
    """Return a text such as ``schedule.step()`` or ``state.best = …`` if the code begins with such a change, or ""."""
    name, *path = _names(code)
    value = _value(frame, name) if name else None
    if value is None:
        return ""
    if value is state:
        if not path or path[0] not in values:
            return ""
        if _is_assigned(code, path[0]):
            return f"{name}.{path[0]} = …"
        name, value, path = f"{name}.{path[0]}", values[path[0]], path[1:]
    is_held = any(value is one for one in values.values()) and not isinstance(value, torch.optim.Optimizer)
    return f"{name}.{path[0]}()" if is_held and path and path[0] in _CHANGES else ""


def _names(code: list[dis.Instruction]) -> Iterator[str]:
    """Yield ``a``, ``b``, ``c`` if the code begins by reading ``a.b.c``; yield only ``""`` if it reads no name."""
    first, *rest = code
    is_name = first.opname.startswith("LOAD_") and first.opname not in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")
    name = first.argval[-1] if isinstance(first.argval, tuple) else first.argval  # Python 3.13 reads two at once
    yield name if is_name and isinstance(name, str) else ""
    for one in rest[:4]:
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            yield str(one.argval)
        elif one.opname != "COPY":  # part of ``a.b += c``
            return


def _is_assigned(code: list[dis.Instruction], name: str) -> bool:
    """Return whether the code begins with an assignment such as ``a.name = …`` or ``a.name += …``."""
    line = code[0].positions.lineno if code[0].positions else None
    if code[1].opname == "STORE_ATTR":
        return True
    on_line = (one for one in code if one.positions and one.positions.lineno == line)
    return code[1].opname == "COPY" and any(one.opname == "STORE_ATTR" and one.argval == name for one in on_line)


def _value(frame: FrameType, name: str) -> Any:
    for names in (frame.f_locals, frame.f_globals):
        if name in names:
            return names[name]
    return None
