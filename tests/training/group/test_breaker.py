"""What the end of a process waits for; each case is a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading, torch
from samebits.training.group import breaker, group

class Forgotten:
    "A collective of gloo's whose end nobody tells; without a limit its wait is half an hour."

    def __init__(self):
        self.waited_without_end = threading.Event()

    def is_completed(self):
        return False

    def wait(self, timeout=None):
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        self.waited_without_end.set()
        threading.Event().wait(1800)

breaker.EXIT_GRACE_S = 900.0
work, end = Forgotten(), threading.Event()
breaker.run_aside({aside}, "aside")
{until}
breaker.leave_with(7)
"""


def ended(aside: str, until: str, within_s: float) -> int:
    program = PROGRAM.format(aside=aside, until=until)
    return subprocess.run([sys.executable, "-c", program], timeout=within_s, check=False).returncode


def test_group_that_gloo_has_forgotten_keeps_no_process() -> None:
    assert ended("lambda: group._empty([], [work])", "work.waited_without_end.wait()", 120) == 7


def test_work_that_will_end_is_waited_for() -> None:
    aside = "lambda: (end.wait(), print('it came to its end', flush=True))"
    assert ended(aside, "threading.Timer(0.5, end.set).start()", 120) == 0  # no thread was stuck: a normal end


def test_work_that_may_end_is_waited_for_up_to_a_bound() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        ended("lambda: threading.Event().wait(1800)", "", 5)
