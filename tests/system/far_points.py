"""A job whose checkpoints are stored remotely, and whose host is lost with everything on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from samebits.store.checkpoint import SHARED_MEMORY
from samebits.store.checkpoint.memory_room import room_path
from tests.system.job import Job
from tests.system.kill_list import GATE, MIDDLE, STEPS, TRAINED


def goes_on_after_all_was_lost(
    job: Job, points_of: Callable[[int], Sequence[int]], undisturbed: Callable[..., str]
) -> None:
    """Start the job, kill everything once every slot has a point there, and check that it ends with the undisturbed
    bits.

    Args:
        job: a gated job of two workers, not started yet.
        points_of: the steps of a slot's complete points in the store, in order.
        undisturbed: as the fixture.
    """
    job.start()
    job.open_gates(0)
    job.wait_for_step(MIDDLE)
    job.wait_until(
        lambda: min(max(points_of(slot), default=0) for slot in job.ranks) or None, "point of every slot in the store"
    )
    job.kill_everything()
    of_job = job.matches(0, r"seated: .*, job (\S+)")[0][1]
    # as after the loss of the host: only the store has the points
    shutil.rmtree(room_path(SHARED_MEMORY, of_job, 0).parent)
    held = min(points_of(slot)[-1] for slot in job.ranks)
    job.open_gates(GATE)
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED, workers=2)
    (resumed,) = job.matches(0, r"generation 2: rank 0 of 2 continues from step (\d+)")
    assert int(resumed[1]) >= held > 0
    assert not job.checkpoints.exists()
    assert [points_of(slot)[-1] for slot in job.ranks] == [STEPS, STEPS]
