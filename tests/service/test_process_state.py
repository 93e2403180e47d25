"""Process states seen from the host: real processes that run, are stopped, or hold the GIL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from samebits.core.hangs import Doing, Hang, classify_hang
from samebits.service.process_state import MOST_THREADS, look, threads
from samebits.store.process_identity import ProcessIdentity

BEATS = """
import os, threading, time
from samebits.service.process_state import LifeSign
sign = LifeSign("here", "session")
def beat():
    while True:
        sign.beat()
        time.sleep(0.02)
threading.Thread(target=beat, daemon=True).start()
time.sleep(0.1)
os.write(1, b"ready")
"""
SLEEPS = "time.sleep(600)\n"
HOLDS_THE_GIL = "import ctypes\nctypes.PyDLL(None).sleep(600)\n"
SILENT_S = 0.5

Start = Callable[[str], ProcessIdentity]


def wait_for(identity: ProcessIdentity, hang: Hang) -> None:
    """Wait until the process is seen in that state."""
    deadline_s = time.monotonic() + 60.0
    while classify_hang(look(identity), SILENT_S) is not hang:
        assert time.monotonic() < deadline_s, look(identity)
        time.sleep(0.01)


def test_running_but_silent_process_is_cut_off(start: Start) -> None:
    wait_for(start(BEATS + SLEEPS), Hang.CUT_OFF)


def test_process_that_holds_the_gil_runs_no_python(start: Start) -> None:
    identity = start(BEATS + HOLDS_THE_GIL)
    wait_for(identity, Hang.LOCKED)
    process_state = look(identity)
    assert (
        process_state is not None and process_state.doing is Doing.RUNS and (process_state.quiet_s or 0) > SILENT_S / 2
    )


def test_stopped_process_is_recognised_with_its_threads(start: Start) -> None:
    identity = start(BEATS + SLEEPS)
    os.kill(identity.pid, signal.SIGSTOP)
    wait_for(identity, Hang.STOPPED)
    deadline_s = time.monotonic() + 60.0
    while not all("state T" in line for line in threads(identity.pid)):  # the kernel stops them one after the other
        assert time.monotonic() < deadline_s, threads(identity.pid)
        time.sleep(0.01)
    seen = threads(identity.pid)
    assert 2 <= len(seen) <= MOST_THREADS and all(line.isprintable() for line in seen)
    os.kill(identity.pid, signal.SIGCONT)
    wait_for(identity, Hang.CUT_OFF)


def test_process_without_a_valid_sign_is_only_silent(start: Start) -> None:
    assert classify_hang(look(start("import os, time\nos.write(1, b'ready')\n" + SLEEPS)), SILENT_S) is Hang.SILENT
    for value in ("math.inf", "math.nan", "1e300", "-1.0", "0.0"):
        lies = f"process_state._BEAT.pack_into(sign._mapped, process_state._BEAT_AT, {value})\n"
        source = BEATS.replace("threading.Thread(target=beat, daemon=True).start()", lies)
        process_state = look(start("import math\nfrom samebits.service import process_state\n" + source + SLEEPS))
        assert process_state is not None and process_state.quiet_s is None, value


def test_ended_or_replaced_process_is_not_seen(start: Start) -> None:
    identity = start(BEATS + SLEEPS)
    assert look(ProcessIdentity(identity.pid, identity.started_at + 1)) is None
    os.kill(identity.pid, signal.SIGKILL)
    os.waitid(os.P_PID, identity.pid, os.WEXITED | os.WNOWAIT)
    assert look(identity) is None and isinstance(threads(identity.pid), list)
