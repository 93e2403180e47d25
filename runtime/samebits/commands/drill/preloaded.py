"""Build the library that a drill preloads into its job (``libc_faults.c``), and switch its faults on and off.

The job's processes share one mapped file. Writing to it switches a fault for all of them at their next call.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

from samebits.commands.drill.orders import ImpossibleError
from samebits.printable import printable
from samebits.store import durable
from samebits.store.child_processes import end_group

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
