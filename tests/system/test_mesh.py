"""Meshes of 2 x 2 and more: a killed rank's part comes from its replica's memory, and no bit changes."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import NumericsError
from tests.system.elastic_job import ElasticJob
from tests.system.job import WAIT_S, Job, JobFolder
from tests.system.kill_list import replace
from tests.system.processes import WarmStarter

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("sharded_script.py")
TRAINED = ("--mesh", "2", "2", "--steps", "20", "--interval", "5")
KILLS = ("3:backward:5", "1:stepped:8", "0:committed:11", "3:reduced:14", "1:function_returned")


def words(kills: tuple[str, ...], marks: Path) -> list[str]:
    marks.mkdir()
    return [*TRAINED, *(word for kill in kills for word in ("--kill", kill)), "--marks", str(marks)]


@pytest.fixture
def expected(new_job: Callable[..., Job]) -> str:
    """What torch alone makes of it."""
    alone = new_job(*TRAINED, script=SCRIPT, settings={"ENABLE_RECOVERY": "0"})
    alone.start()
    return alone.wait_finished()


def goes_back(job: Job) -> list[re.Match[str]]:
    return [found for rank in job.ranks for found in job.matches(rank, r"goes back from step (\d+) to step (\d+)")]


def test_kills_change_no_bit_and_redo_a_step_only_if_a_shard_is_lost_with_its_replica(
    new_job: Callable[..., Job], tmp_path: Path, expected: str
) -> None:
    # At step 14 rank 3 dies with its gradients reduced, as rank 1's are, while those of shard 0 are not (Held).
    one = new_job(*words(KILLS, tmp_path / "one"), "--hold", "14", script=SCRIPT)
    replace(*(int(kill[0]) for kill in KILLS))(one)
    assert one.wait_finished() == expected
    assert not goes_back(one), one.tails()

    several = ("2:backward:4", "3:backward:4", "1:backward:13", "3:backward:13")
    off = {"SHARD_COPY_EVERY": "off"}
    two = new_job(*words(several, tmp_path / "two"), script=SCRIPT, settings=off)
    replace(2, 3, 1, 3)(two)
    assert two.wait_finished() == expected
    assert two.matches(
        "scheduler", r"generation 2 starts .* step 3 of generation 1, in the memory of ranks 0 and 1; sent to"
    )
    assert two.matches("scheduler", r"step 12 is not held by all, and no other rank holds the shard of ranks 1 and 3")
    assert {(int(found[1]), int(found[2]) in (0, 5, 10)) for found in goes_back(two)} == {(12, True)}


def test_a_kill_that_leaves_the_shards_at_different_steps_costs_one_step(
    new_job: Callable[..., Job], tmp_path: Path, expected: str
) -> None:
    """Shard 1 has taken step 9 and shard 0 has not, so no memory holds all of any step."""
    held = new_job(
        *(*words(("3:stepped:9",), tmp_path / "held"), "--hold-step", "9"),
        script=SCRIPT,
        settings={"SHARD_COPY_EVERY": "1"},
    )
    replace(3)(held)
    assert held.wait_finished() == expected
    assert held.matches(
        "scheduler",
        "step 8 of generation 1, in the memory of ranks 0 and 2, in the shared-memory copy of ranks 1 and 3",
    )
    assert [(found[1], found[2]) for found in goes_back(held)] in ([], [("9", "8")])  # rank 1 may have committed it


@pytest.mark.parametrize(
    ("at", "seen", "to"),
    [
        ("8:gradient", "after step 10", 5),
        ("18:gradient", "at the end, step 20|after step 20", 15),
        ("7:moment", "after step 10", 5),
        ("7:nan", "after step 7", 5),  # before the next step turns all weights into NaN
    ],
)
def test_flip_that_a_replicas_shard_does_not_have_is_found_and_changes_no_bit(
    new_job: Callable[..., Job], expected: str, at: str, seen: str, to: int
) -> None:
    """The optimizer applies a flipped gradient of rank 3, so only the comparison with rank 1's shard can show it."""
    job = new_job(*TRAINED, "--flip", f"3:{at}", script=SCRIPT, settings={"REGISTER_COOLDOWN": "0"})
    job.start()
    assert job.wait_finished() == expected
    (said,) = job.matches(
        "scheduler", r"rank 1 differs from rank 3 (.*), first in (.*), since .*all ranks roll back to step (\d+)"
    )
    assert re.search(seen, said[1]) and "second.weight" in said[2] and int(said[3]) == to, said.string


