"""Send orders to a drill's processes: to cause a fault in themselves, or to wait at a commit.

``inside`` carries them out. An order is a file and a signal. The signal is sent only if the kernel reports a handler
for it in the process, because it would end any other process. The commit at which ranks wait is a number in shared
memory.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from samebits.commands.drill import inside
from samebits.launcher.processes import send_signal
from samebits.store import durable
from samebits.store.process_identity import ProcessIdentity

ANSWER_S = 30.0
_LOOK_S = 0.02


class ImpossibleError(Exception):
    """A fault cannot be injected on this machine or at this moment. The text is the reason."""


class DrillOrders:
    """Sends orders to the processes of one job, through a folder that comes first on their PYTHONPATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        durable.replace_note(folder / "sitecustomize.py", Path(inside.__file__).read_bytes())
        with os.fdopen(durable.create(folder / inside.HOLD_FILE, is_read_too=True), "r+b") as file:
            file.write(inside.STEP.pack(0))
            file.flush()
            self._hold = mmap.mmap(file.fileno(), inside.STEP.size)

    def hold_at(self, step: int) -> None:
        """Make every rank wait at its first commit from ``step`` on; 0: release all ranks."""
        self._hold[:] = inside.STEP.pack(step)

    def held(self, pids: Iterable[int]) -> dict[int, int]:
        """Return those of these processes that wait, with the step that each has committed."""
        found: dict[int, int] = {}
        for pid in pids:
            try:
                asked, step = map(int, (self.folder / f"held-{pid}.txt").read_text().split())
            except (FileNotFoundError, ValueError):
                continue
            if asked == inside.STEP.unpack(self._hold)[0]:
                found[pid] = step
        return found

    def give(self, identity: ProcessIdentity, do: str, **more: object) -> str:
        """Order a process to cause a fault. Return its report, which may be written before the fault is complete.

        Raises:
            ImpossibleError: the process does not listen, or reports nothing.
        """
        order = self.folder / f"order-{identity.pid}.json"
        answer = self.folder / f"did-{identity.pid}.txt"
        if not _handles(identity.pid, signal.SIGRTMAX):
            raise ImpossibleError(
                f"{identity} takes no orders from the drill (it was started without the drill's PYTHONPATH)"
            )
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
        raise ImpossibleError(f"{identity} did not acknowledge the order within {ANSWER_S:g} s")


def _handles(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal (proc_pid_status(5), SigCgt)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
