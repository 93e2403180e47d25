"""The preloaded delays: calls start late as the seed says, and do their work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import environment_of_tests
from tests.under_delay.__main__ import NO_COMPILER, built, compiler, preloaded

PROGRAM = """
import ctypes, os, socket
for number in range(20):
    with open("file", "w") as file:
        os.fsync(file.fileno())
    os.rename("file", "other")
    os.unlink("other")
a, b = socket.socketpair()
for _ in range(300):
    a.send(b"whole")
    assert b.recv(9) == b"whole"
try:
    os.unlink("gone")
except FileNotFoundError:
    print(ctypes.c_ulonglong.in_dll(ctypes.CDLL(None), "samebits_late_calls").value)
"""


@pytest.mark.skipif(compiler() is None, reason="no C compiler: python -m tests.under_delay says what it needs")
def test_calls_start_late_and_do_their_work(tmp_path: Path) -> None:
    cc = compiler()
    assert cc is not None
    environment = environment_of_tests() | preloaded(built(tmp_path, cc), 1, 1)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert 3 <= int(done.stdout) <= 40, "of 60 calls to the disk one in five, of 600 to the network one in 200"


def test_without_a_compiler_it_says_what_it_needs(repository: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.under_delay"],
        cwd=repository,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == NO_COMPILER
    assert "found no C compiler" in done.stderr and "Fix: install one" in done.stderr