def test_rank_held_while_the_groups_form_is_named_and_a_new_generation_forms(
    new_job: Callable[..., Job], tmp_path: Path, expected: str
) -> None:
    held = new_job(
        *(*words(("3:backward:5",), tmp_path / "held"), "--hold-forming", "2:2"),
        script=SCRIPT,
        settings={"HANG": "end:2", "HEARTBEAT_INTERVAL": "0.2", "REGISTER_COOLDOWN": "0"},
    )
    replace(3)(held)
    place = r"sharded_script\.py:\d+ \(dist\.barrier\)"
    others = r"workers 0, 1 and 3 wait for it in \w+ #\d+"
    held.wait_for("scheduler", rf"no step for \d+ s: worker 2 still forms the generation's group at {place}, {others}")
    assert held.wait_finished() == expected
    assert held.matches("scheduler", "generation 3 starts .* step 4 of generation 1, in (every rank's|the) memory")
    assert not goes_back(held), held.tails()


def test_everything_killed_goes_on_from_the_disks_also_if_a_rank_has_lost_its_own(
    new_job: Callable[..., Job], tmp_path: Path, expected: str
) -> None:
    kills = tuple(f"{rank}:committed:12" for rank in range(4))
    job = new_job(*words(kills, tmp_path / "all"), script=SCRIPT)
    job.start()
    for rank in job.ranks:
        job.wait_killed(rank)
    job.scheduler.signal(signal.SIGKILL)
    job.scheduler.wait(WAIT_S)
    job.wait_for_writers()
    job.forget_memory()
    for point in (job.checkpoints / "2").glob("step_*10_*"):
        shutil.rmtree(point)
    job.start()
    assert job.wait_finished() == expected
    assert job.matches("scheduler", r"restore point: step 10 of generation 1, held by ranks 0, 1 and 3; sent to rank 2")


def test_a_job_resumed_with_another_mesh_is_refused_with_both(new_job: Callable[..., Job], tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    kills = ("0:committed:3", "1:committed:3")
    trained = ("--steps", "6", "--interval", "2", "--marks", str(marks))
    words = [*trained, *(word for kill in kills for word in ("--kill", kill))]
    job = new_job("--mesh", "2", *words, script=SCRIPT, workers=2)
    job.start()
    for rank in job.ranks:
        job.wait_killed(rank)
    job.scheduler.signal(signal.SIGKILL)
    job.scheduler.wait(WAIT_S)
    job.use_arguments("--mesh", "2", "1", *words)
    job.start()
    for rank in job.ranks:
        job.wait_for(
            rank, r"different bits than the job: .*mesh 0 is 2 x 1 \(dp_replicate, dp_shard\) here and 2 \(dp_shard\)"
        )
    assert any(job.wait_ended().values())


def test_a_mesh_that_differs_from_rank_to_rank_is_refused_with_both(new_job: Callable[..., Job]) -> None:
    job = new_job("--mesh", "2", "1", "--steps", "2", script=SCRIPT, workers=2)
    job.start_scheduler()
    job.start_worker(0)
    job.use_arguments("--mesh", "2", "--steps", "2")
    job.start_worker(1)
    both = r"mesh 0 is 2 \(dp_shard\) here and 2 x 1 \(dp_replicate, dp_shard\)"
    job.wait_for("scheduler", f"worker 1 would compute different bits than rank 0: .*{both}")
    assert job.worker(1).wait(WAIT_S) == NumericsError.exit_code
    job.stop()


EXAMPLE = Path(__file__).with_name("mesh_script.py")  # examples/mesh/train.py
SMALL = ("--steps", "10", "--interval", "4", "--dim", "32", "--length", "32", "--batch-size", "4")


def undisturbed(new_job: Callable[..., Job], mesh: tuple[str, ...], workers: int = 4) -> str:
    alone = new_job(*SMALL, *mesh, script=EXAMPLE, workers=workers, settings={"ENABLE_RECOVERY": "0"})
    alone.start()
    return alone.wait_finished()


def killed(new_job: Callable[..., Job], mesh: tuple[str, ...], kills: tuple[str, ...], marks: Path, *more: int) -> Job:
    marks.mkdir()
    options = [word for kill in kills for word in ("--kill", kill)]
    job = new_job(*SMALL, *mesh, *options, "--marks", str(marks), script=EXAMPLE, workers=max([4, *more]))
    replace(*(int(kill[0]) for kill in kills))(job)
    return job


def test_spare_that_was_not_needed_holds_no_shard_and_ends_well(
    tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]
) -> None:
    """Its model is still on the meta device, so it could not load a final state."""
    words = (*SMALL, "--dp-replicate", "2", "--dp-shard", "2")
    job = ElasticJob(tmp_path, warm, script=EXAMPLE, args=words, workers=4, spares=1)
    watched(job)
    job.start()
    job.finish()
    assert job.matches(4, "this spare was not needed")


