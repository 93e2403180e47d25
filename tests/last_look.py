"""What a test with real processes shows when it fails, before anything is ended: the job's state and who still runs.

The logs' last lines are the job's own to show (``tails``); here is what no log says.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.system.processes import found_below

ASKED_WITHIN_S = 30.0


def status_of(folder: Path, environment: Mapping[str, str]) -> str:
    """The job as ``samebits status`` shows it in its folder: by its scheduler's word, or else by its journal."""
    command = [sys.executable, "-P", "-m", "samebits", "status"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ASKED_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"samebits status says nothing within {ASKED_WITHIN_S:g} s"
    return done.stdout.rstrip("\n")


def running_below(folder: Path) -> list[str]:
    """Every process of the folder's job, whoever started it: pid, state (proc(5)), command."""
    found = []
    for identity in found_below(folder):
        try:
            stat = Path(f"/proc/{identity.pid}/stat").read_bytes()
            command = Path(f"/proc/{identity.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile
        found.append(f"{identity.pid} {stat[stat.rindex(b')') + 2 :].split()[0].decode()} {command.rstrip()}")
    return found


def last_look(folder: Path, environment: Mapping[str, str]) -> str:
    """Both, under headings like those of the logs' ends."""
    running = running_below(folder) or ["nothing"]
    return "\n".join(["--- samebits status", status_of(folder, environment), "--- still running", *running])
