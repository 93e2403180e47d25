"""Spell commands for users to paste, and find the nearest match of a misspelled word.

A command is spelled ``samebits``, as users type it. Only the process that a script of the repository, such as
``scripts/run.sh``, has become names that script instead, by its path from the current folder.
"""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
_MAIN = Path(__file__).resolve().with_name("__main__.py")
_PROCESSES_OF_A_JOB = ("scheduler", "plain", "dashboard")
"""Subcommands that ``run`` starts with ``python -m samebits``, whichever way it was started itself."""

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_RUN_SH_TAKES = {"--fresh", "--detach", "--json", "--dry-run", "--plain"}


def spelled(name: str, *args: str) -> str:
    """Return ``samebits recover``, or ``bash scripts/recover.sh`` in the process that such a script has become.

    Args:
        name: ``run``, ``recover`` or ``add``.
        args: its arguments.
    """
    path = _SCRIPTS / f"{name}.sh"
    if not _is_a_script(sys.argv) or not path.is_file():
        return shlex.join([_command(), name, *args])
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the current folder was removed
        here = _SCRIPTS
    return shlex.join(["bash", str(path.relative_to(here) if path.is_relative_to(here) else path), *args])


def spelled_run(words: Sequence[str], *, fresh: bool = False) -> str:
    """Return the command that starts the job again: ``SCHED_PORT=1 samebits run -n 2 train.py --lr 1``.

    Args:
        words: the words typed, including leading assignments, except ``--fresh``.
        fresh: whether to add ``--fresh``.
    """
    rest = list(words)
    assigned = []
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        assigned.append(f"{name}={shlex.quote(value)}")
    options = []
    while rest and rest[0] in _RUN_SH_TAKES:
        options.append(rest.pop(0))
    if rest[:1] == ["--"] and len(rest) > 1 and not rest[1].startswith("-"):
        del rest[0]
    options = [*(["--fresh"] if fresh else []), *(one for one in options if one != "--fresh")]
    takes_more = bool(rest) and rest[0].startswith("-") and rest[0] != "--"  # options that run.sh does not support
    command = shlex.join([_command(), "run", *options, *rest]) if takes_more else spelled("run", *options, *rest)
    if command.startswith("bash "):
        assigned = [one for one in assigned if one != "MAX_RESTARTS=0"]  # run.sh exports it
    return " ".join([*assigned, command])


def _is_a_script(argv: Sequence[str]) -> bool:
    """Return whether a script may have become this process: a script runs ``python -m samebits``."""
    return Path(argv[0]).resolve() == _MAIN and "".join(argv[1:2]) not in _PROCESSES_OF_A_JOB


def _is_the_command(typed: str) -> bool:
    return Path(typed).name == "samebits"


def _command() -> str:
    """Return the name of this installation's ``samebits`` if the shell finds it, else its path."""
    beside = Path(sys.executable).with_name("samebits")
    typed = sys.argv[0] if _is_the_command(sys.argv[0]) else str(beside) if beside.is_file() else "samebits"
    found = shutil.which("samebits")
    return "samebits" if found is not None and Path(found).resolve() == Path(typed).resolve() else typed


def near_name(typed: str, names: Iterable[str]) -> str | None:
    """Return the most similar of ``names``, or None if none is similar."""
    return next(iter(difflib.get_close_matches(typed[:64], list(names), n=1, cutoff=0.7)), None)
