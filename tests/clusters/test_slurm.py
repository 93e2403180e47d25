"""scripts/slurm/samebits.sbatch on a real Slurm: steps and hosts are lost, and the job ends with one machine's bits."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters import slurm
from tests.clusters.documented import Line, lines_in, taken_apart
from tests.clusters.namespaces import Switch
from tests.clusters.slurm import SlurmCluster
from tests.system.job import PROBE, JobFolder
from tests.system.probe import gate_of
from tests.system.processes import REPOSITORY, signal_process

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SBATCH = REPOSITORY / "scripts" / "slurm" / "samebits.sbatch"
TRAINED = ("--steps", "60", "--interval", "10")
MIDDLE = 30
FINISHES_S = 240.0
PYTHON = str(REPOSITORY / ".venv" / "bin" / "python")

PLAIN, SPARE_HOST, ROOM_FOR_SPARES = "^sbatch --nodes=2 --ntasks", "^SPARE_HOSTS=1 ", "^SPARE_NUM=8 "
ARRAY, SINGLETON, WRAP = " --array=", " --dependency=singleton ", " --wrap "
"""How the page's lines are recognised."""


@pytest.fixture
def cluster(tmp_path: Path, new_switch: Callable[..., Switch]) -> Iterator[SlurmCluster]:
    why_not = slurm.missing()
    if why_not:
        pytest.skip(f"Slurm is not installed on this machine: {why_not}")
    folder = tmp_path / "slurm"
    folder.mkdir()
    made = SlurmCluster(folder, new_switch("head", "n1", "n2", "n3"))
    yield made
    made.close()


def documented_line(mark: str) -> Line:
    """Return a line of the page for hosts of one worker each."""
    (text,) = [one for one in lines_in("slurm") if re.search(mark, one)]
    instead = {"train.py": str(PROBE)}
    instead |= {"SPARE_NUM=8": "SPARE_NUM=1"} if "SPARE_NUM" in text else {}
    if "--wrap" in text:
        instead |= {"samebits run -n 8": f"{PYTHON} -P -m samebits run -n 1"}
    else:
        instead |= {"--ntasks-per-node=8": "--ntasks-per-node=1", "scripts/slurm/samebits.sbatch": str(SBATCH)}
    return taken_apart(text, instead)


