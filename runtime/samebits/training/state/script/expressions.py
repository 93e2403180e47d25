"""Evaluate simple expressions of a script, and find the files that its calls read and write.

No code of the script is executed: only stored values are read, such as the items of an optimizer's parameter groups or
a file name in a variable. The value of every other expression is ``MISSING``.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from samebits.training.state.script.fingerprints import MISSING, OF_A_FILE, attribute, has_type

Look = Callable[[str], Any]
"""Returns the value of a name, or ``MISSING``."""
Path = tuple[str, ...]
"""A name with attributes: ``("cfg", "seen")`` for ``cfg.seen``. ``OF_A_FILE`` marks the name of a file."""

_MOST_ITEMS = 64
_NONE: frozenset[Path] = frozenset()
_NO_FILES = (_NONE, _NONE)
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"float": float, "list": list, "tuple": tuple, "max": max, "min": min}
_FUNCTIONS |= {"sum": sum, "abs": abs}
_READERS = frozenset({"load", "load_file", "loadtxt", "genfromtxt", "fromfile", "read_csv", "read_json", "memmap"})
_READERS_OF_SELF = frozenset({"read_text", "read_bytes"})
_WRITERS = frozenset({"save", "save_file", "savez", "savez_compressed", "savetxt", "to_csv", "to_json"})
_WRITERS_OF_SELF = frozenset({"write_text", "write_bytes"})
_MOVERS = frozenset({"replace", "rename", "copy", "copyfile", "copy2", "move"})
_OF_FILES = _READERS | _READERS_OF_SELF | _WRITERS | _WRITERS_OF_SELF | _MOVERS | {"open"}


def value_of(node: ast.AST | None, look: Look) -> Any:
    """Return the value of an expression, or ``MISSING`` if only the script's code could compute it."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return look(name)
        case ast.Attribute(value=owner, attr=name):
            kept = value_of(owner, look)
            return MISSING if kept is MISSING else attribute(kept, name)
        case ast.Subscript(value=owner, slice=place):
            return _item(value_of(owner, look), value_of(place, look))
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return _complete([value_of(one, look) for one in items])
        case ast.ListComp(elt=result, generators=[one]) | ast.GeneratorExp(elt=result, generators=[one]):
            return _comprehension(result, one, look)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = value_of(operand, look)
            return -number if _is_number(number) else MISSING
        case ast.BinOp(left=left, op=op, right=right):
            return _operation(op, value_of(left, look), value_of(right, look))
        case ast.JoinedStr(values=parts):
            texts = _complete([_text(one, look) for one in parts])
            return MISSING if texts is MISSING else "".join(texts)
        case ast.Call(func=function, args=args, keywords=[]):
            return _call(function, args, look)
    return MISSING


@dataclass(frozen=True)
class FileUse:
    """The files that one call reads, replaces and appends to, as paths of names."""

    reads: frozenset[Path] = frozenset()
    writes: frozenset[Path] = frozenset()
    appends: frozenset[Path] = frozenset()


def file_use(node: ast.Call, name: str, look: Look) -> FileUse:
    """Return the files that a library's function uses.

    Args:
        node: the call.
        name: the name of the function or method.
    """
    owner = value_of(node.func.value, look) if isinstance(node.func, ast.Attribute) and name in _OF_FILES else MISSING
    if name not in _OF_FILES or type(owner) is str:
        return FileUse()  # str.replace() and other methods of texts
    own, (first, second, *_) = _files(owner), [*(_files(value_of(one, look)) for one in node.args), *_NO_FILES]
    if name == "open":
        mode = _mode_of(node.args[0 if own else 1 :], node.keywords, look)
        file = own or first
        return FileUse(*(file if set(mode) & set(letters) else _NONE for letters in ("r", "wx", "a+")))
    if name in _MOVERS:
        return FileUse(own or first, first if own else second)
    if name in _WRITERS:
        return FileUse(writes=first or second)
    if name in _WRITERS_OF_SELF:
        return FileUse(writes=own)
    return FileUse(reads=first if name in _READERS else own)


def _mode_of(args: list[ast.expr], keywords: list[ast.keyword], look: Look) -> str:
    given = [*args[:1], *(one.value for one in keywords if one.arg == "mode")]
    mode = value_of(given[0], look) if given else "r"
    return mode if type(mode) is str else ""


def _files(value: object) -> frozenset[Path]:
    name = os.fspath(value) if type(value) is str or has_type(value, PurePath) else ""  # type: ignore[call-overload]
    return frozenset({(f"{OF_A_FILE}{name}",)}) if name else _NONE


def _complete(values: list[Any]) -> Any:
    return MISSING if any(one is MISSING for one in values) else values


def _item(kept: Any, place: Any) -> Any:
    if type(kept) in (list, tuple) and type(place) is int and -len(kept) <= place < len(kept):
        return kept[place]
    if has_type(kept, dict) and type(place) in (str, int):
        return dict.get(kept, place, MISSING)
    return MISSING


def _comprehension(result: ast.expr, one: ast.comprehension, look: Look) -> Any:
    items = value_of(one.iter, look)
    if type(items) not in (list, tuple) or len(items) > _MOST_ITEMS or one.ifs or not isinstance(one.target, ast.Name):
        return MISSING
    own = one.target.id

    def within(item: Any) -> Look:
        return lambda name: item if name == own else look(name)

    return _complete([value_of(result, within(item)) for item in items])


def _operation(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Div) and has_type(left, PurePath) and (type(right) is str or has_type(right, PurePath)):
        return PurePath(left, right)
    are_texts = type(left) is str and type(right) is str and isinstance(op, ast.Add)
    if type(op) not in _OPERATORS or not (are_texts or (_is_number(left) and _is_number(right))):
        return MISSING
    try:
        return _OPERATORS[type(op)](left, right)
    except ArithmeticError:
        return MISSING


def _is_number(value: object) -> bool:
    return type(value) in (int, float, bool)


def _text(node: ast.expr, look: Look) -> Any:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
            value = value_of(inner, look)
            is_plain = type(value) in (str, int) or has_type(value, PurePath)
            return str(value) if is_plain else MISSING
    return MISSING


def _call(function: ast.expr, args: list[ast.expr], look: Look) -> Any:
    given = [value_of(one, look) for one in args]
    match function, given:
        case ast.Name(id=name), [value] if name in _FUNCTIONS:
            is_plain = _is_number(value) if name in ("float", "abs") else _is_numbers(value)
            return _FUNCTIONS[name](value) if is_plain else MISSING
        case ast.Name(id="str"), [value]:
            return str(value) if _is_number(value) or type(value) is str or has_type(value, PurePath) else MISSING
        case ast.Attribute(value=owner, attr="get_last_lr"), []:
            kept = value_of(owner, look)
            return MISSING if kept is MISSING else attribute(kept, "_last_lr")
        case ast.Attribute(value=owner, attr="get"), [place, *_] if has_type(kept := value_of(owner, look), dict):
            return _item(kept, place)
        case ast.Attribute(value=ast.Attribute(attr="path"), attr="join") | ast.Attribute(attr="Path") | ast.Name(
            id="Path"
        ), [_, *_]:
            is_plain = all(type(one) is str or has_type(one, PurePath) for one in given)
            return PurePath(*given) if is_plain else MISSING
    return MISSING


def is_numeric(value: object) -> bool:
    """Return whether the value is a number, or a list or tuple of numbers."""
    return _is_number(value) or _is_numbers(value)


def _is_numbers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(_is_number, value))
