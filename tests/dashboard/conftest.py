"""The folder of a job that has ended: a journal, events with two recoveries, logs. No process runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from samebits import config
from samebits.account.event_log import line_of
from samebits.account.events import EventKind, JobEvent
from samebits.config import Settings
from samebits.core import records
from samebits.core.messages import Process, RoundId
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted, JobCreated, PointCommitted, Record, SeatGranted, TermStarted
from samebits.store.journal import Journal
from samebits.store.text_log import EventLog

ROOT = Path(__file__).resolve().parents[2]
BEGAN = 1_700_000_000.0


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the environment of a dashboard for this folder."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "WORKER_NUM": str(settings.worker_num),
        "ENABLE_RECOVERY": "1",
        "RECOVERY_PATH": str(settings.recovery_path),
        "LOG_DIR": str(settings.log_dir),
        "SCHED_PORT": str(settings.sched_port),
    }


def told(kind: EventKind, after_s: float, step: int = 0, node: str = "", text: str = "", **more: object) -> JobEvent:
    return JobEvent(kind, BEGAN + after_s, 1, 1, step, node, text, more)


def events_of_a_job(workers: int = 2) -> list[JobEvent]:
    """Events of a job that forms, trains 100 steps a second, and loses worker 1 after 10 and 20 s."""
    events = [
        told(EventKind.JOB, 0, text="train.py", job="job-1", settings={"WORKER_NUM": str(workers)}),
        told(EventKind.SCHEDULER, 0, text="the scheduler starts", job="job-1"),
        *(told(EventKind.SEATED, 2, node=str(node), slot=node) for node in range(workers)),
        told(EventKind.ROUND, 2, text="all are registered", round="1.1", missing="", gently=False),
        told(EventKind.GENERATION, 3, members=workers, restore=None, last="0", after_ms=1000.0),
        told(EventKind.TRAINING, 4, text="every member trains", last="1", after_ms=2000.0),
    ]
    for second in range(1, 30):
        events.append(told(EventKind.STEP, 4 + second, 100 * second))
        if second % 10 == 0:
            at, step = 4 + second, 100 * second
            events += [
                told(EventKind.LOST, at, step, node="1", text="its <process> ended", slot=1, silent_ms=2.0),
                told(
                    EventKind.ROUND, at + 0.001, step, text="worker 1 is lost", round="1.2", missing="1", gently=False
                ),
                told(EventKind.PROMOTED, at + 0.002, step, node="2", text="the spare takes a slot", slot=1),
                told(EventKind.GENERATION, at + 0.02, step, restore=step, members=workers, last="2", after_ms=20.0),
                told(EventKind.TRAINING, at + 0.05, step, last="0", after_ms=50.0),
                told(EventKind.COMMITTED, at + 0.1, step, point=step),
            ]
    return events


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Settings]:
    """Return a factory that fills a folder and returns its settings."""

    def make(
        workers: int = 2,
        *,
        port: int = 1,
        first: str = "0",
        name: str = "train.py",
        host: str = "host-a",
        process: Process | None = None,
        **more: str,
    ) -> Settings:
        recovery, logs = tmp_path / "recovery", tmp_path / "device"
        for folder in (recovery, logs):
            folder.mkdir(mode=0o700, exist_ok=True)
        process = process or Process(f"{host}#1", 4000, 1, "cpu")
        nodes = [first, *map(str, range(1, workers))]
        seats = [SeatGranted(node, slot, 1, f"s{slot}", process) for slot, node in enumerate(nodes)]
        members = tuple((node, 1) for node in nodes)
        written: list[Record] = [
            JobCreated("job-1", name, (("WORKER_NUM", str(workers)),)),
            TermStarted(1, "boot-1", 100.0),
            *seats,
            GenerationCommitted(1, RoundId(1, 1), members, None, (), (), tuple(range(workers))),
            PointCommitted(Point(2000, 1)),
        ]
        journal, _ = Journal.open(recovery)
        journal.append([records.SCHEMA.pack(record) for record in written])
        journal.close()
        log = EventLog(recovery, lambda lines: lines[0], pytest.fail)
        log.append([line_of(event) for event in events_of_a_job(workers)])
        log.close()
        lines = "".join(f"epoch 1 step {step} loss {2 / step:.4f}\n" for step in range(20, 2900, 20))
        (logs / "worker_0.log").write_text(f"{lines}</script><script>alert(1)</script>\n")
        environ = {
            "WORKER_NUM": str(workers),
            "ENABLE_RECOVERY": "1",
            "RECOVERY_PATH": str(recovery),
            "LOG_DIR": str(logs),
            "SCHED_PORT": str(port),
            **more,
        }
        settings, _ = config.read(environ, role_required=False)
        return replace(settings)

    return make
