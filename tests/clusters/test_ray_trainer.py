"""``samebits.ray.Trainer``: a Ray Train function recovers in process, with the bits of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from samebits import ray
from samebits.errors import UsageError
from samebits.integrations import ray_train
from tests.clusters import ray_train_script
from tests.clusters.ray_cluster import HOSTS, RayCluster
from tests.clusters.ray_train_script import GATE, GATED_EPOCH
from tests.clusters.test_ray import ENDS_S, STARTS_S, RayJob, kill
from tests.system.job import Job, JobFolder
from tests.system.processes import REPOSITORY

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def planned(folder: Path, marks: Path) -> Path:
    """Write the plan of the script's training function as ``fit()`` does."""
    return ray.write_plan(ray.plan_of(ray_train_script.train, {"lr": 0.01, "marks": str(marks)}), folder)


def run_without_ray(new_job: Callable[..., Job], folder: Path, marks: Path, workers: int) -> Job:
    job = new_job(str(planned(folder, marks)), script=Path(ray.__file__), workers=workers)
    job.start()
    return job


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    folder = tmp_path / "opened"
    folder.mkdir()
    (folder / "open").touch()
    return folder


def test_lost_worker_continues_from_the_last_report_with_the_same_bits(
    tmp_path: Path, opened: Path, new_job: Callable[..., Job]
) -> None:
    undisturbed = run_without_ray(new_job, tmp_path / "undisturbed", opened, 3).wait_finished()
    job = run_without_ray(new_job, tmp_path / "disturbed", tmp_path, 3)
    for rank in job.ranks:
        job.wait_for(rank, GATE)
    job.kill(1)
    job.start_worker(1)
    (tmp_path / "open").touch()
    assert job.wait_finished() == undisturbed
    assert not job.matches(0, "hidden state"), "the function itself restores what it creates"
    for rank in job.ranks:
        job.wait_for(rank, f"trains from epoch {GATED_EPOCH}")
    result = ray.Result.from_path(tmp_path / "disturbed")
    assert result.metrics is not None
    assert result.metrics["epoch"] == ray_train_script.EPOCHS - 1
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert torch.load(Path(folder, "model.pt"), weights_only=True)["epochs"] == ray_train_script.EPOCHS


# --- names and numbers ------------------------------------------------------------------------------------------------


class Holder:
    @staticmethod
    def train(config: dict[str, object]) -> None: ...


def test_functions_are_named_by_their_module() -> None:
    assert ray.name_of(ray_train_script.train) == ("tests.clusters.ray_train_script", "train")
    assert ray.name_of(Holder.train) == (__name__, "Holder.train")
    module, name = ray.name_of(Holder.train)
    assert ray_train.imported(module, name, []) is Holder.train


@pytest.mark.parametrize("kind", ["lambda", "local", "object"])
def test_function_without_a_name_is_refused(kind: str) -> None:
    def local(config: object) -> None: ...

    function = {"lambda": lambda config: None, "local": local, "object": type("Called", (), {"__call__": local})()}
    with pytest.raises(UsageError, match=r"not at the top level of a module or script\. Fix: define it there"):
        ray.Trainer(function[kind])


def test_function_of_the_main_script_is_imported_again_without_its_main_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text('import beside\n\ndef train():\n    return beside.NUMBER\n\nassert __name__ != "__main__"\n')
    (tmp_path / "beside.py").write_text("NUMBER = 7\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", main := ModuleType("__main__"))
    main.__file__ = str(script)
    exec("def train(): ...", main.__dict__)
    assert ray.name_of(main.train) == (str(script), "train")
    assert ray_train.imported(str(script), "train", [])() == 7
    for name in ("beside", "__ray_train_script__"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("module", "name"), [("/nowhere/train.py", "train"), ("json", "nothing"), ("no_such", "f")])
def test_function_that_a_host_lacks_is_named(module: str, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} was not found in {module} on this host: .*Fix: put the script"):
        ray_train.imported(module, name, [])


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), torch.zeros(1), b"bytes", 1 << 70])
def test_configuration_that_json_would_change_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=rf"train_loop_config\['lr'\]: JSON cannot hold this {type(value).__name__}"):
        ray.plan_of(ray_train_script.train, {"batch": 8, "lr": value})


@pytest.mark.parametrize(
    ("workers", "hosts", "free", "expected"),
    [
        (4, None, [8, 8], 1),
        (4, None, [3, 3], 2),
        (4, None, [2, 1, 1], 4),
        (6, None, [3, 2, 2], 3),
        (5, None, [4, 4], 5),
        (4, None, [], 4),
        (4, 2, [8, 8], 2),
    ],
)
def test_workers_are_on_as_few_hosts_as_fit(workers: int, hosts: int | None, free: list[int], expected: int) -> None:
    assert ray.ScalingConfig(num_workers=workers, num_hosts=hosts).hosts(free) == expected


