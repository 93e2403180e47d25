"""``tests/helps.py COMMAND…``: print the help of each command (a module and its words) as one JSON object.

One process asks all of them, so that it imports only once what they share.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path


def help_of(command: str) -> str:
    """Return what ``python -m COMMAND --help`` prints.

    Raises:
        SystemExit: the command failed.
    """
    printed = io.StringIO()
    sys.argv = [*command.split(), "--help"]
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise
    return printed.getvalue()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    print(json.dumps({command: help_of(command) for command in sys.argv[1:]}))
