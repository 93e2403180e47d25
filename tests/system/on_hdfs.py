"""A job whose checkpoints lie in HDFS; run by ``python -m tests.hdfs``, which has one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from runtime.store.checkpoint import SHARED_MEMORY
from runtime.store.checkpoint.memory.memory_room import room_path
from tests.store.checkpoint.conftest import HDFS, Folder
from tests.store.checkpoint.remote.s3_server import step_of
from tests.system.job import Job
from tests.system.kill_list import GATE, GATED, MIDDLE, STEPS, TRAINED

pytestmark = pytest.mark.system


def points_in(folder: Folder, slot: int) -> list[int]:
    """The steps of the whole points of a slot, in order."""
    return sorted(step_of(name) for name in folder.names() if f"{slot}/step" in name and name.endswith(".msgpack"))


def test_a_job_killed_whole_goes_on_from_hdfs(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    folder = Folder(f"{os.environ[HDFS]}/{os.getpid()}/job")
    job = new_job(*TRAINED, *GATED, workers=2, settings={"CHECKPOINT_PATH": folder.url})
    job.start()
    job.open_gates(0)
    job.wait_for_step(MIDDLE)
    job.wait_until(lambda: min(max(points_in(folder, slot), default=0) for slot in job.ranks) or None, "point in HDFS")
    job.kill_everything()
    of_job = job.matches(0, r"seated: .*, job (\S+)")[0][1]
    shutil.rmtree(room_path(SHARED_MEMORY, of_job, 0).parent)  # as after the loss of the host
    held = min(points_in(folder, slot)[-1] for slot in job.ranks)
    job.open_gates(GATE)
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED, workers=2)
    (resumed,) = job.matches(0, r"generation 2: rank 0 of 2 goes on from step (\d+)")
    assert int(resumed[1]) >= held > 0
    assert not job.checkpoints.exists()
    assert [points_in(folder, slot)[-1] for slot in job.ranks] == [STEPS, STEPS]