@pytest.mark.parametrize("numbers", [{"num_workers": 0}, {"num_workers": 4, "num_hosts": 3}, {"num_spares": -1}])
def test_impossible_numbers_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"ScalingConfig\(num_workers=.*Fix"):
        ray.ScalingConfig(**numbers)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\nb"])
def test_run_name_is_one_folder(name: str) -> None:
    with pytest.raises(UsageError, match=r"expected the name of one folder"):
        ray.RunConfig(name=name).folder()


# --- reports ----------------------------------------------------------------------------------------------------------


def test_checkpoint_of_an_abandoned_report_is_replaced_whole(tmp_path: Path) -> None:
    target, partial, source = (tmp_path / name for name in ("checkpoint_000001", "partial", "source"))
    for folder, file in ((target, "stale"), (source, "new")):
        folder.mkdir()
        (folder / file).write_text(file)
    ray_train.copy(source, partial)
    ray_train.replace(partial, target)
    assert [one.name for one in target.iterdir()] == ["new"]
    assert not partial.exists()


def test_result_of_an_unreported_run_is_empty_and_a_changed_report_is_refused(tmp_path: Path) -> None:
    assert ray.Result.from_path(tmp_path) == ray.Result(None, None, str(tmp_path))
    (tmp_path / ray.REPORT).write_text(json.dumps({"metrics": [1]}))
    with pytest.raises(UsageError, match=r"report\.json: it is not a report .*Fix: remove the file"):
        ray.Result.from_path(tmp_path)


@pytest.mark.parametrize("call", [ray.get_context, ray.get_checkpoint, lambda: ray.report({})])
def test_calls_outside_a_training_function_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=r"was called outside a training function\. Fix: call it in the train_fn"):
        call()


def test_fit_while_a_worker_imports_the_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLE", "worker")
    with pytest.raises(UsageError, match=r'Fix: call it under `if __name__ == "__main__":`'):
        ray.Trainer(ray_train_script.train).fit()


def test_loader_gives_each_rank_its_samples_on_the_device() -> None:
    data = [{"x": torch.tensor(number), "name": str(number)} for number in range(6)]
    cpu = torch.device("cpu")
    halves = [ray_train.divided(DataLoader(data, 2), rank, 2, cpu) for rank in range(2)]
    assert [[batch["x"].tolist() for batch in half] for half in halves] == [[[0, 2], [4]], [[1, 3], [5]]]
    (batch, *_) = ray_train.divided(DataLoader(data, 2, shuffle=True), 0, 2, torch.device("meta"))
    assert batch["x"].device.type == "meta"
    with pytest.raises(UsageError, match=r"the loader has a WeightedRandomSampler of its own\. Fix"):
        ray_train.divided(DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * 6, 6)), 0, 2, cpu)


# --- on a real Ray ----------------------------------------------------------------------------------------------------


class TrainerJob(RayJob):
    """The script's own run, with one worker on each host and a spare on the first."""

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.clusters.ray_train_script", str(self.folder)]
        with (self.folder / "run.out").open("ab") as out:
            return subprocess.Popen(
                command, cwd=REPOSITORY, env=self.environment(), stdout=out, stderr=subprocess.STDOUT
            )

    def wait_for_the_gate(self) -> None:
        for rank in self.ranks:
            self.wait_for(rank, GATE, timeout_s=STARTS_S)
        self.wait_for(HOSTS, "this spare is warm", timeout_s=STARTS_S)

    def finish(self) -> str:
        (self.folder / "open").touch()
        assert self.process.wait(ENDS_S) == 0, (self.folder / "run.out").read_text()[-3000:] + self.tails()
        return self.sha256()


@pytest.mark.thorough
def test_killed_worker_of_a_run_on_ray_is_replaced_by_the_spare(
    tmp_path: Path,
    cluster: RayCluster,
    opened: Path,
    new_job: Callable[..., Job],
    watched: Callable[[JobFolder], None],
) -> None:
    job = TrainerJob(tmp_path / "job", cluster)
    watched(job)
    job.wait_for_the_gate()
    survivors = [job.identity(f"worker_{rank}") for rank in (0, 1)]
    kill(job.identity("worker_2"))
    job.wait_for("scheduler", "spare 3 .* takes slot 2 of worker 2", timeout_s=ENDS_S)
    assert [job.identity(f"worker_{rank}") for rank in (0, 1)] == survivors
    on_one_machine = run_without_ray(new_job, tmp_path / "undisturbed", opened, HOSTS)
    assert job.finish() == on_one_machine.wait_finished()
    assert (
        f"result: epoch {ray_train_script.EPOCHS - 1}, {job.folder}/checkpoint_" in (job.folder / "run.out").read_text()
    )
