"""A process's sign of life, seen by real processes beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.service.life_sign import LifeSign, WatchedSign, Whereabouts

WAIT_S = 30.0
HOLDER = """
import os, sys, threading
from runtime.service.life_sign import LifeSign
sign = LifeSign("here", "session-1")
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
    """A process that holds its sign until it is told something, and what is then written in ``then`` happens."""

    def __init__(self, then: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER.format(then=then)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        pid, descriptor = self.read().split()
        self.at = Whereabouts("here", int(pid), int(descriptor), "session-1")

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


class Watch:
    """Waits in a thread of its own, as an agent does."""

    def __init__(self, at: Whereabouts) -> None:
        self._sign = WatchedSign(at)
        self.told: list[bool] = []
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self.told.append(self._sign.wait_for_death())

    def result(self) -> bool:
        self._thread.join(WAIT_S)
        assert self.told, "nothing was told"
        return self.told[0]


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.process.kill()
    made.process.communicate()


def test_a_kill_is_told_to_everybody_who_waits_and_to_who_comes_later(holder: Holder) -> None:
    late = WatchedSign(holder.at)
    watches = [Watch(holder.at), Watch(holder.at)]
    holder.kill()
    assert [watch.result() for watch in watches] == [True, True]
    assert late.wait_for_death()


def test_what_was_given_up_is_no_death(holder: Holder) -> None:
    watch = Watch(holder.at)
    holder.tell("give up")
    assert not watch.result()
    assert holder.read() == "given up\n"
    holder.process.wait(WAIT_S)
    with pytest.raises(OSError):  # it is gone, or going
        WatchedSign(holder.at)


@pytest.mark.parametrize("then", ["os._exit(3)", "raise SystemExit", "os.execv('/bin/sleep', ['sleep', '600'])"])
def test_any_end_without_a_word_is_a_death(then: str) -> None:
    holder = Holder(then)
    watch = Watch(holder.at)
    holder.tell("go on")
    assert watch.result()
    holder.process.kill()
    holder.process.communicate()


def test_a_child_that_lives_on_does_not_hide_the_death() -> None:
    """As a DataLoader's worker does: it has inherited the file and the memory, not the lock."""
    holder = Holder("child = os.fork()\nif child: print(child, flush=True)\nimport time\ntime.sleep(600)")
    watch = Watch(holder.at)
    holder.tell("go on")
    child = int(holder.read())
    holder.kill()
    assert watch.result()
    os.kill(child, signal.SIGKILL)
    holder.process.communicate()


def test_another_process_or_session_is_not_watched(holder: Holder) -> None:
    for wrong in (
        replace(holder.at, session="session-2"),
        replace(holder.at, descriptor=0),
        replace(holder.at, descriptor=99),
        replace(holder.at, pid=os.getpid()),
    ):
        with pytest.raises(OSError):  # it is not there, or something else is
            WatchedSign(wrong)


def test_a_sign_leaves_nothing_but_a_file_without_a_name() -> None:
    sign = LifeSign("here", "session-1")
    assert "memfd:samebits-life-sign" in str(Path(f"/proc/self/fd/{sign.whereabouts.descriptor}").readlink())
