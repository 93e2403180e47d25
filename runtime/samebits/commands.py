"""What a user types to start a job, bring it back or change it, spelled so that the line works where it is read.

Only the spelling lives here, and which word a misspelt one was meant to be. The one idea: a fix that cannot be pasted
is none: in a checkout it is the repository's script, by the path that reaches it from the current folder; where only
the wheel is installed, the command.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def spelled(name: str, *args: str) -> str:
    """``bash scripts/recover.sh``, or ``samebits recover`` where there is no such script.

    Args:
        name: ``run``, ``recover`` or ``add``.
        args: its words.
    """
    path = _SCRIPTS / f"{name}.sh"
    if not path.is_file():
        return shlex.join(["samebits", name, *args])
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed under this process
        here = _SCRIPTS
    return shlex.join(["bash", str(path.relative_to(here) if path.is_relative_to(here) else path), *args])


def near_name(typed: str, names: Iterable[str]) -> str | None:
    """That of ``names`` which was probably meant; None where none is like it."""
    return next(iter(difflib.get_close_matches(typed[:64], list(names), n=1, cutoff=0.7)), None)
