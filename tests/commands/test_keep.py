"""``samebits keep``: its exit status for the container engine, and a message for each step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from samebits.__main__ import main
from samebits.commands.keep import LevelsSpentError
from samebits.errors import UsageError
from tests.system.processes import environment_of_tests, found_below, free_port

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
    assert "no command was given" in capsys.readouterr().err
    assert os.environ.get("ROLE") is None


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the keeper of one rank as torchrun does; at the end nothing of it may be left."""
    keepers: list[subprocess.Popen[str]] = []

    def start(script: str, *, below: Sequence[str] = (), **settings: str) -> subprocess.Popen[str]:
        words = [*below, sys.executable, "-P", "-m", "samebits", "keep", "--torchrun", "--", "/bin/sh", "-c", script]
        ours = {"ROLE": "worker", "WORKER_NUM": "1", "NODE_ID": "0", "ENABLE_RECOVERY": "1", "COUNT": "n"}
        ours |= {"SCHED_PORT": str(free_port()), "TORCHELASTIC_ERROR_FILE": "error.json"}
        ours |= {"PROBE_FILE": "recovery/probe", "LOG_DIR": "recovery"}
        keepers.append(
            subprocess.Popen(
                words,
                env=environment_of_tests() | ours | settings,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return keepers[-1]

    yield start
    for keeper in keepers:
        keeper.kill()
        keeper.communicate()
    deadline = time.monotonic() + 60
    while left := found_below(tmp_path):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def test_killed_rank_is_replaced_unseen_by_torchrun_and_its_own_status_is_torchruns(
    tmp_path: Path, rank: Callable[..., subprocess.Popen[str]]
) -> None:
    """The error file that torchrun reads holds the error of the last child, not of one that was replaced."""
    script = '[ -e error.json ] && exit 9; echo "$$" > error.json; [ $(wc -l < n) = 1 ] && kill -9 $$; exit 5'
    keeper = rank(COUNTS + script)
    said, _ = keeper.communicate(timeout=60)
    assert (keeper.returncode, starts(tmp_path)) == (5, 2), said
    assert "worker 0: process level, attempt 1 of 3: started again in its place after SIGKILL" in said
    assert (tmp_path / "error.json").exists()


def test_rank_that_is_killed_again_and_again_dies_of_the_same_signal(
    tmp_path: Path, rank: Callable[..., subprocess.Popen[str]]
) -> None:
    keeper = rank(COUNTS + "kill -ABRT $$", RECOVER_STRATEGY="process:1")
    said, _ = keeper.communicate(timeout=60)
    assert (keeper.returncode, starts(tmp_path)) == (-signal.SIGABRT, 2), said


def test_sigterm_of_torchrun_reaches_the_rank_once(rank: Callable[..., subprocess.Popen[str]]) -> None:
    keeper = rank("trap 'echo asked; n=1' TERM; echo ready; until [ $n ]; do sleep 0.05; done; sleep 0.2; exit 143")
    assert keeper.stdout is not None
    while keeper.stdout.readline() != "ready\n":
        pass
    os.killpg(keeper.pid, signal.SIGTERM)
    assert keeper.communicate(timeout=60) == ("asked\n", None)
    assert keeper.returncode == 143


def test_script_that_has_failed_keeps_its_status_when_torchrun_ends_it(
    rank: Callable[..., subprocess.Popen[str]],
) -> None:
    """Another rank's end, which only follows from the error, may be seen first."""
    keeper = rank("echo the error > error.json; echo ready; exec sleep 60")
    assert keeper.stdout is not None
    while keeper.stdout.readline() != "ready\n":
        pass
    keeper.send_signal(signal.SIGTERM)
    keeper.communicate(timeout=60)
    assert keeper.returncode == 1


def test_rank_ends_with_torchruns_agent(rank: Callable[..., subprocess.Popen[str]]) -> None:
    """The agent is the parent of the rank's session, even if a shell is between the two."""
    agent = rank("echo ready; exec sleep 60", below=(sys.executable, "-c", AGENT, "/bin/sh", "-c", '"$@"; true', "sh"))
    assert agent.stdout is not None
    while agent.stdout.readline() != "ready\n":
        pass
    agent.kill()


def test_rank_whose_agent_had_ended_before_does_not_train(
    tmp_path: Path, rank: Callable[..., subprocess.Popen[str]]
) -> None:
    """The rank's parent is then another process, so only the agent's store shows that the agent has ended."""
    store = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said, _ = rank(COUNTS, **store).communicate(timeout=60)
    assert "torchrun, which started this process, has exited" in said and not (tmp_path / "n").exists()


AGENT = "import subprocess, sys; subprocess.call(sys.argv[1:], start_new_session=True)"
