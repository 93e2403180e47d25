"""The commands of docs/clusters.md, as the tests run them: what a page says and what is shown are one text.

A line keeps its words; only what stands for the user's own is put in its place: the script, how many workers a host
has, where SameBits lies. Never here: a promise.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from tests.system.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "clusters.md"


@dataclass(frozen=True, slots=True)
class Line:
    """A command: the variables that stand before it, and its words."""

    variables: Mapping[str, str]
    words: tuple[str, ...]

    def option(self, name: str) -> str:
        """The value of ``--name=value``."""
        return next(word.partition("=")[2] for word in self.words if word.startswith(f"--{name}="))


def lines_in(chapter: str) -> list[str]:
    """Every command of the page's chapter of that name, in order."""
    found = re.search(rf"^## {re.escape(chapter)}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE.name} has no chapter {chapter}"
    blocks = re.findall(r"^```\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def taken_apart(text: str, instead: Mapping[str, str]) -> Line:
    """What a shell would make of the line; every key of ``instead`` has to stand in it."""
    for old, new in instead.items():
        assert old in text, f"{old!r} does not stand in {text!r}"
        text = text.replace(old, new)
    words = shlex.split(text)
    variables = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return Line(variables, tuple(words))
