"""Two jobs on one machine: each uses its own scheduler, port and folder."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from samebits.config import PREFIX
from samebits.errors import ForeignFolderError, JobStoppedError, LockedError, RefusedError, UsageError
from samebits.service.status import stored_view
from tests.launcher.shell_job import ENDLESS, UNTIL_TOLD, WORKER, ShellJob

pytestmark = pytest.mark.system


def without_port(job: ShellJob) -> ShellJob:
    """Return the same job with the port that `run` chooses."""
    del job.settings["SCHED_PORT"]
    return job


def started_as(job: ShellJob) -> dict[str, object]:
    """Return how the job was started, as saved for `recover`."""
    content = json.loads((job.log_dir / "start.json").read_text())
    assert isinstance(content, dict)
    return content


@contextlib.contextmanager
def taken_default_port() -> Iterator[None]:
    """Hold the default port unless another process does."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", 8118)))
        yield


def test_two_jobs_started_at_the_same_time_do_not_mix(new_job: Callable[..., ShellJob]) -> None:
    """Each makes the number of steps that it was started with, and neither has a worker of the other."""
    jobs = {steps: without_port(new_job(f"of {steps} steps")) for steps in (30, 50)}
    shells = {steps: job.run("--steps", str(steps)) for steps, job in jobs.items()}
    for steps, job in jobs.items():
        assert shells[steps].end() == 0, job.tails()
        assert f"finished at step {steps}" in shells[steps].text
        view = stored_view(job.folder / "recovery")
        assert view is not None and view.job == started_as(job)["job"]
        assert {worker.identity.pid for worker in view.workers} == {
            job.identity(f"worker_{node}").pid for node in range(3)
        }
    assert started_as(jobs[30])["job"] != started_as(jobs[50])["job"]


def test_worker_of_another_launcher_is_refused(job: ShellJob) -> None:
    """Only the job's id distinguishes such a worker; without it, the worker would become a spare."""
    job.settings["SPARE_NUM"] = "2"
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    foreign = {**job.settings, "ROLE": "worker", "NODE_ID": "9", "JOB_ID": "another-launcher"}
    stranger = job.shell(str(WORKER.parents[2] / ".venv/bin/python"), str(WORKER), *UNTIL_TOLD, **foreign)
    assert stranger.end() == RefusedError.exit_code, stranger.text
    assert f"belongs to job another-launcher, this scheduler runs job {started_as(job)['job']}" in stranger.text
    job.let_finish()
    assert shell.end() == 0, shell.text


def test_job_that_lost_its_default_port_is_recovered_on_a_free_one(job: ShellJob) -> None:
    """Everything of the job is dead, so no process knows the old port."""
    job.settings.pop("SCHED_PORT")
    with taken_default_port():
        shell = job.run(*UNTIL_TOLD)
        shell.wait_for("the default SCHED_PORT=8118 is in use; this job's scheduler listens on port")
        kept = started_as(job)
        environment = dict(kept["environment"])  # type: ignore[call-overload]
        job.settings["SCHED_PORT"] = environment["SCHED_PORT"]
        job.wait_training()
        job.kill_everything(shell)
        # As if the default port had been free when the job was started.
        del environment["SCHED_PORT"]
        (job.log_dir / "start.json").write_text(json.dumps(kept | {"environment": environment}))
        again = job.recover()
        again.wait_for("the default SCHED_PORT=8118 is in use; this job's scheduler listens on port")
        job.let_finish()
        assert again.end() == 0, again.text


def test_job_whose_port_another_job_took_names_its_folder_and_resumes_once_it_stops(
    new_job: Callable[..., ShellJob],
) -> None:
    """The job's workers know no other port, so a scheduler on a free port would not help."""
    first, second = new_job("first"), new_job("second")
    second.settings["SCHED_PORT"] = first.settings["SCHED_PORT"]
    second.port = first.port
    shell = first.run(*UNTIL_TOLD)
    first.wait_training()
    first.kill("scheduler")
    shell.wait_for("the ranks go on until one of them is lost")
    shell.process.kill()
    other = second.run(*ENDLESS)
    second.wait_training()
    again = first.recover()
    held = f"another job's scheduler, started in {second.folder}; the ranks go on until one of them is lost. "
    again.wait_for(re.escape(f"{held}Fix: `samebits stop` in {second.folder} frees the port; or") + ".*; then bash .*")
    again.process.kill()
    assert "worker_0" in first.running()
    assert second.tool("stop").end() == 0
    assert other.end() == JobStoppedError.exit_code
    last = first.recover()
    first.wait_training()
    first.let_finish()
    assert last.end() == 0, last.text


