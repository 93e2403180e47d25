"""A scheduler that is kept for processes which another launcher starts: where it may be started, and where not."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits import config
from samebits.__main__ import main
from samebits.errors import ListenError, SameBitsError
from samebits.launcher import job_spec, kept_scheduler
from samebits.launcher.kept_scheduler import KeptScheduler
from samebits.launcher.scheduler_link import ask_once
from samebits.net import address
from samebits.service import log
from samebits.store.process_identity import ProcessIdentity
from tests.system.processes import environment_of_tests, found_below, free_port, signal_process

WAIT_S = 60.0
ELSEWHERE = "192.0.2.1"  # RFC 5737: no machine's


def within(wanted: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Terminal(io.StringIO):
    """A standard input at which a person sits."""

    def isatty(self) -> bool:
        return True


class Place:
    """One folder and port in which schedulers are kept."""

    def __init__(self, folder: Path, captured: pytest.LogCaptureFixture) -> None:
        self.folder = folder
        self._captured = captured
        self.port = free_port()
        self._kept: list[KeptScheduler] = []

    def keep(self, host: str = "127.0.0.1") -> KeptScheduler:
        environment = environment_of_tests() | {"SCHED_HOST": host, "SCHED_PORT": str(self.port)}
        environment |= {"WORKER_NUM": "1", "ENABLE_RECOVERY": "1"}
        self.settings, _ = config.read({**environment, "ROLE": "worker", "NODE_ID": "0"})
        self._kept.append(KeptScheduler(self.settings, {**environment, "ROLE": "scheduler"}))
        return self._kept[-1]

    def said(self) -> str:
        return self._captured.text

    def schedulers(self) -> list[ProcessIdentity]:
        return found_below(self.folder)

    def job(self) -> str:
        """The id of the job, once its scheduler answers."""
        within(lambda: ask_once(self.settings, WAIT_S))
        view = ask_once(self.settings, WAIT_S)
        assert view is not None
        return view.job

    def kill_scheduler(self) -> ProcessIdentity:
        (scheduler,) = self.schedulers()
        signal_process(scheduler, signal.SIGKILL)
        assert scheduler.wait_for_exit(WAIT_S)
        return scheduler

    def close(self) -> None:
        for kept in self._kept:
            kept.close()
        for one in found_below(self.folder):
            signal_process(one, signal.SIGKILL)
            one.wait_for_exit(WAIT_S)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    place = Place(tmp_path, caplog)
    yield place
    place.close()


def test_processes_of_one_machine_start_one_scheduler_and_any_of_them_starts_the_next(place: Place) -> None:
    first, second = place.keep(), place.keep()
    job = place.job()
    for kept in (first, second):
        kept.link(job, is_up=True)
    killed = place.kill_scheduler()  # whose parent finds out by itself
    within(lambda: place.schedulers() not in ([], [killed]))
    assert place.job() == job
    first.close()
    place.kill_scheduler()
    second.link(job, is_up=False)
    within(place.schedulers)
    assert place.job() == job


def test_commands_in_the_folder_find_the_scheduler_and_a_persons_second_start_says_what_it_continues(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, log.LOGGER.name)
    first = place.keep()
    within(lambda: (place.folder / "recovery" / job_spec.ADDRESS_FILE).exists())
    for name in ("SCHED_HOST", "SCHED_PORT", "WORKER_NUM"):
        monkeypatch.delenv(name, raising=False)
    found = job_spec.settings_here()
    assert (found.sched_port, found.worker_num, found.plain) == (place.port, 1, True)
    within(lambda: ask_once(place.settings, WAIT_S) is not None)
    assert main(["status"]) == 0 and "no scheduler" not in capsys.readouterr().out
    assert main(["ckpt", "ls"]) == 0 and "saves its own checkpoints" in capsys.readouterr().out
    assert main(["ps"]) == 0 and "scheduler" in capsys.readouterr().out
    assert "this continues job" not in place.said()
    first.close()
    place.kill_scheduler()
    assert main(["history"]) == 0 and "ran for" in capsys.readouterr().out
    again = place.keep()
    place.job()
    again.close()
    place.kill_scheduler()
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    once_more = place.keep()
    place.job()
    assert "this continues job" not in place.said(), "restarted automatically"
    once_more.close()
    place.kill_scheduler()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    place.keep()
    within(lambda: "this continues job" in place.said())
    (line,) = [line for line in place.said().splitlines() if "this continues job" in line]
    assert f"mv {place.folder / 'recovery'} " in line, "the line must show how to start a new job"


def test_of_several_addresses_another_machine_takes_over_only_a_journal_of_its_job(place: Place) -> None:
    elsewhere = f"{ELSEWHERE}:9,127.0.0.1:{place.port}"
    second = place.keep(elsewhere)
    assert not place.schedulers(), "the first address is another machine's"
    first = place.keep()
    job = place.job()
    first.close()
    place.kill_scheduler()
    second.link("another job", is_up=False)
    assert not second._is_ours_to_start()
    second.link(job, is_up=False)
    within(place.schedulers)


def test_a_job_that_was_ended_gets_no_scheduler_again(place: Place) -> None:
    first, second = place.keep(), place.keep()
    job = place.job()
    second.link(job, is_up=True)
    first.stop_job("the test")  # without workers the job may end before it answers
    within(lambda: not place.schedulers())
    second.link(job, is_up=False)
    for kept in (first, second):
        kept._thread.join(WAIT_S)
        assert not kept._thread.is_alive()
    assert not place.schedulers()


def test_a_scheduler_that_cannot_be_started_does_not_end_a_job_that_runs(place: Place) -> None:
    first, second = place.keep(), place.keep()
    failures = list[Exception]()
    second.on_failure = failures.append
    second.link(place.job(), is_up=True)
    first.close()
    place.kill_scheduler()
    journal = place.folder / "recovery" / "journal"
    whole = journal.read_bytes()
    journal.write_bytes(b"damaged" + whole[7:])
    second.link(second._job, is_up=False)
    within(lambda: "can be started here for now" in place.said())
    journal.write_bytes(whole)
    within(place.schedulers)
    assert failures == []


def test_a_port_that_a_program_holds_which_is_no_scheduler_is_an_error_that_names_the_program(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(place.port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as stranger:
        try:
            within(lambda: address.folder_of_holder(place.port))
            with pytest.raises(ListenError, match=rf"held by pid {stranger.pid} .*http.server") as raised:
                place.keep()
            assert raised.value.exit_code == 75
            monkeypatch.setattr(address, "_holder", lambda _port: None)  # as if it were another user's
            monkeypatch.setattr(address, "_listeners", lambda _port: [None])
            monkeypatch.setattr(address, "_GREETING_S", 0.1)
            monkeypatch.setattr(kept_scheduler, "HELD_S", 0.6)
            failures = list[SameBitsError]()
            place.keep().on_failure = failures.append
            within(lambda: failures)
            assert f"SCHED_PORT={place.port}" in str(failures[0]) and "unknown program" in str(failures[0])
        finally:
            stranger.kill()


def test_a_process_that_is_about_to_start_a_scheduler_or_a_scheduler_of_another_user_is_no_stranger(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", place.port)):  # this process has loaded ZeroMQ, as every agent has
        assert address.may_be_a_scheduler("127.0.0.1", place.port, at_once=True)
    place.keep()
    place.job()
    monkeypatch.setattr(address, "_listeners", lambda _port: [None])
    assert address.may_be_a_scheduler("127.0.0.1", place.port), "it answers as ZeroMQ does"


def test_a_process_that_is_ending_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel frees the memory of a killed process before it closes the process's sockets."""
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as ended:
        assert ended.stdout is not None
        ended.stdout.read()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a process without memory
        monkeypatch.setattr(address, "_listeners", lambda _port: [ended.pid])
        assert address.may_be_a_scheduler("127.0.0.1", 1, at_once=True)