class SlurmJob(JobFolder):
    """A job started by a line of the page: one worker on each host, and a gate in the middle."""

    def __init__(self, folder: Path, cluster: SlurmCluster, mark: str, *options: str, gates: int = MIDDLE) -> None:
        folder.mkdir()
        line = documented_line(mark)
        workers = int(line.option("nodes")) - int(line.variables.get("SPARE_HOSTS", "0"))
        super().__init__(folder, workers=workers, settings={"REGISTER_COOLDOWN": "1", "NODE_TIMEOUT": "3"})
        self.cluster = cluster
        self.gates = gates
        self.number = self.submit(mark, *options)
        gate_of(folder, 0).touch()

    def submit(self, mark: str, *options: str) -> int:
        """Submit the page's line in this folder; return the job's number."""
        line = documented_line(mark)
        unsaid = dict.fromkeys(("WORKER_NUM", "ENABLE_RECOVERY", "SCHED_PORT"), "")
        environment = self.environment(SAMEBITS_PYTHON=PYTHON, **unsaid) | line.variables
        arguments = (*TRAINED, "--gates", str(self.gates), "--marks", str(self.folder))
        command, *words = line.words
        assert command == "sbatch"
        options = ("--output=sbatch.out", *options)
        return self.cluster.submit(self.folder, environment, *options, *self.with_arguments(words, arguments))

    def with_arguments(self, words: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
        """Return the line's words with those of the script."""
        return (*words, *arguments)

    def wait_for_the_gate(self, *ranks: int) -> None:
        for rank in ranks:
            self.wait_for(rank, f"waits at the gate of step {MIDDLE}", timeout_s=120)

    def finish(self) -> str:
        gate_of(self.folder, MIDDLE).touch()
        state = self.cluster.wait_for_state(self.number, "COMPLETED", "FAILED", "NODE_FAIL", timeout_s=FINISHES_S)
        assert state == "COMPLETED", f"{state}\n{self.tails()}\n{(self.folder / 'sbatch.out').read_text()}"
        return self.sha256()

    def kill(self, name: str) -> None:
        """kill -9 the process that the step of this name runs."""
        role = b"ROLE=scheduler" if name == "scheduler" else b"ROLE=worker"
        node = f"NODE_ID={name.rpartition('_')[2]}".encode()
        for identity in self.processes():
            environment = Path(f"/proc/{identity.pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{identity.pid}/cmdline").read_bytes()
            is_program = b"python" in command.partition(b"\0")[0] and b"writer_process" not in command
            if is_program and role in environment and (name == "scheduler" or node in environment):
                signal_process(identity, signal.SIGKILL)
                assert identity.wait_for_exit(10.0)
                return
        raise AssertionError(f"no process of {name} was found\n{self.tails()}")


@pytest.fixture
def new_slurm_job(
    tmp_path: Path, cluster: SlurmCluster, watched: Callable[[JobFolder], None]
) -> Callable[..., SlurmJob]:
    def make(mark: str, *options: str, gates: int = MIDDLE) -> SlurmJob:
        job = SlurmJob(tmp_path / "job", cluster, mark, *options, gates=gates)
        watched(job)
        return job

    return make


def test_killed_worker_and_killed_scheduler_are_restarted_as_steps(
    new_slurm_job: Callable[..., SlurmJob], undisturbed: Callable[..., str]
) -> None:
    job = new_slurm_job(PLAIN)
    job.wait_for_the_gate(0, 1)
    job.kill("worker_1")
    job.wait_for("scheduler", "worker 1 .* is lost")
    job.kill("scheduler")
    job.wait_for("scheduler", "resumes, term 2", timeout_s=120)
    assert job.finish() == undisturbed(*TRAINED, workers=2)
    assert (job.log_dir / "steps" / "done").exists()


@pytest.mark.thorough
def test_lost_host_is_replaced_by_a_spare_host(
    new_slurm_job: Callable[..., SlurmJob], cluster: SlurmCluster, undisturbed: Callable[..., str]
) -> None:
    job = new_slurm_job(SPARE_HOST)
    job.wait_for_the_gate(0, 1)
    job.wait_for("worker_2", "this spare is warm", timeout_s=120)
    cluster.lose("n2")
    job.wait_for("scheduler", "spare 2 .* takes slot 1 of worker 1", timeout_s=120)
    assert job.finish() == undisturbed(*TRAINED, workers=2)


@pytest.mark.thorough
def test_lost_host_is_replaced_by_an_array_of_spares(
    new_slurm_job: Callable[..., SlurmJob], cluster: SlurmCluster, undisturbed: Callable[..., str]
) -> None:
    job = new_slurm_job(ROOM_FOR_SPARES)
    spares = job.submit(ARRAY, "--output=spares.out")
    job.wait_for_the_gate(0, 1)
    job.wait_for("worker_2", "this spare is warm", timeout_s=120)
    cluster.lose("n2")
    job.wait_for("scheduler", "spare 2 .* takes slot 1 of worker 1", timeout_s=120)
    assert job.finish() == undisturbed(*TRAINED, workers=2)
    assert cluster.wait_for_state(spares, "COMPLETED", "FAILED", timeout_s=60) == "COMPLETED"


@pytest.mark.thorough
def test_requeued_job_resumes(
    new_slurm_job: Callable[..., SlurmJob], cluster: SlurmCluster, undisturbed: Callable[..., str]
) -> None:
    """The processes wait in a step until Slurm kills them, so only the files on disk remain."""
    job = new_slurm_job(PLAIN)
    job.wait_for_the_gate(0, 1)
    cluster.command("scontrol", "requeue", str(job.number))
    job.wait_for("scheduler", "resumes, term 2", timeout_s=120)
    assert job.finish() == undisturbed(*TRAINED, workers=2)


@pytest.mark.thorough
def test_job_whose_first_host_is_lost_resumes_elsewhere(
    new_slurm_job: Callable[..., SlurmJob], cluster: SlurmCluster, undisturbed: Callable[..., str]
) -> None:
    """Batch script and scheduler ran there."""
    job = new_slurm_job(PLAIN)
    job.wait_for_the_gate(0, 1)
    cluster.lose("n1")
    job.wait_for("scheduler", "resumes, term 2", timeout_s=180)
    assert job.finish() == undisturbed(*TRAINED, workers=2)


@pytest.mark.thorough
def test_job_at_its_time_limit_leaves_at_a_commit_and_the_next_one_resumes(
    new_slurm_job: Callable[..., SlurmJob], cluster: SlurmCluster, undisturbed: Callable[..., str]
) -> None:
    """Slurm sends a signal before the time limit; the next job has the same name and waits for this one."""
    job = new_slurm_job(SINGLETON, gates=10)
    job.wait_for(0, "waits at the gate of step 10", timeout_s=120)
    second = job.submit(SINGLETON)
    cluster.command("scancel", "--batch", "--signal=USR1", str(job.number))
    job.wait_for("scheduler", "every worker is to stop after the same commit")
    gate_of(job.folder, 10).touch()
    cluster.wait_for_state(job.number, "FAILED", timeout_s=60)
    for gate in (20, 30, 40, 50):
        gate_of(job.folder, gate).touch()
    job.number = second
    assert job.finish() == undisturbed(*TRAINED, workers=2)
    job.wait_for("scheduler", "resumes, term 2")
    for rank in (0, 1):
        numbers = [step.number for step in job.steps(rank)]
        assert numbers == sorted(set(numbers)), f"rank {rank} took a step twice: {numbers}"


@pytest.mark.thorough
def test_cancelled_job_stays_cancelled(new_slurm_job: Callable[..., SlurmJob], cluster: SlurmCluster) -> None:
    job = new_slurm_job(PLAIN)
    job.wait_for_the_gate(0, 1)
    cluster.command("scancel", str(job.number))
    cluster.wait_for_state(job.number, "CANCELLED", timeout_s=60)
    job.wait_until(lambda: not list(job.processes()) or None, "end of all processes")
    assert cluster.state_of(job.number) == "CANCELLED"


class SrunJob(SlurmJob):
    """A job that ``srun samebits run`` starts on each host, with only the number of workers per host given."""

    def environment(self, **more: str) -> dict[str, str]:
        secret = self.folder / "secret"
        if not secret.exists():
            secret.touch(0o600)
            secret.write_text("a secret of more than sixteen bytes")
        return super().environment(CLUSTER_SECRET_FILE=str(secret), **more)

    def with_arguments(self, words: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
        *others, wrapped = words
        return (*others, f"{wrapped} {shlex.join(arguments)}")

    def log(self, name: str | int) -> Path:
        host = 0 if name == "scheduler" else int(name)
        return self.log_dir / f"host{host}" / super().log(name).name

    def sha256(self, ranks: int | None = None) -> str:
        hashes = {self.finals_of(self.log(rank))[-1] for rank in self.ranks}
        assert len(hashes) == 1
        return hashes.pop()


@pytest.mark.thorough
def test_samebits_run_inside_srun_knows_its_hosts_by_itself(
    tmp_path: Path, cluster: SlurmCluster, watched: Callable[[JobFolder], None], undisturbed: Callable[..., str]
) -> None:
    job = SrunJob(tmp_path / "job", cluster, WRAP)
    watched(job)
    job.wait_for_the_gate(0, 1)
    job.kill("worker_1")
    job.wait_for("scheduler", "worker 1 .* is lost")
    assert job.finish() == undisturbed(*TRAINED, workers=2)


def test_every_line_of_the_page_is_run_here() -> None:
    marks = (PLAIN, SPARE_HOST, ROOM_FOR_SPARES, ARRAY, SINGLETON, WRAP)
    assert len(lines_in("slurm")) == len(marks)
    for mark in marks:
        assert documented_line(mark).words[0] == "sbatch"
