"""Child processes are killed with a parent that is killed, and left alone if the parent ends by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from samebits.store.process_identity import ProcessIdentity
from tests.system.processes import signal_process

WAIT_S = 60.0
PARENT = """
import os, subprocess, sys
from samebits.store.child_processes import kill_left_behind
kill_left_behind("MARK", sys.argv[2])
reader, writer = os.pipe()
for mark in (sys.argv[2], "another's"):
    words = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(words, env=os.environ | {"MARK": mark}, stdin=reader, pass_fds=[writer])
    print(child.pid, flush=True)
if sys.argv[1] == "ends":
    sys.exit(0)
input()
"""


def is_watched(mark: str) -> bool:
    """Whether a process runs that is to kill what has this mark."""
    for pid in (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            if f"MARK={mark}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
        except OSError:
            continue  # it is gone
    return False


@pytest.mark.parametrize(("how", "is_left"), [("is killed", [False, True]), ("ends", [True, True])])
def test_what_is_marked_is_killed_with_its_parent(how: str, is_left: list[bool]) -> None:
    mark = uuid.uuid4().hex
    words = [sys.executable, "-c", PARENT, how, mark]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [ProcessIdentity.of(int(parent.stdout.readline())) for _ in range(2)]
        marked, other = (one for one in children if one is not None)
        if how == "is killed":
            parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT_S)
        try:
            assert is_left[0] or marked.wait_for_exit(WAIT_S)
            assert [marked.is_alive(), other.is_alive()] == is_left
            assert how == "is killed" or not is_watched(mark)
        finally:
            for one in (marked, other):
                signal_process(one, signal.SIGKILL)
