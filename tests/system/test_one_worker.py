"""Promise b: kill one worker, call ``recover.sh``; the default cool-down passes once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from samebits.store.process_identity import ProcessIdentity
from tests.system.job import PROBE, Job
from tests.system.kill_list import GATE, GATED, MIDDLE, TRAINED
from tests.system.on_host import HOST
from tests.system.scripted import SCHEDULER, ScriptJob

pytestmark = pytest.mark.system

COOL_DOWN_S = 30.0


def test_child_that_outlives_a_worker_does_not_hide_its_death(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    """The child's copies of the connections would keep them open for a lease of ten minutes.

    The worker is alone on its host, so no other process can see it die.
    """
    expected = undisturbed(*TRAINED)
    settings = {"NODE_TIMEOUT": "600", "TOPO_TIMEOUT": "600"}
    script = PROBE.with_name("on_host.py")
    job = new_job(*TRAINED, *GATED, "--fork-rank", "2", settings=settings, script=script)
    job.open_gates(0)
    job.start_scheduler()
    for rank in job.ranks:
        job.start_worker(rank, **({HOST: "elsewhere"} if rank == 2 else {}))
    child = ProcessIdentity.of(int(job.wait_for(2, r"^child (\d+)$")[1]))
    assert child is not None
    job.wait_for_step(MIDDLE)
    job.kill(2)
    job.wait_for(SCHEDULER, r"worker 2 \(pid .* is lost: its connection closed and ")
    assert child.is_alive()
    os.kill(child.pid, signal.SIGKILL)
    job.open_gates(GATE)
    job.start_worker(2, **{HOST: "elsewhere"})
    assert job.wait_finished() == expected


def test_killed_worker_waits_for_its_seat_and_resumes_with_the_same_bits(
    script_job: Callable[..., ScriptJob], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(*TRAINED, workers=2)
    job = script_job(*TRAINED, *GATED, workers=2, settings={"REGISTER_COOLDOWN": ""})
    job.open_gates(0)
    run = job.run()
    job.wait_for_step(MIDDLE)
    before = job.pids()
    killed_at = time.monotonic()
    job.kill(1)
    job.open_gates(GATE)
    recover = job.recover()

    first = job.wait_for(1, r"free again in (\d+\.\d) s \(REGISTER_COOLDOWN=30\)")
    assert float(first[1]) <= COOL_DOWN_S
    job.wait_for(1, r"seated: slot 1 of 2, start 2")
    assert time.monotonic() - killed_at >= COOL_DOWN_S - 0.1
    seconds = [int(match[1]) for match in job.matches(1, r"waiting for its seat: (\d+) s left")]
    assert seconds == sorted(set(seconds), reverse=True), "the seconds do not count down"
    assert len(seconds) >= 1
    assert seconds[0] < COOL_DOWN_S

    assert job.finished(run) == expected
    assert recover.wait() == 0
    after = job.pids()
    assert {name for name in before if after[name] != before[name]} == {1}
    assert [job.seatings(rank) for rank in job.ranks] == [1, 2]
    assert "worker 1 " in job.wait_said(run, "was killed by signal 9 (SIGKILL)")

    left_at = int(job.wait_for(0, r"left the generation at step (\d+)")[1])
    for rank in job.ranks:
        said = job.wait_for(rank, rf"generation 2: rank {rank} of 2 continues from step {left_at}\b")
        assert f"restore point: step {left_at} of generation 1, in the memory of rank 0; sent to rank 1" in said.string