@pytest.fixture
def elastic(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Callable[..., ElasticJob]:
    """Return a factory of jobs of 2 x 2 ranks that continue at once without a shard group that lacks a rank."""

    def make(*args: str, script: Path = SCRIPT) -> ElasticJob:
        settings = {"MIN_WORKER_NUM": "2", "GRACE": "shrink=0", "REGISTER_COOLDOWN": "0.5"}
        job = ElasticJob(tmp_path, warm, script=script, args=(*args, "--marks", str(tmp_path)), settings=settings)
        watched(job)
        return job

    return make


def require_no_step_twice(job: ElasticJob, *nodes: int) -> None:
    """Check that no commit was undone. A commit at which a generation is left is not printed."""
    for node in nodes:
        steps = [int(found[1]) for found in job.matches(node, r"^epoch \d+ step (\d+) loss")]
        assert steps == sorted(set(steps)), (node, steps)
    assert not goes_back(job), job.tails()


@pytest.mark.parametrize("lost", [3, 0])
def test_a_shard_group_leaves_with_a_lost_rank_and_returns_with_its_replacement(
    lost: int, elastic: Callable[..., ElasticJob]
) -> None:
    stay, beside = ((0, 1), 2) if lost == 3 else ((2, 3), 1)
    job = elastic("--mesh", "2", "2", "--steps", "20", "--gate", "12", "--kill", f"{lost}:committed:6")
    job.start()
    job.wait_died(lost)
    job.wait_for(
        "scheduler", f"the world continues without worker {lost}: 2 are left; worker {beside} waits for the shard group"
    )
    for rank, node in enumerate(stay):
        job.wait_for(node, rf"generation 2: rank {rank} of 2 continues from step 6")
        job.wait_for_step(11, node)
    job.start_worker(lost)
    for node in stay:
        job.wait_for(node, "leaves its generation at its next commit")
    (job.folder / "gate").touch()
    job.wait_for("scheduler", r"generation 3 starts with 4 .*, in the memory of ranks \d and \d; sent to ranks")
    job.finish()
    for node in (*stay, beside):
        assert job.matches(node, rf"generation 3: rank {node} of 4 continues from step 1\d")
    assert job.seated_once(*stay, beside)
    require_no_step_twice(job, *stay, beside)


def test_training_ends_without_a_shard_group_that_lacks_a_rank(elastic: Callable[..., ElasticJob]) -> None:
    job = elastic("--mesh", "2", "2", "--steps", "12", "--kill", "1:backward:6")
    job.start()
    job.wait_died(1)
    job.finish()
    assert job.matches(2, "generation 2: rank 0 of 2 continues from step 5") and job.seated_once(0, 2, 3)
    require_no_step_twice(job, 0, 2, 3)
    assert job.matches(0, "training has finished without this worker, whose shard group was incomplete")


def test_example_with_a_global_batch_has_the_same_bits_without_a_shard_group(
    new_job: Callable[..., Job], elastic: Callable[..., ElasticJob]
) -> None:
    words = (*SMALL, "--dp-replicate", "2", "--dp-shard", "2", "--global-batch", "32")
    alone = new_job(*words, script=EXAMPLE, workers=4)
    alone.start()
    expected = alone.wait_finished()
    job = elastic(*words, "--kill", "3:committed:3", script=EXAMPLE)
    job.start()
    job.wait_died(3)
    job.finish()
    assert job.matches(0, "generation 2: rank 0 of 2 continues from step") and job.seated_once(0, 1, 2)
    for node in (0, 1):
        assert job.matches(node, f"final step=10 sha256={expected}")


@pytest.mark.thorough  # replicas redo no step, as in the first test of this file
def test_tensor_parallel_replicas_redo_no_step(new_job: Callable[..., Job], tmp_path: Path) -> None:
    mesh = ("--dp-replicate", "2", "--tp", "2")
    expected = undisturbed(new_job, mesh)
    job = killed(new_job, mesh, ("1:committed:3", "2:backward:5", "0:stepped:7"), tmp_path / "marks")
    assert job.wait_finished() == expected
    assert not goes_back(job), job.tails()


def test_fsdp2_and_tensor_parallel_in_bf16_return_to_copied_commits(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    mesh = ("--dp-shard", "2", "--tp", "2", "--mixed-precision-param", "bfloat16")
    expected = undisturbed(new_job, mesh)
    kills = ("3:backward:2", "1:committed:6", "2:committed:6")
    job = killed(new_job, mesh, kills, tmp_path / "marks")
    assert job.wait_finished() == expected
    assert not goes_back(job), job.tails()


def test_pipeline_stages_of_sharded_parts_redo_at_most_a_step(new_job: Callable[..., Job], tmp_path: Path) -> None:
    mesh = ("--pp", "2", "--dp-shard", "2", "--microbatches", "2")
    expected = undisturbed(new_job, mesh)
    job = killed(new_job, mesh, ("3:backward:2", "0:committed:5", "2:stepped:7"), tmp_path / "marks")
    assert job.wait_finished() == expected
    assert {int(found[1]) - int(found[2]) for found in goes_back(job)} <= {1}, job.tails()


@pytest.mark.thorough
def test_pipeline_stages_of_tensor_parallel_parts(new_job: Callable[..., Job], tmp_path: Path) -> None:
    mesh = ("--pp", "2", "--tp", "2")
    expected = undisturbed(new_job, mesh)
    job = killed(new_job, mesh, ("1:backward:3", "2:committed:6"), tmp_path / "marks")
    assert job.wait_finished() == expected


@pytest.mark.thorough
def test_hsdp_and_tensor_parallel_of_eight_redo_no_step(new_job: Callable[..., Job], tmp_path: Path) -> None:
    mesh = ("--dp-replicate", "2", "--dp-shard", "2", "--tp", "2")
    expected = undisturbed(new_job, mesh, workers=8)
    job = killed(new_job, mesh, ("5:committed:3", "2:backward:5", "0:stepped:7"), tmp_path / "marks", 8)
    assert job.wait_finished() == expected
    assert not goes_back(job), job.tails()


FEATURES = Path(__file__).with_name("feature_script.py")


@pytest.mark.parametrize(
    ("uses", "workers"),
    [
        (("checkpointing", "foreach", "scaler", "average"), 2),
        (("replicate",), 2),
        (("replicate-fsdp",), 2),
        (("reshard", "experts"), 4),
        (("routed",), 2),
        (("context",), 2),
        pytest.param(("compile",), 2, marks=pytest.mark.thorough),  # seconds of a C++ compiler
    ],
    ids=lambda one: "-".join(one) if isinstance(one, tuple) else str(one),
)
def test_what_a_mesh_job_uses_survives_kills_with_the_bits_of_torch_alone(
    new_job: Callable[..., Job], tmp_path: Path, uses: tuple[str, ...], workers: int
) -> None:
    alone = new_job("--use", *uses, script=FEATURES, workers=workers, settings={"ENABLE_RECOVERY": "0"})
    alone.start()
    expected = alone.wait_finished()
    kills = ("1:forward:3", "0:stepping:6")
    words = [word for kill in kills for word in ("--kill", kill)]
    job = new_job("--use", *uses, *words, "--marks", str(tmp_path), script=FEATURES, workers=workers)
    replace(*(int(kill[0]) for kill in kills))(job)
    assert job.wait_finished() == expected
