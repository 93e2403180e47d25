"""A job's folder that was copied or moved: a copy never touches the original job."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.launcher.job_spec import JobSpec
from tests.launcher.shell_job import ENDLESS, ROOT, UNTIL_TOLD, Shell, ShellJob, free_port

pytestmark = pytest.mark.system


def script_in(job: ShellJob, folder: Path, name: str, *words: str, **settings: str) -> Shell:
    """Start the command behind the script of this name in this folder."""
    become = {"run.sh": ("run",), "recover.sh": ("recover",), "add.sh": ("scale", "--add", "1")}
    return job.tool(*become[name], *words, folder=folder, **settings)


def test_copy_touches_nothing_of_the_original_job(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    copy = job.folder.parent / "a copy"
    shutil.copytree(job.folder, copy)
    before = job.identities()
    recover = script_in(job, copy, "recover.sh")
    assert recover.end() == 80, recover.text
    (line,) = [line for line in recover.text.splitlines() if line.startswith("samebits: ")]
    for word in (
        str(copy),
        f"was started in {job.folder} and still lies there",
        "recover.sh --moved",
        "run.sh --fresh",
    ):
        assert word in line
    for words in (("recover.sh", "--moved"), ("add.sh",)):
        refused = script_in(job, copy, *words)
        assert refused.end() == 80, refused.text
        assert "this folder is a copy" in refused.text
    for tool in ("stop", "status", "follow"):
        refused = job.tool(tool, folder=copy)
        assert refused.end() == 80, refused.text
        assert "this folder is a copy" in refused.text
    looked = job.tool("ckpt", folder=copy)
    looked.end()
    assert str(job.folder / "ckpt_of_rank") not in looked.text
    looked = job.tool("history", folder=copy)
    assert looked.end() == 0 and "every member trains" in looked.text, looked.text

    settings = {**job.settings, "SCHED_PORT": str(free_port())}
    worker = str(ROOT / "tests" / "launcher" / "tiny_worker.py")
    refused = script_in(job, copy, "run.sh", worker, "--steps", "5", **settings)
    assert refused.end() == 71, refused.text
    assert "recover.sh --moved` continues it" in refused.text
    fresh = script_in(job, copy, "run.sh", "--fresh", worker, "--steps", "5", **settings)
    assert fresh.end() == 0, fresh.text
    assert "final step=5" in (copy / "device" / "worker_0.log").read_text()

    assert job.identities() == before
    assert len(job.running()) == 4
    job.let_finish()
    assert shell.end() == 0, shell.text


def test_copy_does_not_start_while_the_processes_it_names_run_elsewhere(job: ShellJob) -> None:
    """The other folder no longer shows that it has a job, but its processes do."""
    shell = job.run(*ENDLESS)
    job.wait_training()
    copy = job.folder.parent / "a copy"
    shutil.copytree(job.folder, copy)
    (job.log_dir / "start.json").rename(job.folder / "start.json")
    refused = script_in(job, copy, "recover.sh", "--moved")
    assert refused.end() == 80, refused.text
    assert "of the job that was copied" in refused.text
    assert "is running elsewhere" in refused.text
    assert len(job.running()) == 4
    (job.folder / "start.json").rename(job.log_dir / "start.json")
    shell.send(signal.SIGINT)
    assert shell.end() == 78, shell.text


# The default LOG_DIR moves with its folder in test_folder_moved_while_its_job_runs_is_followed_there, too.
@pytest.mark.parametrize("log_dir", [pytest.param("", marks=pytest.mark.thorough), "its logs"])
def test_moved_folder_resumes_in_its_new_place(job: ShellJob, log_dir: str) -> None:
    if log_dir:
        job.settings["LOG_DIR"] = str(job.folder / log_dir)
    shell = job.run(*UNTIL_TOLD, CHECKPOINT_PATH=str(job.folder / "points"), DATA_PATH=f"/x:{job.folder}/data")
    job.wait_training()
    shell.send(signal.SIGINT)
    assert shell.end() == 78, shell.text
    before = job.folder
    job.folder = before.rename(before.parent / "moved away")
    (line,) = [line for line in refused_line(job.recover()) if "was started in" in line]
    for word in (f"was started in {before}, which is gone: this folder was moved", "--moved", "--fresh"):
        assert word in line
    job.let_finish()
    recover = job.recover("--moved")
    assert recover.end() == 0, recover.text
    assert f"the job that was started in {before} continues in {job.folder}" in recover.text
    assert not before.exists()
    assert "final step=" in (job.folder / (log_dir or "device") / "worker_0.log").read_text()
    assert (job.folder / "points" / "0").exists()
    again = job.recover()
    assert again.end() == 0, again.text


def refused_line(shell: Shell) -> list[str]:
    assert shell.end() == 80, shell.text
    return shell.text.splitlines()


def test_folder_moved_while_its_job_runs_is_followed_there(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    shell.send(signal.SIGKILL)
    shell.process.wait()
    before = job.identities()
    job.folder = job.folder.rename(job.folder.parent / "moved away")
    fresh = job.run(*UNTIL_TOLD, options=("--fresh",))
    assert fresh.end() == 73, fresh.text
    recover = job.recover("--moved")
    recover.wait_for("nothing to do: every process of the job is there")
    assert job.identities() == before
    job.let_finish()
    assert recover.end() == 0, recover.text


def test_follower_ends_nothing_in_a_folder_that_took_its_folders_place(
    job: ShellJob, new_job: Callable[..., ShellJob]
) -> None:
    second = new_job("second")
    jobs, shells = (job, second), (job.run(*UNTIL_TOLD), second.run(*UNTIL_TOLD))
    for one in jobs:
        one.wait_training()
    before = [one.identities() for one in jobs]
    aside = job.folder.parent / "aside"
    job.log_dir.rename(aside)
    second.log_dir.rename(job.log_dir)
    aside.rename(second.log_dir)
    for shell, identities in zip(shells, before, strict=True):
        assert shell.end() == 72, shell.text
        (line,) = [line for line in shell.text.splitlines() if "was moved or deleted" in line]
        assert all(f"pid {identity.pid}" in line for identity in identities.values())
        assert all(identity.is_alive() for identity in identities.values())
    job.log_dir.rename(aside)
    second.log_dir.rename(job.log_dir)
    aside.rename(second.log_dir)
    for one in jobs:
        follower = one.tool("follow")
        follower.wait_for("step")
        one.let_finish()
        assert follower.end() == 0, follower.text


def test_files_of_a_moved_folder_are_found_in_the_new_one() -> None:
    environment = {"PYTHONPATH": "/old/src:/oldish:/x/old", "DATA_PATH": "/old", "WORKER_NUM": "3"}
    kept = JobSpec(Path("/old"), "/old/.venv/bin/python", "train.py", ("--data=/old/d", "/old", "/older"), environment)
    moved = kept.moved_to(Path("/new"))
    assert (moved.folder, moved.interpreter, moved.script) == (Path("/new"), "/new/.venv/bin/python", "train.py")
    assert moved.args == ("--data=/new/d", "/new", "/older")
    assert moved.environment == {"PYTHONPATH": "/new/src:/oldish:/x/old", "DATA_PATH": "/new", "WORKER_NUM": "3"}