def test_job_whose_port_is_taken_is_not_started(job: ShellJob) -> None:
    shell = job.run(*ENDLESS)
    job.wait_training()
    job.kill_everything(shell)
    with socket.create_server(("127.0.0.1", job.port)):
        again = job.recover()
        assert again.end() == 75, again.text
        assert f"SCHED_PORT={job.port} on 127.0.0.1 cannot be listened on" in again.text
        assert job.running() == []


def test_nested_start_ignores_the_outer_workers_settings(job: ShellJob) -> None:
    """A launcher inside another job's worker inherits that worker's variables."""
    outer = {"ROLE": "worker", "NODE_ID": "7", "JOB_ID": "outer", f"{PREFIX}JOB_ID": "outer"}
    shell = job.run(*ENDLESS, **outer)
    job.wait_training()
    told = job.proc_environment("worker_0")
    assert told["JOB_ID"] == started_as(job)["job"]
    assert f"{PREFIX}JOB_ID" not in told
    shell.send(signal.SIGINT)
    assert shell.end() == 78


def test_folder_whose_job_never_began_does_not_recover_another_one(new_job: Callable[..., ShellJob]) -> None:
    """Both launchers were given one RECOVERY_PATH; only one scheduler can have it."""
    winner, loser = new_job("winner"), new_job("loser")
    loser.settings["RECOVERY_PATH"] = str(winner.folder / "recovery")
    first = winner.run(*UNTIL_TOLD)
    winner.wait_training()
    assert loser.run(*ENDLESS).end() == LockedError.exit_code
    # As if both had looked for a holder at the same time, before there was one.
    content = started_as(winner) | {"folder": str(loser.folder), "job": "the-losers"}
    content["environment"] = content["environment"] | {"RECOVERY_PATH": str(winner.folder / "recovery")}  # type: ignore[operator]
    loser.log_dir.mkdir(mode=0o700, exist_ok=True)
    (loser.log_dir / "start.json").write_text(json.dumps(content))
    (loser.log_dir / "start.json").chmod(0o600)
    while_it_runs = loser.recover()
    assert while_it_runs.end() == ForeignFolderError.exit_code, while_it_runs.text
    winner.let_finish()
    assert first.end() == 0, first.text
    afterwards = loser.recover()
    assert afterwards.end() == ForeignFolderError.exit_code, afterwards.text
    assert "this folder's job is the-losers" in afterwards.text


def test_folder_of_an_ended_job_without_a_journal_neither_shows_nor_stops_a_later_job_on_its_port(
    new_job: Callable[..., ShellJob],
) -> None:
    ended, later = new_job("ended"), new_job("later")
    later.settings["SCHED_PORT"] = ended.settings["SCHED_PORT"]
    later.port = ended.port
    assert ended.run("--steps", "10", ENABLE_RECOVERY="0").end() == 0, ended.tails()
    shell = later.run(*UNTIL_TOLD)
    later.wait_training()
    first, second = started_as(ended)["job"], started_as(later)["job"]
    both = (
        f"no scheduler of job {first}, which was started in {ended.folder}, answers; the one at .* serves job {second} "
    )
    for words in (("status",), ("status", "--json")):
        status = ended.tool(*words)
        assert status.end() == UsageError.exit_code, status.text
        assert re.search(both, status.text), status.text
    ps = ended.tool("ps")
    assert ps.end() == 0 and ps.text.count("gone") == 4, ps.text
    stop = ended.tool("stop")
    assert stop.end() == UsageError.exit_code, stop.text
    assert f"serves job {second} (" in stop.text and f"this folder belongs to job {first}" in stop.text
    later.let_finish()
    assert shell.end() == 0, shell.text
