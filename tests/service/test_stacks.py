"""Asking a process for its stack: asleep, holding the GIL, stopped, or without the handler."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.service.stacks import NoStackReason, ask
from samebits.store.process_identity import ProcessIdentity
from samebits.tracebacks import place_in_dump

OPENS = "from samebits.service import stacks\nassert stacks.open_channel()\n"
SAYS = "import os\nos.write(1, b'ready')\n"
SLEEPS = "import time\ntime.sleep(600)\n"
HOLDS_THE_GIL = "import re\nre.match('(a+)+$', 'a' * 60 + 'b')\n"

Start = Callable[[str], ProcessIdentity]


@pytest.mark.parametrize(("does", "line"), [(SLEEPS, 6), (HOLDS_THE_GIL, 6)], ids=["sleeps", "holds the GIL"])
def test_process_reports_its_line_in_any_state(does: str, line: int, start: Start, tmp_path: Path) -> None:
    identity = start(OPENS + SAYS + does)
    for _ in range(2):  # and again: the first answer is consumed
        answer = ask(identity)
        while not answer.silence and place_in_dump(answer.text, tmp_path) != f"script.py:{line} in <module>":
            answer = ask(identity)  # it has only just reported that it is ready
        assert answer.silence is None and answer.text.count("most recent call first") == 1
    assert identity.is_alive()


def test_process_without_the_handler_is_not_sent_a_fatal_signal(start: Start) -> None:
    identity = start(SAYS + SLEEPS)
    assert ask(identity).silence is NoStackReason.NO_CHANNEL
    assert identity.is_alive()


def test_stopped_process_is_reported_as_stopped(start: Start) -> None:
    identity = start(OPENS + SAYS + SLEEPS)
    os.kill(identity.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, identity.pid, os.WSTOPPED | os.WNOWAIT)
    assert ask(identity).silence is NoStackReason.STOPPED


def test_other_process_with_the_same_pid_is_not_asked(start: Start) -> None:
    identity = start(OPENS + SAYS + SLEEPS)
    assert ask(ProcessIdentity(identity.pid, identity.started_at + 1)).silence is NoStackReason.GONE
