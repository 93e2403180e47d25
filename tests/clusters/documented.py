"""Read the commands of docs/how-to/slurm.md and kubernetes.md, so that the tests run what the pages show.

Only placeholders are replaced: the script, the number of workers per host, the checkout's path.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from tests.system.processes import REPOSITORY

GUIDES = REPOSITORY / "docs" / "how-to"


@dataclass(frozen=True, slots=True)
class Line:
    """A command: the variables before it, and its words."""

    variables: Mapping[str, str]
    words: tuple[str, ...]

    def option(self, name: str) -> str:
        """Return the value of ``--name=value``."""
        return next(word.partition("=")[2] for word in self.words if word.startswith(f"--{name}="))


def lines_in(guide: str) -> list[str]:
    """Return every command of this how-to guide, in order."""
    page = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks, f"{guide}.md shows no command"
    return [line for block in blocks for line in block.splitlines()]


def taken_apart(text: str, instead: Mapping[str, str]) -> Line:
    """Split the line as a shell does; every key of ``instead`` must occur in it."""
    for old, new in instead.items():
        assert old in text, f"{old!r} does not occur in {text!r}"
        text = text.replace(old, new)
    words = shlex.split(text)
    variables = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return Line(variables, tuple(words))
