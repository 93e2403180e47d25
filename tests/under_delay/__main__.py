"""``python -m tests.under_delay [options] [pytest's arguments]``: run tests while disk and network are slow.

A small library is built with the machine's C compiler and preloaded into pytest and every process that the tests start:
fsync, rename, unlink, send and recv start up to 200 ms late, at random, by a seed. A test that passes only on a fast
machine fails here. Without arguments for pytest: the tests with real processes in tests/system.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.system.processes import PRELOADED, REPOSITORY

SOURCE = Path(__file__).with_name("delays.c")
DEFAULT = ("tests/system", "-m", "system and not thorough")
TIMEOUT_S = "1500"  # of a test, instead of pyproject.toml's
NO_COMPILER = 69  # sysexits.h: EX_UNAVAILABLE


def compiler() -> str | None:
    """Return what CC names, or else the first C compiler found."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)


def built(folder: Path, cc: str) -> Path:
    """Build the library in this folder."""
    library = folder / "delays.so"
    words = [cc, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(words, check=True)
    return library


def preloaded(library: Path, seed: int, up_to_ms: int) -> Mapping[str, str]:
    """Return the environment variables that delay a process's calls."""
    before = os.environ.get("LD_PRELOAD")
    values = (f"{library}:{before}" if before else str(library), str(seed), str(up_to_ms))
    return dict(zip(PRELOADED, values, strict=True))


def main() -> int:
    """Return pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.under_delay", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the delays (default: 1)")
    parser.add_argument("--up-to-ms", type=int, default=200, help="how late a call may begin (default: 200)")
    options, words = parser.parse_known_args()
    cc = compiler()
    if cc is None:
        print(
            "tests.under_delay: found no C compiler, neither CC nor cc, gcc or clang on PATH. "
            "Fix: install one (Debian: apt-get install gcc); no other test needs it",
            file=sys.stderr,
        )
        return NO_COMPILER
    with tempfile.TemporaryDirectory(prefix="samebits-delays-") as folder:
        environment = os.environ | preloaded(built(Path(folder), cc), options.seed, options.up_to_ms)
        print(f"calls begin up to {options.up_to_ms} ms late, seed {options.seed}", flush=True)
        command = [sys.executable, "-m", "pytest", "--timeout", TIMEOUT_S, *(words or DEFAULT)]
        return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
