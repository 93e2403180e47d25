"""Changes that a loop makes after its ``commit()``: a recovery at that commit does not repeat them.

A recovery at a commit calls the training function again, which enters the loop at its next turn. Code after the loop
is repeated, because the loop's condition is read first. :func:`change_after_commit` finds such changes in the code,
:class:`RestOfTurn` while they happen.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from samebits.training.group.calling_place import is_library

__all__ = [
    "Instruction",
    "RestOfTurn",
    "change_after_commit",
    "line_after",
    "loop_around",
    "runs_more_after_loops",
    "to_loop",
]

_NOTHING = ("CACHE", "EXTENDED_ARG", "NOP", "POP_TOP", "PRECALL")
_CHANGES = ("append", "step", "update", "update_parameters", "record_batch", "record_indices")


def loop_around(frame: FrameType) -> tuple[list[dis.Instruction], int, int]:
    """Return the instructions of the frame's code; where the innermost loop around its present one begins and ends.

    Both places are -1 where there is no loop.
    """
    instructions = [one for one in dis.get_instructions(frame.f_code) if one.opname != "CACHE"]
    jumps = [(one.argval, one.offset) for one in instructions if "JUMP_BACKWARD" in one.opname]
    begins = max((begin for begin, end in jumps if begin <= frame.f_lasti <= end), default=-1)
    return instructions, begins, max((end for begin, end in jumps if begin == begins), default=-1)


class Instruction(NamedTuple):
    """One instruction of a function.

    Attributes:
        code: of the function.
        offset: of the instruction.
        loop_ends: where the innermost loop around it ends; -1 if there is none.
        is_followed: whether the loop has more to run after it in the same turn.
    """

    code: CodeType
    offset: int
    loop_ends: int
    is_followed: bool

    @classmethod
    def present(cls, frame: FrameType) -> Instruction:
        """Return the one that this frame is at."""
        instructions, _, ends = loop_around(frame)
        return cls(frame.f_code, frame.f_lasti, ends, _is_followed(instructions, frame.f_lasti, ends))

    def is_passed_by(self, frame: FrameType) -> bool:
        """Return whether the frame, of this function, is after the instruction in the same turn of its loop."""
        return self.offset < frame.f_lasti <= self.loop_ends


def _is_followed(instructions: list[dis.Instruction], offset: int, ends: int) -> bool:
    """Python puts a copy of a loop's condition at its end, so lines are compared as well."""
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


class RestOfTurn:
    """Follows what a loop runs between a commit and its next turn, and finds the line that changes something.

    It sets a trace function on the frames from the commit to the loop, on the calling thread, until the turn ends.

    Args:
        commits: the instruction that each frame is at, from the commit's to the loop's.
        look: returns what is compared; called before each line.
        ended: called with the first line after which that differed (empty if it never did), when the turn ends by
            itself: an exception, such as for a lost peer, may come between a change and its reversal.
    """

    def __init__(
        self,
        commits: list[tuple[FrameType, Instruction]],
        look: Callable[[], object],
        ended: Callable[[str], object],
    ) -> None:
        self._frames = [frame for frame, _ in commits]
        self._loop = commits[-1][1]
        self._look, self._ended = look, ended
        self._seen = look()
        self._line = _place(self._frames[0])  # that is run at present
        self._found = ""
        for frame in self._frames:
            frame.f_trace = self._traced
        self._is_over = self._is_unwinding = False
        sys.settrace(_trace_no_call)

    @staticmethod
    def is_possible() -> bool:
        """Return whether no debugger or coverage tool traces this thread."""
        return sys.gettrace() is None

    def _traced(self, frame: FrameType, event: str, _argument: object) -> Any:
        if not self._found and self._look() != self._seen:
            self._found = self._line
        self._line = _place(frame)
        if frame is self._frames[-1]:
            is_cut_off = event == "return" and self._is_unwinding
            self._is_unwinding = event == "exception"
            if event == "return" or not self._loop.is_passed_by(frame):
                self.stop()
                if not is_cut_off:
                    self._ended(self._found)
                return None
        return self._traced

    def stop(self) -> None:
        """Follow no further line."""
        if not self._is_over:
            self._is_over = True
            sys.settrace(None)
            for one in self._frames:
                one.f_trace = None


def _trace_no_call(_frame: FrameType, _event: str, _argument: object) -> None:
    """Functions that are called after the commit are not followed."""


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def to_loop(frame: FrameType, present: Callable[[FrameType], Instruction]) -> list[tuple[FrameType, Instruction]]:
    """Return the frames from the commit's to that of the innermost loop around it, each with its instruction.

    Args:
        frame: that commits.
        present: :meth:`Instruction.present`, or what remembers its results.

    Returns:
        Empty if no loop of the script is around the commit, or nothing is run after it.
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
    """Return the line that the committing function is at, as ``train.py:12``, if that is after the commit in its loop.

    A recovery at the commit begins with the loop's next turn. Empty if what happens now is in that turn, or elsewhere.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not commit.code:
        frame = frame.f_back
    return _place(frame) if frame is not None and commit.is_passed_by(frame) else ""


def change_after_commit(frame: FrameType, state: object, values: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the first change of the state after the commit that this frame is in: its line, and what it is.

    Args:
        state, values: the object that is committed, and what it holds by name.
    """
    instructions, _, ends = loop_around(frame)
    behind = [one for one in instructions if frame.f_lasti < one.offset <= ends]
    for number, one in enumerate(behind):
        text = _change(frame, behind[number:], state, values)
        if text:
            return (one.positions.lineno if one.positions else None) or frame.f_lineno, text
    return None


def _change(frame: FrameType, code: list[dis.Instruction], state: object, values: Mapping[str, Any]) -> str:
    """``schedule.step()`` or ``state.best = …`` where the code begins with that; else empty."""
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
    """``a``, ``b``, ``c`` where the code begins by reading ``a.b.c``; only ``""`` where it reads no name."""
    first, *rest = code
    is_name = first.opname.startswith("LOAD_") and first.opname not in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")
    name = first.argval[-1] if isinstance(first.argval, tuple) else first.argval  # Python 3.13 reads two at once
    yield name if is_name and isinstance(name, str) else ""
    for one in rest[:4]:
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            yield str(one.argval)
        elif one.opname != "COPY":  # of ``a.b += c``
            return


def _is_assigned(code: list[dis.Instruction], name: str) -> bool:
    """Return whether ``a.name = …`` or ``a.name += …`` begins the code, ``a`` being its first instruction's."""
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
