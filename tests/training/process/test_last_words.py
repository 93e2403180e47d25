"""The report of an uncaught exception; one in a thread is reported but ends no process."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from samebits.core.causes.table import DEFAULT, WRONG_GRADIENT, Observation
from samebits.core.reports import MAX_ANOMALY_CHARS
from samebits.core.watch.audits import Known, Roles, why_it_ends
from samebits.errors import UnequalError
from samebits.training.process.exit_status import last_words, watch_threads
from tests.system.processes import environment_of_tests

THREADS = """\
import sys, threading
from samebits.training.process import context

def fail(): raise ValueError("no\\nsuch \\x1b[31m sample")

class Told:
    step = 41
    must_end = None
    def report_anomaly(self, step, text): print("told", step, text, flush=True)
    def speak_last(self, text): print("LAST", text, flush=True)
    def leave(self, *, on_purpose, text, status): print("left", on_purpose, flush=True)

ending = context._Ending()
ending.install()
ending.agent = Told()
ending.is_through = True
for hook in (threading.excepthook, lambda ended: sys.excepthook(*ended[:3])):
    threading.excepthook = hook
    thread = threading.Thread(target=fail, name="feeder")
    thread.start()
    thread.join()
"""


def ended(target: object, tell: object, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    watch_threads(tell)  # type: ignore[arg-type]
    thread = threading.Thread(target=target, name="feeder")  # type: ignore[arg-type]
    thread.start()
    thread.join()
    assert len(shown) == 1, "the previous hook is called as well"


def test_end_of_a_thread_is_reported_in_one_bounded_printable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("x" * 9000 + "\n\x1b[31m")

    told: list[str] = []
    ended(fail, told.append, monkeypatch)
    (text,) = told
    assert (
        text.startswith("its thread feeder failed at ")
        and "test_last_words.py:" in text
        and ": ValueError: xxx" in text
    )
    assert len(text) <= MAX_ANOMALY_CHARS and text.isprintable()


def test_exit_in_a_thread_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    watch_threads(told.append)
    threading.excepthook(threading.ExceptHookArgs((SystemExit, SystemExit(3), None, None)))
    assert told == []


def test_last_words_are_bounded() -> None:
    error = ValueError("x" * 9000)
    assert last_words(ValueError, error, None).startswith("failed: ValueError: xxx")
    assert len(last_words(ValueError, error, None)) <= 2000


@pytest.mark.parametrize("is_in_a_script", [True, False])
def test_repeated_wrong_gradient_is_distinguished_from_a_script_error(is_in_a_script: bool) -> None:
    """A wrong distinction would advise users to correct the script and resume from possibly wrong points."""
    error = UnequalError(why_it_ends(50, "rank 1's gradient …", Roles(1, 2, 0), Known(0, 0)))
    traceback = None
    try:
        raise error
    except UnequalError as raised:
        traceback = raised.__traceback__ if is_in_a_script else None
    words = last_words(UnequalError, error, traceback)
    assert DEFAULT.of(Observation(error=words, is_failure=True)) is WRONG_GRADIENT


def test_end_of_a_thread_is_not_the_last_words_of_its_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(THREADS)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment_of_tests(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, left = done.stdout.splitlines()
    assert told == "told 41 its thread feeder failed at script.py:4: ValueError: no", "the second hook is the script's"
    assert left == "left True", "and its process has ended well"
    assert done.stderr.count("ValueError: no") == 2
