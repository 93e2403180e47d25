"""What a look at a job measures, and what is asked for wrongly."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.errors import UsageError
from runtime.ops.autoscaling import Meter, main, pids_here
from runtime.store.process_identity import ProcessIdentity, write_pid_file
from tests.ops.views import view, worker

HERE = [os.getpid()]


def test_speed_is_steps_times_workers_and_a_share_is_of_a_core() -> None:
    meter = Meter(None)
    first = meter.read(view(), HERE, 100.0, None)
    assert (first.workers, first.cpu, first.speed, first.room) == (3, None, None, None)
    second = meter.read(replace(view(), step=17), HERE, 105.0, 4)
    assert (second.speed, second.room) == (6.0, 4)
    assert second.cpu is not None and 0 <= second.cpu <= 1


def test_a_new_generation_begins_a_new_measurement() -> None:
    meter = Meter(None)
    meter.read(view(), HERE, 100.0, None)
    assert meter.read(replace(view(), step=9, generation=2), HERE, 105.0, None).speed is None
    assert meter.read(replace(view(), step=11, generation=2), [], 106.0, None).cpu is None


def test_the_cpu_of_what_holds_a_worker_elsewhere_is_not_the_workers(tmp_path: Path) -> None:
    me = ProcessIdentity.current()
    for node in (0, 1):
        write_pid_file(tmp_path / f"worker_{node}.pid", me)
    seen = replace(view(), workers=(replace(worker(0), identity=me), worker(1), worker(2)))
    assert pids_here(tmp_path, seen) == [me.pid]


@pytest.mark.parametrize(
    ("text", "waits"), [("12\n", 12.0), ("0", 0.0), ("", None), ("x", None), ("-1", None), ("inf", None)]
)
def test_a_queue_is_one_number_in_a_file(tmp_path: Path, text: str, waits: float | None) -> None:
    (tmp_path / "queue").write_text(text)
    assert Meter(tmp_path / "queue").read(view(), [], 1.0, None).queue == waits
    assert Meter(tmp_path / "missing").read(view(), [], 1.0, None).queue is None


@pytest.mark.parametrize(
    "words", [["--every", "0"], ["--every", "nan"], ["--queue-per-worker", "3"], ["--queue-file", "q"]]
)
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="Fix: "):
        main(words)
