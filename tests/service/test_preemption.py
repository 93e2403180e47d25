"""Preemption notice: exit status 0 of the user's command, and nothing else, announces one."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

import pytest

from samebits.service.health.preemption import PreemptionLook
from tests.service.house import PATIENCE_S


def test_status_0_is_reported_once_and_no_other_status_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notice, asked = tmp_path / "a notice", tmp_path / "asked"
    told: list[str] = []
    heard = threading.Event()

    def take(text: str) -> None:
        told.append(text)
        heard.set()

    look = PreemptionLook(f"sh -c 'echo x >>{asked}; test -e \"{notice}\"'", take, every_s=0.01)
    look.start()
    for _ in range(int(PATIENCE_S * 100)):
        if asked.exists() and len(asked.read_text()) >= 6:
            break
        heard.wait(0.01)
    assert told == [] and len(asked.read_text()) >= 6, "it was asked three times and answered no"
    notice.touch()
    assert heard.wait(PATIENCE_S)
    assert told == ["this machine is about to be taken away (sh, PREEMPTION_COMMAND)"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("./there/is/none", "cannot be run: No such file or directory"),
        ("sh -c 'exit 127'", "ended with status 127"),
        ("sh -c 'kill -SEGV $$'", "was killed by signal 11"),
    ],
)
def test_command_that_cannot_run_is_not_a_notice_and_is_reported_once(
    command: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    look = PreemptionLook(command, lambda text: pytest.fail(text))
    assert [look._is_announced() for _ in range(3)] == [False] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and said in lines[0] and "Fix: " in lines[0]


@pytest.mark.parametrize(("then", "said"), [("wait", "has not ended after 1 s"), ("exit 1", "")])
def test_children_of_the_command_end_with_it(
    then: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A child holds the only write end of a fifo, so the fifo's end of file shows that the child has ended."""
    os.mkfifo(tmp_path / "held")
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    look = PreemptionLook(
        f"sh -c 'exec 3>\"{tmp_path}/held\"; echo x >&3; sleep 1000 & {then}'",
        pytest.fail,
        timeout_s=1.0 if said else PATIENCE_S,
    )
    assert not look._is_announced()
    assert os.read(reader, 10) == b"x\n", "it had started"
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000), "its child is still running"
    assert os.read(reader, 10) == b""
    assert said in "".join(record.getMessage() for record in caplog.records)
    assert len(caplog.records) == bool(said)
    os.close(reader)


def test_endless_output_costs_no_memory_and_ends_the_command(caplog: pytest.LogCaptureFixture) -> None:
    assert not PreemptionLook("cat /dev/zero", pytest.fail, timeout_s=0.2)._is_announced()
    assert "has not ended after 0.2 s" in caplog.records[0].getMessage()
