"""Run a script unchanged, and end this process inside a given step.

``killed.py SCRIPT MARKS [RANK:STEP …] -- [the script's own arguments]``. The process dies between the optimizer's step
of that number and its commit, once; the folder MARKS records it. The script needs no change.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import samebits
from tests.system.kill_points import KillPoints


def main() -> None:
    script, marks, *rest = sys.argv[1:]
    kills = rest[: rest.index("--")]
    points = KillPoints([kill.replace(":", ":stepped:") for kill in kills], Path(marks))
    inner = samebits.elastic.TorchState.commit

    def commit(state: Any) -> None:
        points.here("stepped", state.completed_steps)
        inner(state)

    samebits.elastic.TorchState.commit = commit  # type: ignore[method-assign]
    sys.argv = [script, *rest[rest.index("--") + 1 :]]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
