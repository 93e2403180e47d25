"""What a user types: the repository's scripts, named so that the line works from where he stands.

Only the spelling of commands lives here. The one idea: a fix that cannot be pasted is none.
"""

from __future__ import annotations

import shlex
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def command(name: str, *args: str) -> str:
    """``bash scripts/recover.sh``, with the path that reaches it from the current folder where it is known."""
    path, here = _SCRIPTS / name, Path.cwd()
    if not path.exists():
        shown = Path("scripts", name)  # installed without the repository
    else:
        shown = path.relative_to(here) if path.is_relative_to(here) else path
    return shlex.join(["bash", str(shown), *args])
