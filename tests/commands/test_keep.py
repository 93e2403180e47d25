"""``samebits keep``: its exit status for the container engine, and a message for each step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.__main__ import main
from samebits.commands.keep import LevelsSpentError
from samebits.errors import UsageError
from tests.system.processes import environment_of_tests

COUNTS = 'echo started >> "$COUNT"; '


@contextlib.contextmanager
def kept(tmp_path: Path, script: str, *options: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``samebits keep`` and end it if the test fails, since ``Popen`` alone would wait for it."""
    command = [sys.executable, "-P", "-m", "samebits", "keep", *options, "sh", "-c", script]
    ours = {"PROBE_FILE": str(tmp_path / "probe"), "ROLE": "scheduler", "WORKER_NUM": "1", "COUNT": str(tmp_path / "n")}
    with subprocess.Popen(
        command,
        env=environment_of_tests() | ours | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as keeper:
        try:
            yield keeper
        finally:
            keeper.kill()


def starts(tmp_path: Path) -> int:
    return (tmp_path / "n").read_text().count("started")


@pytest.mark.parametrize("status", [0, 1, 64, 87, 143])
def test_status_is_passed_on_if_a_restart_cannot_help(tmp_path: Path, status: int) -> None:
    with kept(tmp_path, f"{COUNTS} exit {status}") as keeper:
        said, _ = keeper.communicate(timeout=60)
    assert (keeper.returncode, starts(tmp_path), said) == (status, 1, "")


def test_escalation_from_level_to_level(tmp_path: Path) -> None:
    """The pod level ends the container with a status that restarts it; earlier attempts are recorded in the pod."""
    strategy = {"RECOVER_STRATEGY": "recover:1,pod:1,exit:1", "POD_RESCHEDULING": "on"}
    said = []
    for count, status in ((2, 137), (3, LevelsSpentError.exit_code), (4, LevelsSpentError.exit_code)):
        with kept(tmp_path, f"{COUNTS} kill -9 $$", **strategy) as keeper:
            text, _ = keeper.communicate(timeout=60)
        said.append(text)
        assert (keeper.returncode, starts(tmp_path)) == (status, count), text
    assert said[0] == (
        "samebits keep: scheduler: process level, attempt 1 of 1: started again in its place after SIGKILL\n"
        "samebits keep: scheduler: pod level, attempt 1 of 1, as 1 attempt at the process level failed: its container "
        "has to start again after SIGKILL\n"
    )
    assert "job level, attempt 1 of 1, as 1 attempt at the pod level failed: the whole job" in said[1]
    assert "no level is left: 1 attempt at the job level failed: given up (status 92)" in said[2]


def test_signal_is_passed_on_and_nothing_is_restarted(tmp_path: Path) -> None:
    waits = COUNTS + "trap 'sleep 0.2; exit 77' TERM; echo ready; while :; do sleep 0.05; done"
    with kept(tmp_path, waits) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline() == "ready\n"
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == 77
    assert starts(tmp_path) == 1


def test_stay_keeps_the_container_until_it_is_ended(tmp_path: Path) -> None:
    with kept(tmp_path, f"{COUNTS} exit 87", "--stay") as keeper:
        assert keeper.stdout is not None and "ended with status 87, not restarted" in keeper.stdout.readline()
        assert keeper.poll() is None
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == 0
    assert starts(tmp_path) == 1


def test_stay_applies_to_wrong_settings_too(tmp_path: Path) -> None:
    with kept(tmp_path, COUNTS, "--stay", RECOVER_STRATEGY="reboot") as keeper:
        assert keeper.stdout is not None
        assert "'reboot' is none of them" in keeper.stdout.readline()
        assert "ended with status 64" in keeper.stdout.readline()
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == 0


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("command", ["no-such-command", "/no/such", __file__, "/"])
def test_command_that_cannot_start_is_reported_once_and_not_retried(
    command: str, stays: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("samebits.commands.keep._stay", lambda status, _signals: status)
    assert main(["keep", *(["--stay"] if stays else []), command]) == UsageError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{command!r} cannot be started: " in line and "Fix: " in line


def test_program_that_vanished_counts_as_one_that_died(tmp_path: Path) -> None:
    program = tmp_path / "sh"
    program.write_text('#!/bin/sh\n/bin/rm "$0"; exit 3\n')
    program.chmod(0o755)
    with kept(tmp_path, "", RECOVER_STRATEGY="process:1", PATH=str(tmp_path)) as keeper:
        said, _ = keeper.communicate(timeout=60)
    assert keeper.returncode == LevelsSpentError.exit_code
    assert "sh: No such file or directory" in said and "1 attempt at the process level failed" in said


def test_foreign_note_is_refused(tmp_path: Path) -> None:
    (tmp_path / "probe.tried").symlink_to("/etc/passwd")
    with kept(tmp_path, COUNTS) as keeper:
        said, _ = keeper.communicate(timeout=60)
    assert keeper.returncode == 71, said
    assert not (tmp_path / "n").exists()


def test_missing_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keep"]) == 80
    assert "which command?" in capsys.readouterr().err
    assert os.environ.get("ROLE") is None
