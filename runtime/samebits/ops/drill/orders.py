"""Telling a process of the drill to do something to itself: an order in a file, a signal, and what it says it did.

The telling lives here; what a process then does is ``inside``'s. The one idea: a process is told nothing before the
kernel says that it handles the signal, which would otherwise end it.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from samebits.ops.drill import inside
from samebits.ops.drill.impossible import ImpossibleError
from samebits.ops.local_processes import send_signal
from samebits.store import durable
from samebits.store.process_identity import ProcessIdentity

ANSWER_S = 30.0
_LOOK_S = 0.02


class Orders:
    """To the processes of one job, by a folder that is first on their PYTHONPATH; it is made here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        durable.replace_note(folder / "sitecustomize.py", Path(inside.__file__).read_bytes())

    def give(self, identity: ProcessIdentity, do: str, **more: object) -> str:
        """Have the process do so, and return what it says it did, which may be before it is done.

        Raises:
            ImpossibleError: it does not listen, or says nothing.
        """
        order = self.folder / f"order-{identity.pid}.json"
        answer = self.folder / f"did-{identity.pid}.txt"
        if not _handles(identity.pid, signal.SIGRTMAX):
            raise ImpossibleError(f"{identity} does not listen to the drill (it was not started with its PYTHONPATH)")
        answer.unlink(missing_ok=True)
        durable.replace_note(order, json.dumps({"do": do, **more}).encode())
        try:
            deadline = time.monotonic() + ANSWER_S
            told = send_signal(identity, signal.SIGRTMAX)
            while told and time.monotonic() < deadline and identity.is_alive():
                if answer.exists():
                    return answer.read_text()
                time.sleep(_LOOK_S)
        finally:
            order.unlink(missing_ok=True)
        if answer.exists():
            return answer.read_text()
        raise ImpossibleError(f"{identity} did not take the order within {ANSWER_S:g} s")


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal (proc_pid_status(5), SigCgt)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
