"""A scheduler in a thread of the job's only process: start, isolation, end and resumption."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samebits import config
from samebits.account.job_view import JobView
from samebits.config import Settings
from samebits.core import records
from samebits.core.messages import GenerationStarted, Holdings
from samebits.core.point import Point
from samebits.errors import ForeignFolderError, LockedError, StoreError
from samebits.net.client import Client, Got, ShutOut
from samebits.service.agent import Agent
from samebits.service.alone import SchedulerThread
from samebits.service.status import question, stop_request, stored_view
from samebits.store.journal import Journal
from tests.service.house import NUMERICS, final


def settings_in(folder: Path, **environ: str) -> Settings:
    told = config.alone({"RECOVERY_PATH": str(folder / "recovery"), "CHECKPOINT_PATH": str(folder / "ckpt"), **environ})
    assert told is not None
    return config.read(told)[0]


def trained(scheduler: SchedulerThread, *, to_the_end: bool) -> GenerationStarted:
    """Run the only worker of a job, to its last step or until it is interrupted."""
    agent = Agent(scheduler.settings, "test", "cpu")
    admitted = agent.register()
    assert (admitted.slot, admitted.world_size) == (0, 1)
    place = agent.enter(Holdings((), False, NUMERICS))
    assert isinstance(place, GenerationStarted)
    agent.publish(place.generation, b"address")
    list(agent.address_map(place.generation))
    agent.trains(place.generation)
    if to_the_end:
        assert agent.complete(place.generation, 7, [final(7, place.generation)]) == Point(7, place.generation)
    agent.leave(on_purpose=to_the_end, text="status 0" if to_the_end else "KeyboardInterrupt")
    scheduler.close(is_over=to_the_end)
    return place


def stored(folder: Path) -> JobView:
    view = stored_view(folder / "recovery")
    assert view is not None
    return view


def test_single_process_job_ends_resumes_after_an_interruption_and_is_succeeded(tmp_path: Path) -> None:
    assert trained(SchedulerThread(settings_in(tmp_path)), to_the_end=False).generation == 1
    first = stored(tmp_path)
    assert not first.job_finished
    assert trained(SchedulerThread(settings_in(tmp_path)), to_the_end=True).generation == 2
    assert stored(tmp_path).job == first.job
    assert stored(tmp_path).job_finished
    (tmp_path / "ckpt").mkdir()
    assert trained(SchedulerThread(settings_in(tmp_path)), to_the_end=True).generation == 1
    assert stored(tmp_path).job != first.job
    short = first.job.partition("-")[0]
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "recovery",
        f"recovery.{short}.aside",
        f"ckpt.{short}.aside",
    }


def test_only_one_process_at_a_time_and_no_other_job(tmp_path: Path) -> None:
    scheduler = SchedulerThread(settings_in(tmp_path))
    with pytest.raises(LockedError):
        SchedulerThread(settings_in(tmp_path))
    scheduler.close(is_over=False)
    with Journal.open(tmp_path / "other")[0] as journal:
        journal.append([records.SCHEMA.pack(records.JobCreated("job", "train.py", (("WORKER_NUM", "4"),)))])
    with pytest.raises(ForeignFolderError, match="WORKER_NUM is 1 here and 4 there"):
        SchedulerThread(settings_in(tmp_path, RECOVERY_PATH=str(tmp_path / "other")))


def test_points_in_an_object_store_are_not_moved(tmp_path: Path) -> None:
    trained(SchedulerThread(settings_in(tmp_path)), to_the_end=True)
    with pytest.raises(StoreError, match=r"CHECKPOINT_PATH=s3://bucket/x belongs to job .* Fix: "):
        SchedulerThread(settings_in(tmp_path, CHECKPOINT_PATH="s3://bucket/x"))
    assert stored(tmp_path).job_finished, "and nothing was moved"


def test_stranger_on_this_host_is_ignored(tmp_path: Path) -> None:
    scheduler = SchedulerThread(settings_in(tmp_path))
    settings = scheduler.settings
    stranger = Client(settings.sched_host, settings.sched_port, "follower-x", settings.node_timeout_s, keys=None)
    heard: list[object] = []
    try:
        stranger.send(question(follow=False))
        stranger.send(stop_request("a stranger"))
        while not any(isinstance(one, ShutOut) for one in heard):
            stranger.wait(5.0)
            heard += stranger.drain()
    finally:
        stranger.close()
    assert not any(isinstance(one, Got) for one in heard)
    trained(scheduler, to_the_end=True)
    assert stored(tmp_path).job_finished


def test_forked_child_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    scheduler = SchedulerThread(settings_in(tmp_path))
    waits, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    os.close(waits)
    try:
        scheduler.close(is_over=False)
        SchedulerThread(settings_in(tmp_path)).close(is_over=False)
    finally:
        os.close(ends)
        os.waitpid(child, 0)
