"""``samebits run --on ray`` on a real Ray: whatever is killed, the job ends with the bits of one machine."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from samebits.commands.run import options
from samebits.commands.run.command import main
from samebits.errors import SecretError, UsageError
from samebits.hosts import ray_cluster as ray_hosts
from samebits.store.process_identity import ProcessIdentity
from tests.clusters.ray_cluster import HOSTS, REDIS, RayCluster
from tests.store.etcd.etcd_cluster import ETCD, cluster_in
from tests.system.job import PROBE, JobFolder
from tests.system.probe import gate_of
from tests.system.processes import REPOSITORY, signal_process

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

TRAINED = ("--steps", "60", "--interval", "10")
MIDDLE = 30
GATE = f"waits at the gate of step {MIDDLE}"
STARTS_S = 240.0
ENDS_S = 120.0


def alive(pid: int) -> ProcessIdentity:
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    return identity


class RayJob(JobFolder):
    """A job with one worker on each host, a spare on the first, and a gate in its middle."""

    def __init__(self, folder: Path, cluster: RayCluster, settings: Mapping[str, str] | None = None) -> None:
        folder.mkdir()
        unset = dict.fromkeys(("WORKER_NUM", "ENABLE_RECOVERY", "SCHED_PORT", "RECOVERY_PATH", "LOG_DIR"), "")
        given = {**unset, "RAY_ADDRESS": cluster.address, **(settings or {})}
        super().__init__(folder, workers=HOSTS, settings=given)
        gate_of(folder, 0).touch()
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Type the command in the job's folder."""
        command = [sys.executable, "-P", "-m", "samebits", "run", "--on", "ray"]
        command += ["--nnodes", str(HOSTS), "-n", "1", "--spares", "1", str(PROBE), *TRAINED]
        command += ["--gates", str(MIDDLE), "--marks", str(self.folder)]
        with (self.folder / "run.out").open("ab") as out:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdout=out, stderr=subprocess.STDOUT
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
    job.process = job.start()  # a job that has ended leaves nothing that the next command would wait for
    assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["actor", "raylet"])
def test_lost_host_comes_back_on_another_node(
    job: RayJob, cluster: RayCluster, undisturbed: Callable[..., str], target: str
) -> None:
    job.wait_for_the_gate()
    worker, title = job.identity("worker_2"), "ray::RayHost" if target == "actor" else "/raylet "
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
            kill(job.ancestor("scheduler", "ray::RayHost"))
        case "driver":
            job.process.kill()
            job.process.wait()
            job.process = job.start()  # which follows the job that runs
    if target in ("scheduler", "its actor"):
        job.wait_for("scheduler", "resumes, term 2", timeout_s=STARTS_S)
    assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)


def test_folder_of_a_different_job_is_refused_with_both_jobs(tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "ray-job.json").write_text('{"words": ["-n", "2", "a b.py"], "hosts": 3}')
    ray_hosts.require_same(tmp_path, ["-n", "2", "a b.py"], 3)
    for words, hosts in ((["-n", "2", "other.py"], 3), (["-n", "2", "a b.py"], 1)):
        with pytest.raises(UsageError) as raised:
            ray_hosts.require_same(tmp_path, words, hosts)
        said = str(raised.value)
        assert f"in {tmp_path} was started as `-n 2 'a b.py'` on 3 hosts, but this command asks for" in said
        assert f"`{shlex.join(words)}` on {hosts} host" in said
    with pytest.raises(UsageError, match=r"ray-job\.json, which records how it was started, was removed\. Fix: "):
        ray_hosts.require_same(tmp_path / "elsewhere", [], 1)


INTRUDER = """
import sys
import time

import ray

from samebits.hosts.ray_cluster import HostPlan, RayHost

folder, name, *words = sys.argv[1:]
ray.init(address="auto", namespace="another")
actor = ray.remote(RayHost).options(name=name, num_cpus=0, max_concurrency=4)
host = actor.remote(HostPlan(folder, 1, tuple(words), ""))
print("status", ray.get(host.wait.remote()), flush=True)
del host
while True:
    try:
        ray.get_actor(name, "another")
    except ValueError:
        break
    time.sleep(0.5)
print("left", flush=True)
"""
"""An actor with a name of the job in another namespace, which runs a host of the job with another secret."""


