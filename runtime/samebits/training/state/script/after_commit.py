"""What a loop does to the state behind its ``commit()``: a recovery at that commit does not do it again.

Here lives a look at the code of who commits, from the commit to the end of the innermost loop around it. Never here:
what stands behind that loop, which a recovery does again, because the loop's condition is read first; nor what a
function does that is called there. The one idea: where a line stands tells whether it is done again, so that it can be
said before anybody is lost.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

__all__ = ["Instruction", "change_behind_commit", "line_behind", "loop_around"]

_CHANGES = ("append", "step", "update", "update_parameters", "record_batch", "record_indices")


def loop_around(frame: FrameType) -> tuple[list[dis.Instruction], int, int]:
    """The instructions of the frame's code; where the innermost loop around its present one begins and ends.

    Both places are -1 where there is no loop.
    """
    instructions = [one for one in dis.get_instructions(frame.f_code) if one.opname != "CACHE"]
    jumps = [(one.argval, one.offset) for one in instructions if "JUMP_BACKWARD" in one.opname]
    begins = max((begin for begin, end in jumps if begin <= frame.f_lasti <= end), default=-1)
    return instructions, begins, max((end for begin, end in jumps if begin == begins), default=-1)


class Instruction(NamedTuple):
    """One instruction of a function, and where the innermost loop around it ends; -1 if there is none."""

    code: CodeType
    offset: int
    loop_ends: int

    @classmethod
    def present(cls, frame: FrameType) -> Instruction:
        """Return the one that this frame is at."""
        return cls(frame.f_code, frame.f_lasti, loop_around(frame)[2])


def line_behind(commit: Instruction) -> str:
    """Return the line that the committing function is at, as ``train.py:12``, if that is behind the commit in its loop.

    A recovery at the commit begins with the loop's next turn. Empty if what happens now is in that turn, or elsewhere.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not commit.code:
        frame = frame.f_back
    if frame is None or not commit.offset < frame.f_lasti <= commit.loop_ends:
        return ""
    return f"{Path(commit.code.co_filename).name}:{frame.f_lineno}"


def change_behind_commit(frame: FrameType, state: object, values: Mapping[str, Any]) -> tuple[int, str] | None:
    """The first change of the state behind the commit that this frame is in: its line, and what it is.

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
    """Whether ``a.name = …`` or ``a.name += …`` begins the code, ``a`` being its first instruction's."""
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
