"""Forked children of a rank: started while no other thread works, ended with the rank."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from samebits.store.process_identity import ProcessIdentity
from tests.system.processes import REPOSITORY, environment_of_tests, signal_process

WAIT_S = 60.0
BEGIN = """
import ctypes, multiprocessing, os, signal, sys, threading
from samebits.training.process.context import Forking

looks = []
forking = Forking(lambda: looks.append(os.getpid()), lambda: None)
forking.install()
"""
PARENT = (
    BEGIN
    + """
def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    print(os.getpid(), flush=True)
    ctypes.CDLL(None).pause()

def fork():
    child = multiprocessing.get_context("fork").Process(target=hang, daemon=DAEMON)
    child.start()

FORK
print("forked", len(looks), flush=True)
sys.stdin.read()
os._exit(0)
"""
)
FORK_TWICE = (
    BEGIN
    + """
pid = os.fork()
if pid == 0:
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    os._exit(len(looks))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
)


@dataclass(frozen=True, slots=True)
class Family:
    parent: subprocess.Popen[str]
    child: ProcessIdentity


@contextlib.contextmanager
def family(fork: str, *, daemon: bool) -> Iterator[Family]:
    """Start a process and a child of it that only SIGKILL can end."""
    text = PARENT.replace("DAEMON", str(daemon)).replace("FORK", fork)
    parent = subprocess.Popen(
        [sys.executable, "-c", text],
        cwd=REPOSITORY, env=environment_of_tests(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdin is not None and parent.stdout is not None
    said = sorted((parent.stdout.readline(), parent.stdout.readline()))  # in either order
    child = ProcessIdentity.of(int(said[0]))
    assert child is not None
    try:
        assert said[1] == "forked 1\n"
        yield Family(parent, child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
        signal_process(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_hanging_daemonic_child_ends_with_its_parent(how: str) -> None:
    with family("fork()", daemon=True) as one:
        assert one.child.is_alive()
        if how == "killed":
            one.parent.kill()
        else:
            assert one.parent.stdin is not None
            one.parent.stdin.close()
        one.parent.wait(WAIT_S)
        assert one.child.wait_for_exit(WAIT_S)


def test_child_meant_to_outlive_its_parent_does() -> None:
    with family("fork()", daemon=False) as one:
        one.parent.kill()
        one.parent.wait(WAIT_S)
        assert one.child.is_alive()


def test_child_of_another_thread_does_not_end_with_the_thread() -> None:
    """The kernel would take the thread's end for the parent's (prctl(2))."""
    with family("thread = threading.Thread(target=fork); thread.start(); thread.join()", daemon=True) as one:
        watched = os.pidfd_open(one.child.pid)
        try:
            assert not select.select([watched], [], [], 0.2)[0]
        finally:
            os.close(watched)


def test_childs_own_forks_are_not_delayed() -> None:
    command = [sys.executable, "-c", FORK_TWICE]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment_of_tests(), timeout=WAIT_S, check=False)
    assert done.returncode == 1
