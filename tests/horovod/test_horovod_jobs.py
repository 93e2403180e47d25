"""Jobs of scripts with Horovod's calls whose workers are killed: they end with the undisturbed bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

ELASTIC = Path(__file__).with_name("elastic_script.py")
CUSTOM = Path(__file__).with_name("custom_state_script.py")

GATES = {ELASTIC: 2, CUSTOM: 45}
"""Before this epoch, after this step."""

Jobs = Callable[..., Job]


def undisturbed(new_job: Jobs, script: Path, *args: str) -> str:
    job = new_job(*args, "--pause-ms", "0", script=script, workers=3)
    job.start()
    return job.wait_finished()


def killed(new_job: Jobs, script: Path, args: Sequence[str], kills: Sequence[tuple[int, str]]) -> Job:
    """Kill ranks, each after it has printed such a line, and restart them, at the latest before the gate."""
    gate = GATES[script]
    job = new_job(*args, "--gate", str(gate), script=script, workers=3)
    job.start()
    for number, (rank, line) in enumerate(kills, start=1):
        job.wait_for(rank, line)
        job.kill(rank)
        if number == len(kills):
            job.open_gates(gate)
        job.start_worker(rank)
    return job


@pytest.mark.parametrize(
    "more",
    [
        ("--batches-per-commit", "5"),
        pytest.param((), marks=pytest.mark.thorough),
        pytest.param(("--fp16-allreduce",), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_elastic_example_with_a_sampler_ends_with_the_undisturbed_bits(new_job: Jobs, more: Sequence[str]) -> None:
    expected = undisturbed(new_job, ELASTIC, *more)
    job = killed(new_job, ELASTIC, more, [(1, "epoch 0 batch 7 "), (0, "epoch 1 batch 3 ")])
    assert job.wait_finished() == expected
    survivors_resets = job.matches(2, "reset to 3 workers")
    assert len(survivors_resets) == 2


def test_elastic_guides_loop_survives_a_kill(new_job: Jobs) -> None:
    """The guide's counter names the committed batch, so by the loop's own rule that batch is repeated."""
    job = killed(new_job, ELASTIC, ("--loop", "counter"), [(2, "epoch 1 batch 4 ")])
    job.wait_finished()
    said = [match[1] for match in job.matches(0, r"(epoch \d+ batch \d+) ")]
    assert len(set(said)) == 39 and 39 <= len(said) <= 41
    assert job.matches(0, r"elastic_script\.py:\d+: state\.batch is the loop's own variable")


def test_users_own_state_resumes_from_memory_whichever_rank_is_lost(new_job: Jobs) -> None:
    expected = undisturbed(new_job, CUSTOM)
    job = killed(new_job, CUSTOM, (), [(0, "step 10 of 3"), (2, "step 30 of 3")])
    assert job.wait_finished() == expected
    said = [int(match[1]) for match in job.matches(1, r"step (\d+) of 3")]
    assert said == sorted(set(said)), "a step was repeated"
    unsaid = set(range(1, 61)) - set(said)  # it was committed, and the loss came between that and the line
    assert len(unsaid) <= 2, "a step was lost"


def test_example_runs_unchanged_to_the_same_bits_with_recovery_off(new_job: Jobs) -> None:
    expected = undisturbed(new_job, ELASTIC)
    job = new_job("--pause-ms", "0", script=ELASTIC, workers=3, settings={"ENABLE_RECOVERY": "0"})
    job.start()
    statuses = job.wait_ended()
    assert set(statuses.values()) == {0}
    assert job.sha256() == expected
