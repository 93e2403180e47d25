"""A process's sign of life, observed by real processes on the same host."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from samebits.core.values import replace
from samebits.service import clock, process_state
from samebits.service.process_state import DeathWatch, LifeSign, WatchedSign, Whereabouts, quiet_s

WAIT_S = 30.0
HOLDER = """
import os, sys, threading
from samebits.service import clock, process_state
from samebits.service.process_state import LifeSign
sign = LifeSign("here", "{session}")
done = threading.Event()
def hold():
    sign.hold()
    print(sign.whereabouts.pid, sign.whereabouts.descriptor, flush=True)
    if sys.stdin.readline() == "give up\\n":
        sign.give_up()
        print("given up", flush=True)
    done.set()
threading.Thread(target=hold, daemon=True).start()
done.wait()
{then}
"""


class Holder:
    """A process that holds its sign until told otherwise, then does what ``then`` says."""

    def __init__(self, then: str = "", session: str = "session-1") -> None:
        program = HOLDER.format(then=then, session=session)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        pid, descriptor = self.read().split()
        self.at = Whereabouts("here", int(pid), int(descriptor), session)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


def watch(at: Whereabouts) -> Future[bool]:
    """Return as soon as it is known whether the process died or gave its sign up."""
    sign, told = WatchedSign(at), Future[bool]()
    threading.Thread(target=lambda: told.set_result(sign.wait_for_death()), daemon=True).start()
    return told


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.process.kill()
    made.process.communicate()


def test_kill_is_seen_by_all_watchers_and_later_ones(holder: Holder) -> None:
    late = WatchedSign(holder.at)
    watches = [watch(holder.at), watch(holder.at)]
    holder.kill()
    assert [one.result(WAIT_S) for one in watches] == [True, True]
    assert late.wait_for_death()


def test_released_sign_does_not_report_a_death(holder: Holder) -> None:
    told = watch(holder.at)
    holder.tell("give up")
    assert not told.result(WAIT_S)
    assert holder.read() == "given up\n"
    holder.process.wait(WAIT_S)
    with pytest.raises(OSError):  # it has ended or is about to
        WatchedSign(holder.at)


@pytest.mark.parametrize("then", ["os._exit(3)", "raise SystemExit", "os.execv('/bin/sleep', ['sleep', '600'])"])
def test_any_end_without_a_release_is_a_death(then: str) -> None:
    holder = Holder(then)
    told = watch(holder.at)
    holder.tell("go on")
    assert told.result(WAIT_S)
    holder.process.kill()
    holder.process.communicate()


def test_surviving_child_does_not_hide_the_death() -> None:
    """Like a DataLoader worker, it has inherited the file and the memory, but not the lock."""
    holder = Holder("child = os.fork()\nif child: print(child, flush=True)\nimport time\ntime.sleep(600)")
    told = watch(holder.at)
    holder.tell("go on")
    child = int(holder.read())
    holder.kill()
    assert told.result(WAIT_S)
    os.kill(child, signal.SIGKILL)
    holder.process.communicate()


def test_other_process_or_session_is_not_watched(holder: Holder) -> None:
    for wrong in (
        replace(holder.at, session="session-2"),
        replace(holder.at, descriptor=0),
        replace(holder.at, descriptor=99),
        replace(holder.at, pid=os.getpid()),
    ):
        with pytest.raises(OSError):  # it is missing, or something else is there
            WatchedSign(wrong)


def test_sign_leaves_only_an_unnamed_file() -> None:
    sign = LifeSign("here", "session-1")
    assert "memfd:samebits-life-sign" in str(Path(f"/proc/self/fd/{sign.whereabouts.descriptor}").readlink())


def test_death_watch_reports_only_the_dead() -> None:
    holders = [Holder(session="session-1"), Holder(session="session-2")]
    told: queue.Queue[str] = queue.Queue()
    deaths = DeathWatch(told.put)
    assert all(deaths.watch(holder.at) for holder in holders)
    assert not deaths.watch(replace(holders[0].at, session="another"))
    holders[0].tell("give up")
    assert holders[0].read() == "given up\n"
    holders[1].kill()
    assert told.get(timeout=WAIT_S) == "session-2"
    assert told.empty()
    for holder in holders:
        holder.kill()
        holder.process.communicate()


def test_time_since_python_last_ran_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now)
    sign = LifeSign("here", "session-1")
    monkeypatch.setattr(process_state, "_is_a_sign", lambda entry: entry.name == str(sign.whereabouts.descriptor))
    sign.hold()
    try:
        assert quiet_s(os.getpid()) is None, "it has not beaten yet"
        sign.beat()
        assert quiet_s(os.getpid()) == 0.0
        now += 3.5
        assert quiet_s(os.getpid()) == 3.5
        now = 99.0
        assert quiet_s(os.getpid()) is None, "another boot's clock"
        sign.beat_no_more()
        assert quiet_s(os.getpid()) is None, "it is leaving: without running Python it holds no lock"
    finally:
        sign.give_up()
