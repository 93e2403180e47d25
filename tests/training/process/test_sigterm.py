"""SIGTERM: obeyed at the next commit, at once, or passed to the script's handler, depending on the stage."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from samebits.training.process.sigterm import STATUS, Departure, SigtermStage

TERM = signal.SIGTERM


@pytest.fixture
def own() -> Iterator[list[int]]:
    """A handler set by the script: the signals it received."""
    caught: list[int] = []

    def catch(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    before = signal.signal(TERM, catch)
    yield caught
    signal.signal(TERM, before)


def installed(stage: SigtermStage) -> Departure:
    departure = Departure()
    departure.install()
    departure.stage = stage
    return departure


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == STATUS == 143


def test_signal_in_a_step_is_obeyed_at_the_commit(own: list[int]) -> None:
    departure = installed(SigtermStage.TRAINING)
    departure.obey()
    signal.raise_signal(TERM)
    signal.raise_signal(TERM)
    assert (own, departure.has_left) == ([], False)
    with leaving():
        departure.obey()
    assert (own, departure.has_left) == ([TERM], True)


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 71) is killed by signal: Terminated. ",
        "DataLoader worker (pid(s) 71, 72) exited unexpectedly",
    ],
)
def test_loader_ended_by_the_same_signal_is_not_a_script_error(own: list[int], text: str) -> None:
    departure = installed(SigtermStage.TRAINING)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), TERM))  # the loader's error comes first
    timer.start()
    with leaving():
        departure.obey_behind(RuntimeError(text))
    timer.join()
    assert departure.has_left
    alone = installed(SigtermStage.TRAINING)
    for error in (RuntimeError(text), RuntimeError("no"), ValueError(text)):
        alone.obey_behind(error)  # no signal was sent: the error stays


def test_waiting_process_leaves_at_once(own: list[int]) -> None:
    departure = installed(SigtermStage.TRAINING)
    with leaving(), departure.waits():
        signal.raise_signal(TERM)
    assert (own, departure.has_left) == ([TERM], True)


def test_second_signal_does_not_interrupt_the_leaving(own: list[int]) -> None:
    departure = installed(SigtermStage.TRAINING)
    with leaving(), departure.waits():
        signal.raise_signal(TERM)
    signal.raise_signal(TERM)
    assert own == [TERM]


def test_signal_between_the_step_and_the_wait_is_not_missed(own: list[int]) -> None:
    departure = installed(SigtermStage.TRAINING)
    signal.raise_signal(TERM)
    entered = False
    with leaving(), departure.waits():
        entered = True
    assert not entered


def test_step_after_a_wait_is_protected_again(own: list[int]) -> None:
    departure = installed(SigtermStage.TRAINING)
    with departure.waits():
        pass
    signal.raise_signal(TERM)
    assert not departure.has_left


def test_scripts_own_handler_is_called_outside_elastic_run(own: list[int]) -> None:
    departure = installed(SigtermStage.OUTSIDE)
    signal.raise_signal(TERM)
    assert (own, departure.has_left) == ([TERM], False)


def test_ignored_signal_stays_ignored(own: list[int]) -> None:
    signal.signal(TERM, signal.SIG_IGN)
    installed(SigtermStage.WAITING)
    assert signal.getsignal(TERM) is signal.SIG_IGN


def test_nothing_is_installed_outside_the_main_thread(own: list[int]) -> None:
    before = signal.getsignal(TERM)
    thread = threading.Thread(target=installed, args=(SigtermStage.WAITING,))
    thread.start()
    thread.join()
    assert signal.getsignal(TERM) is before


@pytest.mark.parametrize("stage", list(SigtermStage))
def test_forked_child_dies_of_the_signal(stage: SigtermStage) -> None:
    """A DataLoader worker has no step to finish; nor has the process itself outside of elastic.run."""
    before = signal.getsignal(TERM)
    try:
        signal.signal(TERM, signal.SIG_DFL)
        installed(stage)
        pid = os.fork()
        if pid == 0:
            try:
                signal.raise_signal(TERM)
            finally:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -TERM
    finally:
        signal.signal(TERM, before)


def test_forked_child_hanging_in_a_library_dies_of_the_signal() -> None:
    """Python's handlers run between two lines of Python, which it never reaches."""
    before = signal.getsignal(TERM)
    try:
        signal.signal(TERM, signal.SIG_DFL)
        departure = installed(SigtermStage.TRAINING)
        begun, says = os.pipe()
        pid = os.fork()
        if pid == 0:
            departure.let_go_in_child()
            os.write(says, b".")
            mutex = ctypes.create_string_buffer(64)
            library = ctypes.CDLL(None)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
            os._exit(7)
        assert os.read(begun, 1) == b"."
        os.kill(pid, TERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -TERM
        os.close(begun)
        os.close(says)
    finally:
        signal.signal(TERM, before)


def test_handlers_own_exit_takes_precedence(own: list[int]) -> None:
    signal.signal(TERM, lambda *_: sys.exit(5))
    departure = installed(SigtermStage.TRAINING)
    signal.raise_signal(TERM)
    with pytest.raises(SystemExit) as ended:
        departure.obey()
    assert ended.value.code == 5
    assert departure.has_left  # on purpose all the same
