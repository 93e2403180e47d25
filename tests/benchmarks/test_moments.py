"""Events from several processes in real FIFOs, one of which is killed while it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.moments import CHANNEL, WHO, Channel, Notebook, before_and_after

WRITER = """
from benchmarks.moments import Notebook
notebook = Notebook.from_environment()
notebook.note("starts")
step = 0
while True:
    step += 1
    notebook.note("stepped", step)
"""


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    channel = Channel(tmp_path / "moments", watch=lambda: None)
    yield channel
    channel.close()


def test_events_arrive_in_the_order_of_their_writer(channel: Channel) -> None:
    notebook = Notebook(channel.path, "worker_3")
    for step in (1, 2, 3):
        notebook.note("stepped", step)
    notebook.note("ends")
    channel.drain()
    assert [(one.name, one.step) for one in channel.moments] == [
        *(("stepped", 1), ("stepped", 2), ("stepped", 3), ("ends", None)),
    ]
    assert {(one.who, one.pid) for one in channel.moments} == {("worker_3", os.getpid())}
    assert [one.at_s for one in channel.moments] == sorted(one.at_s for one in channel.moments)
    assert channel.reached == {os.getpid(): 3}


def test_events_are_selected_by_name_time_and_process(channel: Channel) -> None:
    notebook = Notebook(channel.path, "worker_0")
    for name in ("asks", "seated", "asks"):
        notebook.note(name)
    channel.drain()
    first, _, last = channel.moments
    assert channel.select("asks") == [first, last]
    assert channel.select("asks", since_s=first.at_s) == [last]
    assert channel.select("asks", pids=frozenset({os.getpid() + 1})) == []


def test_kill_9_tears_no_line(channel: Channel, repository: Path) -> None:
    environment = {**os.environ, CHANNEL: str(channel.path), "PYTHONPATH": str(repository)}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER], env={**environment, WHO: f"worker_{number}"})
        for number in range(3)
    ]
    try:
        pids = {writer.pid for writer in writers}
        channel.wait_for(lambda: channel.reached.keys() >= pids, 30, "writing")
    finally:
        for writer in writers:
            writer.kill()
        for writer in writers:
            writer.wait()
    channel.drain()
    for writer in writers:
        steps = [one.step for one in channel.select("stepped", pids=frozenset({writer.pid}))]
        assert steps == [*range(1, len(steps) + 1)]


def test_waiting_ends(channel: Channel) -> None:
    with pytest.raises(TimeoutError, match="the end did not happen within 0 s"):
        channel.wait_for(lambda: False, 0, "the end")


def test_waiting_is_watched(tmp_path: Path) -> None:
    def watch() -> None:
        raise ChildProcessError("worker_1 ended")

    channel = Channel(tmp_path / "moments", watch)
    try:
        with pytest.raises(ChildProcessError, match="worker_1 ended"):
            channel.wait_for(lambda: False, 30, "anything")
    finally:
        channel.close()


def test_probed_method_still_does_its_work() -> None:
    heard: list[tuple[object, ...]] = []

    class Agent:
        def register(self, seat: int) -> int:
            heard.append(("register", seat))
            if seat < 0:
                raise ValueError(seat)
            return seat + 1

    before_and_after(
        Agent, "register", lambda _, *a: heard.append(("asks", *a)), lambda _, *a: heard.append(("has", *a))
    )
    assert Agent().register(6) == 7
    with pytest.raises(ValueError, match="-1"):
        Agent().register(-1)
    assert heard == [("asks", 6), ("register", 6), ("has", 6), ("asks", -1), ("register", -1)]


def test_missing_method_cannot_be_probed() -> None:
    class Agent:
        """Lacks the method."""

    with pytest.raises(AttributeError, match="register"):
        before_and_after(Agent, "register", lambda: None, lambda: None)
