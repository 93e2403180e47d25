"""Two real schedulers on one folder whose lock was lost: the stopped one wakes up without effect."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from samebits import config
from samebits.config import Settings, fixed_settings
from samebits.core import records
from samebits.core.messages import PROTOCOL, Admitted, Process, Refused, Register, Status
from samebits.core.records import SeatGranted, TermStarted
from samebits.errors import SupersededError
from samebits.net.client import Client, Got, Up
from samebits.service import status
from samebits.store.journal import read_journal
from tests.service.house import PATIENCE_S, free_port

SESSION = "s" * 32
Answer = TypeVar("Answer")


@contextmanager
def scheduler(environ: Mapping[str, str], port: int) -> Iterator[subprocess.Popen[str]]:
    """Run a scheduler within the block."""
    command = [sys.executable, "-m", "samebits", "scheduler"]
    whole = {**os.environ, **environ, "SCHED_PORT": str(port)}
    process = subprocess.Popen(command, env=whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = iter(process.stdout.readline, "")
        assert any("listening on" in line for line in said)
        asking = connected(port)
        asking.send(status.question(follow=False))
        assert heard(asking, Status) is not None, "it does not serve"
        asking.close()
        yield process
    finally:
        process.kill()
        process.communicate()


def ask_for_a_seat(settings: Settings, port: int) -> Client:
    """Return a worker's connection whose Register has not been answered."""
    client, process = connected(port), Process("host", 1, 1, "cpu")
    client.send(Register(PROTOCOL, "", settings.job_name, "0", SESSION, 0, process, fixed_settings(settings)))
    return client


def connected(port: int) -> Client:
    client = Client("127.0.0.1", port, SESSION, 60.0)
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        client.wait(1.0)
        if any(isinstance(incoming, Up) for incoming in client.drain()):
            return client
    raise AssertionError(f"nobody answers on port {port}")


def heard(client: Client, kind: type[Answer]) -> Answer | None:
    """Return the next message of this kind, or None if the connection ends first."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        client.wait(1.0)
        for incoming in client.drain():
            if not isinstance(incoming, Got):
                return None
            assert not isinstance(incoming.message, Refused), incoming.message
            if isinstance(incoming.message, kind):
                return incoming.message
    raise AssertionError(f"no {kind.__name__} came")


def journaled(folder: Path) -> list[records.Record]:
    contents = read_journal(folder)
    assert contents is not None
    return [records.SCHEMA.unpack(payload) for payload in contents.payloads]


def test_scheduler_stopped_during_a_takeover_sends_nothing_and_leaves(tmp_path: Path) -> None:
    recovery, ports = tmp_path / "recovery", (free_port(), free_port())
    environ = {"WORKER_NUM": "1", "ENABLE_RECOVERY": "1", "RECOVERY_PATH": str(recovery), "LOG_DIR": str(tmp_path)}
    settings, _ = config.read({**environ, "ROLE": "scheduler"})
    with scheduler(environ, ports[0]) as old:
        old.send_signal(signal.SIGSTOP)
        (recovery / "lock").unlink()
        with scheduler(environ, ports[1]):
            old.send_signal(signal.SIGCONT)
            asking = ask_for_a_seat(settings, ports[0])
            assert heard(asking, Admitted) is None, "it got a seat that only the old scheduler knows of"
            asking.close()
            last_words = old.communicate(timeout=PATIENCE_S)[0]
            assert old.returncode == SupersededError.exit_code
            who = rf"scheduler on port {ports[1]} \(pid \d+ on .*\) has claimed term 2, so this scheduler, of term 1"
            assert re.search(who, last_words), last_words
            before = journaled(recovery)
            assert [type(record).__name__ for record in before] == ["JobCreated", "TermStarted", "TermStarted"]
            asking = ask_for_a_seat(settings, ports[1])
            answer = heard(asking, Admitted)
            asking.close()
            assert answer is not None
            assert (answer.term, answer.incarnation) == (2, 1)
            after = journaled(recovery)
            assert after[: len(before)] == before
            assert [record.node for record in after if isinstance(record, SeatGranted)] == ["0"]
            assert [record.term for record in after if isinstance(record, TermStarted)] == [1, 2]
    assert [entry.name for entry in recovery.iterdir() if entry.name.startswith("term.")] == ["term.2"]
