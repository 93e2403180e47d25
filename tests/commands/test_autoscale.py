"""``samebits autoscale``: what it measures, and invalid arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from samebits.account.job_view import JobView, PresenceState
from samebits.commands.autoscale import Meter, main, room_for
from samebits.errors import UsageError
from samebits.launcher.job_spec import JobSpec
from tests.launcher.views import view, worker


def measuring(*figures: dict[str, float], **changes: object) -> JobView:
    """Return a view in which the workers report these figures."""
    workers = tuple(replace(worker(slot), figures=found) for slot, found in enumerate(figures))
    return replace(view(), workers=workers, **changes)  # type: ignore[arg-type]


def test_speed_is_steps_times_workers() -> None:
    meter = Meter(None)
    first = meter.read(view(), 100.0, None)
    assert (first.workers, first.cpu, first.speed, first.room) == (3, None, None, None)
    second = meter.read(replace(view(), step=17), 105.0, 4)
    assert (second.speed, second.room) == (6.0, 4)


def test_without_a_queue_steps_do_not_measure_work() -> None:
    meter = Meter(None)
    meter.read(measuring({"queue": 5.0}), 100.0, None)
    assert meter.read(measuring({"queue": 5.0}, step=17), 105.0, None).speed == 6.0
    assert meter.read(measuring({"queue": 0.0}, step=27), 110.0, None).speed is None


def test_new_generation_starts_a_new_measurement() -> None:
    meter = Meter(None)
    meter.read(view(), 100.0, None)
    assert meter.read(replace(view(), step=9, generation=2), 105.0, None).speed is None


def test_cpu_and_memory_are_means_over_the_reporting_workers() -> None:
    seen = measuring({"cpu": 0.25, "memory": 0.5}, {"cpu": 0.75}, {})
    reading = Meter(None).read(seen, 1.0, None)
    assert (reading.cpu, reading.memory) == (0.5, 0.5)
    assert Meter(None).read(measuring({"cpu": 7.5}), 1.0, None).cpu == 1.0, (
        "several busy cores are at most the full share"
    )


def test_queue_is_that_of_the_lowest_reporting_slot() -> None:
    assert Meter(None).read(measuring({"cpu": 1.0}, {"queue": 12.0}, {"queue": 70.0}), 1.0, None).queue == 12.0
    lost = measuring({"queue": 12.0}, {"queue": 70.0})
    gone = (replace(lost.workers[0], presence=PresenceState.LOST), lost.workers[1])
    assert Meter(None).read(replace(lost, workers=gone), 1.0, None).queue == 70.0
    assert Meter(None).read(measuring({"queue": -1.0}), 1.0, None).queue == 0.0
    assert Meter(None).read(view(), 1.0, None).queue is None


@pytest.mark.parametrize(
    ("answer", "drained", "launch", "devices", "room"),
    [
        ("localhost:2 b:3", (), "ssh {host} {command}", 0, 5),
        ("localhost:2 b:3", ("b",), "ssh {host} {command}", 0, 2),
        ("localhost:2 b:3", (), None, 8, 2),
        ("", (), None, 8, None),
        (None, (), None, 8, 8),
        (None, (), None, 0, None),
    ],
)
def test_capacity_comes_from_hosts_or_else_local_accelerators(
    tmp_path: Path, answer: str | None, drained: tuple[str, ...], launch: str | None, devices: int, room: int | None
) -> None:
    environment = {"WORKER_NUM": "2"}
    if answer is not None:
        environment["HOST_DISCOVERY_SCRIPT"] = f"printf '%s\\n' {answer}" if answer else "false"
    if launch is not None:
        environment["HOST_LAUNCH"] = launch
    kept = JobSpec(tmp_path, sys.executable, "train.py", (), environment, drained=drained)
    assert room_for(kept, kept.settings(), devices) == room


@pytest.mark.parametrize(
    ("text", "waits"), [("12\n", 12.0), ("0", 0.0), ("", None), ("x", None), ("-1", None), ("inf", None)]
)
def test_queue_file_holds_one_number(tmp_path: Path, text: str, waits: float | None) -> None:
    (tmp_path / "queue").write_text(text)
    assert Meter(tmp_path / "queue").read(view(), 1.0, None).queue == waits
    assert Meter(tmp_path / "missing").read(view(), 1.0, None).queue is None


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="Fix: "):
        main(["--queue-file", "q"])
