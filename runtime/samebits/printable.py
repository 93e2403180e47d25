"""Make text printable: a character without a glyph, or not valid in UTF-8, becomes its JSON escape.

All text that may come from another program (an exception, a path, a line of a log, a file's content) passes through
here before it becomes a message, a record, an event, a log line, a JSON document or output. A lone surrogate cannot be
encoded, and an escape sequence, a carriage return or a bidirectional override makes a terminal show a different text
than was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TextIO

IN_LOGS = " (`samebits logs` shows the rest)"
"""Follows the ``…`` of a message that a process's log holds in full."""


def counted(number: int, thing: str) -> str:
    """Return ``1 point`` or ``2 points``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def listed(names: Iterable[object], most: int | None = None) -> str:
    """Return ``0``, ``0 and 1`` or ``0, 1 and 3``; beyond ``most`` names, ``0, 1 and 5 more``."""
    texts = [*map(str, names)]
    if most is not None and len(texts) > most:
        texts[most:] = [f"{len(texts) - most} more"]
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def shortened(text: str, most: int, rest: str = "") -> str:
    """Return the text shortened to at most ``most`` characters, cut at the end of a word.

    Args:
        text: one line.
        most: maximum length of the result; a word is split only if it is longer than that.
        rest: follows the ``…`` of a cut text and says where the rest is, such as ``IN_LOGS``.
    """
    if len(text) <= most:
        return text
    room = most - 1 - len(rest)
    whole = text.replace(f"…{rest}", "…")[: room + 1].rpartition(" ")[0].rstrip(" ,;:(")
    return f"{whole if 2 * len(whole) > room else text[:room]}…{rest}"


def printable(text: str, most: int | None = None, rest: str = "") -> str:
    """Return the text on one line: blanks become spaces, other unprintable characters JSON escapes (``\\u001b``).

    Args:
        text: any text, including lone surrogates.
        most: maximum length of the result.
        rest: as for :func:`shortened`.
    """
    text = _without_blanks(text)
    return text if most is None else shortened(text, most, rest)


def printable_lines(text: str) -> str:
    """Return the text as :func:`printable` does, but keep line breaks and tabs."""
    return _without_blanks(text, keep="\n\t")


def escaped(text: str, keep: str = "") -> str:
    """Return the text with JSON escapes for unprintable characters, except for those in ``keep``."""
    return text if text.isprintable() else _NOT_ASCII.sub(lambda found: _escaped(found[0], keep), text)


_NOT_ASCII = re.compile(r"[^ -~]+")  # most of a long text needs no replacement
_BLANK = re.compile(r"\s")


class PrintableStream:
    """A text stream that writes printable lines; everything else is delegated to ``raw``."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write the text; return its length, as callers of a stream expect."""
        self.raw.write(printable_lines(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write these texts in order."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_of(stream: TextIO) -> TextIO:
    """Return the underlying stream, for code that draws on a terminal and escapes its own texts."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


def _without_blanks(text: str, keep: str = "") -> str:
    if text.isprintable():
        return text
    return escaped(_BLANK.sub(lambda found: found[0] if found[0] in keep else " ", text), keep)


def _escaped(part: str, keep: str) -> str:
    return "".join(one if one.isprintable() or one in keep else json.dumps(one)[1:-1] for one in part)
