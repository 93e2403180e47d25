"""What a failing test with real processes shows before anything is ended: the job's state and its processes.

The job itself shows its logs (``tails``).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.system.processes import found_below

ASKED_WITHIN_S = 30.0


def status_of(folder: Path, environment: Mapping[str, str]) -> str:
    """Return the job's state as ``samebits status`` shows it in its folder, from its scheduler or its journal."""
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
    """Return every process of the folder's job, whoever started it: pid, state (proc(5)), command."""
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
    """Return both, under headings like those of the logs."""
    running = running_below(folder) or ["nothing"]
    return "\n".join(["--- samebits status", status_of(folder, environment), "--- still running", *running])
