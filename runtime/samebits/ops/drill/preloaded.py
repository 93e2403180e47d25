"""The library that a drill preloads into its job: built here from ``libc_faults.c``, and told here what is on.

Only building it and its file of switches live here. The one idea: the job's processes share one mapped file, so a
switch is one store into memory that all of them see at their next call, and nothing of the machine is changed.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

from samebits.ops.drill.impossible import ImpossibleError
from samebits.store import durable

_SOURCE = Path(__file__).with_name("libc_faults.c")
_NUMBERS = struct.Struct("=qqq")  # as ``struct control`` begins: seconds ahead, is full, refused
_BYTES = 4096


NO_COMPILER = "no C compiler (cc) is here to build the preloaded library with"


def compiler_here() -> str | None:
    """The machine's C compiler."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class Preloaded:
    """The library, for one job.

    Args:
        folder: where it is built.
        checkpoints: the folder that ``is_full`` is about.

    Raises:
        ImpossibleError: it cannot be built on this machine.
    """

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        compiler = compiler_here()
        if compiler is None:
            raise ImpossibleError(NO_COMPILER)
        library, control = folder / "libc_faults.so", folder / "control"
        words = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            said = next(iter(done.stderr.strip().splitlines()[-1:]), "")
            raise ImpossibleError(f"{compiler} cannot build the preloaded library ({said[:200]})")
        path = os.fsencode(checkpoints.resolve())
        if len(path) >= _BYTES - _NUMBERS.size:
            raise ImpossibleError("the checkpoints' path is too long for the preloaded library")
        with os.fdopen(durable.create(control, is_read_too=True), "r+b") as file:
            file.write((_NUMBERS.pack(0, 0, 0) + path).ljust(_BYTES, b"\0"))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self.environment = {"LD_PRELOAD": str(library), "SAMEBITS_DRILL_CONTROL": str(control)}

    def set(self, *, ahead_s: int = 0, is_full: bool = False) -> None:
        """From now on the wall clock is so far ahead, and the folder takes no byte or does again."""
        self._memory[: 2 * 8] = struct.pack("=qq", ahead_s, is_full)

    @property
    def refused(self) -> int:
        """How many calls were refused so far."""
        return int(_NUMBERS.unpack_from(self._memory)[2])

    def close(self) -> None:
        """As it was."""
        self.set()
        self._memory.close()
