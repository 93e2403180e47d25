"""scripts/slurm/samebits.sbatch on a real Slurm: steps and hosts are lost, and the job ends with one machine's bits."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters import slurm
from tests.clusters.namespaces import Switch
from tests.clusters.slurm import SlurmCluster
from tests.system.job import PROBE, JobFolder
from tests.system.probe import gate_of
from tests.system.processes import REPOSITORY, signal_process

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.timeout(600)]

SBATCH = REPOSITORY / "scripts" / "slurm" / "samebits.sbatch"
TRAINED = ("--steps", "60", "--interval", "10")
MIDDLE = 30
FINISHES_S = 240.0


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


class SlurmJob(JobFolder):
    """A job that ``sbatch`` started: one worker on each host, and a gate in its middle."""

    def __init__(self, folder: Path, cluster: SlurmCluster, *, hosts: int, spare_hosts: int = 0) -> None:
        folder.mkdir()
        settings = {"REGISTER_COOLDOWN": "1", "NODE_TIMEOUT": "3", "SPARE_HOSTS": str(spare_hosts)}
        super().__init__(folder, workers=hosts - spare_hosts, settings=settings)
        self.cluster = cluster
        python = str(REPOSITORY / ".venv" / "bin" / "python")
        environment = self.environment(SAMEBITS_PYTHON=python, WORKER_NUM="", ENABLE_RECOVERY="", SCHED_PORT="")
        arguments = (*TRAINED, "--gates", str(MIDDLE), "--marks", str(folder))
        options = (f"--nodes={hosts}", "--ntasks-per-node=1", "--output=sbatch.out")
        self.number = cluster.submit(folder, environment, *options, str(SBATCH), str(PROBE), *arguments)
        gate_of(folder, 0).touch()

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
    def make(**options: int) -> SlurmJob:
        job = SlurmJob(tmp_path / "job", cluster, **options)
        watched(job)
        return job

    return make


def test_a_killed_worker_and_a_killed_scheduler_are_steps_that_start_again(
    new_slurm_job: Callable[..., SlurmJob], undisturbed: Callable[..., str]
) -> None:
    job = new_slurm_job(hosts=2)
    job.wait_for_the_gate(0, 1)
    job.kill("worker_1")
    job.wait_for("scheduler", "worker 1 .* is lost")
    job.kill("scheduler")
    job.wait_for("scheduler", "goes on, term 2", timeout_s=120)
    assert job.finish() == undisturbed(*TRAINED, workers=2)
    assert (job.log_dir / "steps" / "done").exists()


def test_a_lost_host_is_made_good_by_a_spare_one(
    new_slurm_job: Callable[..., SlurmJob], cluster: SlurmCluster, undisturbed: Callable[..., str]
) -> None:
    job = new_slurm_job(hosts=3, spare_hosts=1)
    job.wait_for_the_gate(0, 1)
    job.wait_for("worker_2", "this spare is warm", timeout_s=120)
    cluster.lose("n2")
    job.wait_for("scheduler", "spare 2 .* takes slot 1 of worker 1", timeout_s=120)
    assert job.finish() == undisturbed(*TRAINED, workers=2)
