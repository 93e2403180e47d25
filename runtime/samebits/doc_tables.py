"""Format the tables of docs/reference as markdown, and read their Chinese texts from ``doc_tables.zh-CN.toml``.

A table without a text for one of its rows raises KeyError, so the tests find a text that is missing.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_TEXTS = Path(__file__).with_name("doc_tables.zh-CN.toml")


@functools.cache
def chinese(table: str) -> dict[str, Any]:
    """Return the Chinese texts of one table, by what each of them translates."""
    found: dict[str, Any] = tomllib.loads(_TEXTS.read_text(encoding="utf-8"))[table]
    return found


def markdown(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table without a trailing newline."""
    first, *rest = (f"| {' | '.join(map(str, row))} |" for row in (head, *rows))
    return "\n".join([first, f"{'|---' * len(head)}|", *rest])
