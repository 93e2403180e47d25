"""Send orders to a drill's processes: to cause a fault in themselves, or to wait at a commit.

``inside`` carries them out. An order is a file and a signal. The signal is sent only if the kernel reports a handler
for it in the process, because it would end any other process. The commit at which ranks wait is a number in shared
memory. Faults of libc's calls are switched on and off in a preloaded library.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from samebits.commands.drill import inside
from samebits.launcher.processes import send_signal
from samebits.printable import printable
from samebits.store import durable
from samebits.store.child_processes import end_group
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
            ImpossibleError: the process does not listen, reports nothing, or could not carry out the order.
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
                    break
                time.sleep(_LOOK_S)
        finally:
            order.unlink(missing_ok=True)
        if answer.exists():
            said = answer.read_text()
            if said.startswith(inside.FAILED):
                raise ImpossibleError(f"{identity} could not carry out the order ({said.removeprefix(inside.FAILED)})")
            return said
        raise ImpossibleError(f"{identity} did not acknowledge the order within {ANSWER_S:g} s")


def _handles(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal (proc_pid_status(5), SigCgt)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


# ---- the library that a drill preloads into its job (``libc_faults.c``)
#
# The job's processes share one mapped file. Writing to it switches a fault for all of them at their next call.

_SOURCE = Path(__file__).with_name("libc_faults.c")
_NUMBERS = struct.Struct("=qqq")  # the beginning of ``struct control``: seconds ahead, error, refused
_BYTES = 4096
COMPILER_TIMEOUT_S = 60.0
_MOST_LOG_BYTES = 65536
_SHOWN_CHARACTERS = 200

NO_COMPILER = "no C compiler (cc) is here to build the preloaded library with"


def compiler_here() -> str | None:
    """Return the name of this machine's C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class Preloaded:
    """The preloaded library of one job.

    Args:
        folder: the folder to build it in.
        checkpoints: the folder in which writes can be made to fail.

        Raises:
            ImpossibleError: the library cannot be built on this machine.
    """

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        compiler = compiler_here()
        if compiler is None:
            raise ImpossibleError(NO_COMPILER)
        library, control = folder / "libc_faults.so", folder / "control"
        _build([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"], folder / "cc.log")
        path = os.fsencode(checkpoints.resolve())
        if len(path) >= _BYTES - _NUMBERS.size:
            raise ImpossibleError("the checkpoints' path is too long for the preloaded library")
        with os.fdopen(durable.create(control, is_read_too=True), "r+b") as file:
            file.write((_NUMBERS.pack(0, 0, 0) + path).ljust(_BYTES, b"\0"))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self.environment = {"LD_PRELOAD": str(library), "SAMEBITS_DRILL_CONTROL": str(control)}

    def set(self, *, ahead_s: int = 0, error: int = 0) -> None:
        """Set how far the wall clock is ahead, in seconds, and the errno of writes to the folder (0: they succeed)."""
        self._memory[: 2 * 8] = struct.pack("=qq", ahead_s, error)

    @property
    def refused(self) -> int:
        """Return how many calls have failed on purpose so far."""
        return int(_NUMBERS.unpack_from(self._memory)[2])

    def close(self) -> None:
        """Switch all faults off."""
        self.set()
        self._memory.close()


def _build(words: list[str], log: Path) -> None:
    """Run the compiler, with a time limit.

    Raises:
        ImpossibleError: the compiler failed.
    """
    with os.fdopen(durable.create(log, is_read_too=True), "r+b") as said:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
        except OSError as error:
            raise ImpossibleError(f"{words[0]} cannot be run: {error.strerror}") from None
        in_time = end_group(process, COMPILER_TIMEOUT_S)
        status = process.wait()
        if not in_time:
            raise ImpossibleError(f"{words[0]} did not build the preloaded library within {COMPILER_TIMEOUT_S:g} s")
        if status:
            said.seek(0)
            lines = said.read(_MOST_LOG_BYTES).decode(errors="replace").strip().splitlines()
            last = printable(lines[-1], _SHOWN_CHARACTERS) if lines else f"status {status}"
            raise ImpossibleError(f"{words[0]} cannot build the preloaded library ({last})")
