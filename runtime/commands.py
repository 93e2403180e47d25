"""What a user types to start a job, bring it back or change it, spelled so that the line works where it is read.

Only the spelling lives here. The one idea: a fix that cannot be pasted is none: in a checkout it is the repository's
script, by the path that reaches it from the current folder; where only the wheel is installed, the command.
"""

from __future__ import annotations

import shlex
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


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
