"""``samebits run --on ray`` on a real Ray: whatever is killed, the job ends with the bits of one machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.commands.run import options
from samebits.commands.run.command import main
from samebits.errors import UsageError
from samebits.hosts import ray_cluster as ray_hosts
from samebits.store.process_identity import ProcessIdentity
from tests.clusters import ray_cluster
from tests.clusters.ray_cluster import RayCluster
from tests.system.job import PROBE, JobFolder
from tests.system.probe import gate_of
from tests.system.processes import signal_process

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

TRAINED = ("--steps", "60", "--interval", "10")
MIDDLE = 30
GATE = f"waits at the gate of step {MIDDLE}"
HOSTS = 3
STARTS_S = 240.0
ENDS_S = 120.0


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    if not ray_cluster.is_installed():
        pytest.skip("Ray is not installed: pip install 'samebits[ray]'")
    made = RayCluster(HOSTS)
    yield made
    made.close()


def alive(pid: int) -> ProcessIdentity:
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    return identity


class RayJob(JobFolder):
    """A job with one worker on each host, a spare on the first, and a gate in its middle."""

    def __init__(self, folder: Path, cluster: RayCluster) -> None:
        folder.mkdir()
        super().__init__(folder, workers=HOSTS, settings={"RAY_ADDRESS": cluster.address})
        gate_of(folder, 0).touch()
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Type the command in the job's folder."""
        unset = dict.fromkeys(("WORKER_NUM", "ENABLE_RECOVERY", "SCHED_PORT", "RECOVERY_PATH", "LOG_DIR"), "")
        command = [sys.executable, "-P", "-m", "samebits", "run", "--on", "ray"]
        command += ["--nnodes", str(HOSTS), "-n", "1", "--spares", "1", str(PROBE), *TRAINED]
        command += ["--gates", str(MIDDLE), "--marks", str(self.folder)]
        with (self.folder / "run.out").open("ab") as out:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment(**unset), stdout=out, stderr=subprocess.STDOUT
            )

    def log(self, name: str | int) -> Path:
        rank = name if isinstance(name, int) else 0
        return self.log_dir / f"host{rank % HOSTS}" / f"{'worker_' * isinstance(name, int)}{name}.log"

    def identity(self, name: str) -> ProcessIdentity:
        """Read the pid file of a process, such as ``worker_2`` of host 2."""
        host = int(name.rpartition("_")[2]) % HOSTS if "_" in name else 0
        return alive(int((self.log_dir / f"host{host}" / f"{name}.pid").read_text().split()[0]))

    def ancestor(self, name: str, title: str) -> ProcessIdentity:
        """Return the process of that title that the named process descends from."""
        pid = self.identity(name).pid
        while title not in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            assert pid > 1, f"no {title} above {name}"
        return alive(pid)

    def wait_for_the_gate(self) -> None:
        for rank in self.ranks:
            self.wait_until(
                lambda rank=rank: self.process.poll() is not None or self.matches(rank, GATE) or None, GATE, STARTS_S
            )
            assert self.matches(rank, GATE), (self.folder / "run.out").read_text()
        self.wait_for(HOSTS, "this spare is warm", timeout_s=STARTS_S)

    def finish(self) -> str:
        gate_of(self.folder, MIDDLE).touch()
        assert self.process.wait(ENDS_S) == 0, (self.folder / "run.out").read_text()[-3000:] + self.tails()
        return self.sha256()


@pytest.fixture
def job(tmp_path: Path, cluster: RayCluster, watched: Callable[[JobFolder], None]) -> Iterator[RayJob]:
    made = RayJob(tmp_path / "job", cluster)
    watched(made)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def kill(identity: ProcessIdentity) -> None:
    signal_process(identity, signal.SIGKILL)
    assert identity.wait_for_exit(10.0)


@pytest.mark.parametrize(
    "words", ["--node-rank 1", "--detach", "--dry-run", "--sched-host 192.0.2.2", "--log-dir logs"]
)
def test_what_ray_decides_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--on", "ray", "--nnodes", "2", *words.split(), "train.py"], {})
    assert f"--on ray and {words.split()[0]}: Ray places the hosts" in capsys.readouterr().err


@pytest.mark.parametrize("spelled", [["--on", "ray"], ["--on=ray"]])
def test_hosts_run_the_same_words_without_on(spelled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(ray_hosts, "run", lambda *given: called.append(given) or 7)
    assert main(["--nnodes", "3", *spelled, "-n", "2", "train.py", "--on", "gpu"]) == 7
    assert called == [(["--nnodes", "3", "-n", "2", "train.py", "--on", "gpu"], 3, 2)]


def test_missing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"Ray is not installed\. Fix: pip install 'samebits\[ray\]'"):
        ray_hosts.run(["train.py"], 1, 1)


@pytest.mark.thorough
def test_killed_worker_is_replaced_by_the_spare(job: RayJob, undisturbed: Callable[..., str]) -> None:
    job.wait_for_the_gate()
    kill(job.identity("worker_2"))
    job.wait_for("scheduler", "spare 3 .* takes slot 2 of worker 2", timeout_s=ENDS_S)
    assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["actor", "raylet"])
def test_lost_host_comes_back_on_another_node(
    job: RayJob, cluster: RayCluster, undisturbed: Callable[..., str], target: str
) -> None:
    job.wait_for_the_gate()
    worker, title = job.identity("worker_2"), "ray::Host" if target == "actor" else "/raylet "
    kill(job.ancestor("worker_2", title))
    assert worker.wait_for_exit(ENDS_S), "no orphan trains on"
    job.wait_for("scheduler", "spare 3 .* takes slot 2 of worker 2", timeout_s=ENDS_S)
    if target == "raylet":
        cluster.add_node()
    job.wait_for("scheduler", "spare 2[. ].* is here", timeout_s=STARTS_S)
    assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["scheduler", "its actor", "driver"])
def test_coordinator_may_die(job: RayJob, undisturbed: Callable[..., str], target: str) -> None:
    job.wait_for_the_gate()
    match target:
        case "scheduler":
            kill(job.identity("scheduler"))
        case "its actor":
            kill(job.ancestor("scheduler", "ray::Host"))
        case "driver":
            job.process.kill()
            job.process.wait()
            job.process = job.start()  # which follows the job that runs
    if target in ("scheduler", "its actor"):
        job.wait_for("scheduler", "resumes, term 2", timeout_s=STARTS_S)
    assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)