@pytest.mark.thorough
def test_intruders_are_refused_and_harm_no_process(
    job: RayJob, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    job.wait_for_the_gate()
    names = [f"worker_{rank}" for rank in range(HOSTS + 1)]
    before = [*map(job.identity, [*names, "scheduler"]), *(job.ancestor(name, "ray::RayHost") for name in names)]
    other = [sys.executable, "-P", "-m", "samebits", "run", "--on", "ray", "--nnodes", "2", "-n", "1", "other.py"]
    second = subprocess.run(other, cwd=job.folder, env=job.environment(), capture_output=True, text=True, check=False)
    assert second.returncode == UsageError.exit_code
    assert f"--gates {MIDDLE} --marks {job.folder}` on 3 hosts, but this command asks for `" in second.stderr
    assert "other.py` on 2 hosts" in second.stderr
    elsewhere = tmp_path / "elsewhere" / "device"
    elsewhere.mkdir(parents=True)
    shutil.copy(job.log_dir / "scheduler-address", elsewhere)
    environment = json.loads((job.log_dir / "environment.json").read_text())
    environment.pop("CLUSTER_SECRET_FILE")
    (elsewhere / "environment.json").write_text(json.dumps({**environment, "CLUSTER_SECRET": "f" * 64}))
    arguments = ("--nnodes", str(HOSTS), "-n", "1", "--spares", "1", str(PROBE), *TRAINED, "--marks", str(elsewhere))
    actor = f"{ray_hosts.name_for(job.folder)}-host1"
    intruder = subprocess.run(
        [sys.executable, "-c", INTRUDER, str(elsewhere.parent), actor, *arguments],
        cwd=REPOSITORY,
        env=job.environment(),
        capture_output=True,
        text=True,
        timeout=STARTS_S,
        check=False,
    )
    log = (elsewhere / "host1" / "run.log").read_text()
    assert f"status {SecretError.exit_code}\nleft\n" in intruder.stdout, f"{intruder.stderr[-3000:]}\n{log}"
    assert "refuses this process's secret. Fix: compare CLUSTER_SECRET" in log
    assert before == [
        *map(job.identity, [*names, "scheduler"]),
        *(job.ancestor(name, "ray::RayHost") for name in names),
    ]
    assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)


@pytest.mark.thorough
@pytest.mark.skipif(ETCD is None, reason="no etcd is installed (apt-get install etcd-server)")
def test_scheduler_lost_with_its_journals_copy_resumes_from_the_etcd(
    tmp_path: Path, cluster: RayCluster, watched: Callable[[JobFolder], None], undisturbed: Callable[..., str]
) -> None:
    with cluster_in(tmp_path / "etcd") as etcd:
        job = RayJob(tmp_path / "job", cluster, {"RECOVERY_PATH": str(etcd.place())})
        watched(job)
        job.wait_for_the_gate()
        leader = etcd.leader()
        assert leader is not None
        etcd.signal(leader, signal.SIGKILL)
        kill(job.ancestor("scheduler", "ray::RayHost"))
        shutil.rmtree(job.recovery)
        job.wait_for("scheduler", r"resumes, term 2: .* read from the journal", timeout_s=STARTS_S)
        assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)


@pytest.mark.thorough
@pytest.mark.skipif(REDIS is None, reason="no Redis is installed (apt-get install redis-server)")
def test_job_outlives_a_gcs_that_keeps_its_tables(
    tmp_path: Path, has_ray: None, watched: Callable[[JobFolder], None], undisturbed: Callable[..., str]
) -> None:
    cluster = RayCluster(HOSTS, redis=True)
    try:
        job = RayJob(tmp_path / "job", cluster)
        watched(job)
        job.wait_for_the_gate()
        cluster.restart_gcs()
        worker = job.identity("worker_2")
        kill(job.ancestor("worker_2", "ray::RayHost"))  # its return needs the restarted GCS
        assert worker.wait_for_exit(ENDS_S)
        job.wait_for("scheduler", "spare 3 .* takes slot 2 of worker 2", timeout_s=ENDS_S)
        job.wait_for("scheduler", "spare 2[. ].* is here", timeout_s=STARTS_S)
        assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)
    finally:
        cluster.close()
