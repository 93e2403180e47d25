"""Text made printable: a character that has no glyph, or no UTF-8, becomes its JSON escape.

Every text that may be another program's (an exception, a path, a line of a log, a file's content) passes through here
where it becomes a message, a record, an event, a log line, a JSON document or a line of output. A lone surrogate cannot
be encoded, and an escape sequence, a carriage return or a bidirectional override makes a terminal show something else
than what was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TextIO

__all__ = ["PrintableStream", "escaped", "printable", "printable_lines", "raw_of"]


def printable(text: str, most: int | None = None) -> str:
    """Return the text as one line: blanks become spaces, the rest that is not printable JSON escapes (``\\u001b``).

    Args:
        text: any text, lone surrogates included.
        most: characters of the result; a longer one is cut and ends in ``…``.
    """
    text = _without_blanks(text)
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def printable_lines(text: str) -> str:
    """Return the text as :func:`printable` does, with its line breaks and tabs as they are."""
    return _without_blanks(text, keep="\n\t")


def escaped(text: str, keep: str = "") -> str:
    """Return the text with a JSON escape for each character that is not printable, but for those in ``keep``."""
    return text if text.isprintable() else _NOT_ASCII.sub(lambda found: _escaped(found[0], keep), text)


_NOT_ASCII = re.compile(r"[^ -~]+")  # most of a long text is passed over
_BLANK = re.compile(r"\s")


class PrintableStream:
    """A text stream that writes printable lines; all else is that of the stream in ``raw``."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write the text; return its length, as callers of a stream expect."""
        self.raw.write(printable_lines(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write these texts one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_of(stream: TextIO) -> TextIO:
    """Return the stream below, for what draws on a terminal and makes its own texts printable."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


def _without_blanks(text: str, keep: str = "") -> str:
    if text.isprintable():
        return text
    return escaped(_BLANK.sub(lambda found: found[0] if found[0] in keep else " ", text), keep)


def _escaped(part: str, keep: str) -> str:
    return "".join(one if one.isprintable() or one in keep else json.dumps(one)[1:-1] for one in part)
