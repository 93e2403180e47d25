"""``samebits run --on ray`` on a real Ray: whatever is killed, the job ends with the bits of one machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from samebits import config, spelling
from samebits.commands import recover
from samebits.commands.run import options
from samebits.commands.run.command import main
from samebits.commands.run.prepare import read_start
from samebits.errors import JobStoppedError, LockedError, SecretError, StoreError, UsageError
from samebits.hosts import ray_cluster as ray_hosts
from samebits.launcher import job_spec
from samebits.launcher.job_spec import JobSpec
from samebits.store.process_identity import ProcessIdentity
from tests.clusters.fake_ray import FakeActor, FakeRay
from tests.clusters.ray_cluster import HOSTS, REDIS, RayCluster
from tests.launcher.views import view
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
    monkeypatch.setattr(ray_hosts, "run", lambda *given, **more: called.append((*given, more)) or 7)
    words = ["--nnodes", "3", "-n", "2", "train.py", "--on", "gpu", "--fresh"]
    for fresh in ([], ["--fresh"]):
        assert main([*fresh, *words[:2], *spelled, *words[2:]]) == 7
    assert called == [(words, 3, 2, {"is_fresh": is_fresh}) for is_fresh in (False, True)]


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
def test_same_command_resumes_the_job_in_a_new_cluster(
    tmp_path: Path, has_ray: None, watched: Callable[[JobFolder], None], undisturbed: Callable[..., str]
) -> None:
    clusters = [RayCluster(HOSTS)]
    try:
        job = RayJob(tmp_path / "job", clusters[0])
        watched(job)
        job.wait_for_the_gate()
        names = [*(f"worker_{rank}" for rank in range(HOSTS + 1)), "scheduler"]
        processes = [job.identity(name) for name in names]
        job.process.kill()
        job.process.wait()
        clusters[0].close()  # as `ray stop` does
        assert all(one.wait_for_exit(ENDS_S) for one in processes)
        clusters.append(RayCluster(HOSTS))
        job.settings = {**job.settings, "RAY_ADDRESS": clusters[1].address}
        job.process = job.start()
        job.wait_for("scheduler", "resumes, term 2", timeout_s=STARTS_S)
        assert job.finish() == undisturbed(*TRAINED, workers=HOSTS)
        assert "its hosts resume it" in (job.folder / "run.out").read_text()
    finally:
        for one in clusters:
            one.close()


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
    if target == "driver":
        shown = (job.folder / "run.out").read_text()
        assert "already running: this command follows it" in shown and "samebits: job finished at step 60" in shown


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
    with pytest.raises(UsageError, match=r"has no file ray-job\.json, which records how it was started\. Fix: "):
        ray_hosts.require_same(tmp_path / "elsewhere", [], 1)


# --- on a fake Ray ----------------------------------------------------------------------------------------------------

WORDS = ["--nnodes", "3", "-n", "1", "train.py"]
SECRET = "open sesame, a long one"
STARTED = {"PATH": "/bin", "STEPS": "900", "CLUSTER_SECRET": SECRET, "TERM": "xterm"}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    ray.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "whole_environment", lambda: dict(STARTED))
    return ray


@pytest.fixture
def left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that leaves the files of a job on Ray in the folder, with a journal that shows this state."""

    def leave(**state: object) -> None:
        log_dir = tmp_path / "device" / "host0"
        log_dir.mkdir(parents=True, mode=0o700)
        record = {"words": WORDS, "hosts": 3}
        for name, content in (("ray-job.json", record), ("environment.json", STARTED)):
            (tmp_path / "device" / name).write_text(json.dumps(content))
        (log_dir / "ray-start").write_text("the first nonce")
        environment = {"WORKER_NUM": "3", "LOG_DIR": str(log_dir)}
        words = ("--on", "ray", *WORDS)
        job_spec.keep(log_dir, JobSpec(tmp_path, "python", "train.py", (), environment, words=words))
        monkeypatch.setattr(job_spec, "stored_job", lambda _: view(**state))

    return leave


def environment_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "device" / "environment.json").read_text())
    return found


def test_unfinished_job_resumes_in_a_new_cluster_with_its_own_environment(
    fake: FakeRay,
    left_behind: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left_behind(step=7)
    monkeypatch.setattr(
        config, "whole_environment", lambda: {"PATH": "/bin", "NEW": "x", "CLUSTER_SECRET": SECRET[::-1], "TERM": "vt"}
    )
    assert ray_hosts.run(WORDS, 3, 1) == 0
    assert fake.plans == [ray_hosts.HostPlan(str(tmp_path), rank, tuple(WORDS), "the first nonce") for rank in range(3)]
    assert environment_of(tmp_path) == STARTED
    said = capsys.readouterr().out
    assert f"{view()} is unfinished at step 7: its hosts resume it" in said
    assert "keeps the environment of its start; this command's differs in CLUSTER_SECRET, NEW and STEPS. Fix: " in said
    assert SECRET not in said and SECRET[::-1] not in said and "900" not in said


@pytest.mark.parametrize("state", [{"job_finished": True}, {"generation": 0, "step": 0}])
@pytest.mark.parametrize("is_fresh", [False, True])
def test_finished_job_and_one_that_never_began_are_started_anew(
    fake: FakeRay,
    left_behind: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, object],
    is_fresh: bool,
) -> None:
    left_behind(**({} if is_fresh else state))
    monkeypatch.setattr(config, "whole_environment", lambda: {"NEW": "x"})
    assert ray_hosts.run(["other.py"], 2, 1, is_fresh=is_fresh) == 0
    nonces = {one.nonce for one in fake.plans}
    assert len(fake.plans) == 2 and len(nonces) == 1 and "the first nonce" not in nonces
    assert all(one.is_fresh is is_fresh and one.words == ("other.py",) for one in fake.plans)
    secret = tmp_path / "device" / "cluster.secret"
    assert environment_of(tmp_path) == {"NEW": "x", "CLUSTER_SECRET_FILE": str(secret)} and secret.exists()


def test_unfinished_job_that_was_started_differently_or_has_lost_a_file_is_refused(
    fake: FakeRay, left_behind: Callable[..., None], tmp_path: Path
) -> None:
    left_behind(step=7)
    with pytest.raises(StoreError) as raised:
        ray_hosts.run(["other.py"], 1, 1)
    said = str(raised.value)
    assert f"the unfinished job in {tmp_path} was started as `--nnodes 3 -n 1 train.py` on 3 hosts, but this" in said
    assert "asks for `other.py` on 1 host. Fix: repeat the first command to resume that job at step 7, or " in said
    assert said.endswith("start over with --fresh, or start this job in another folder")
    (tmp_path / "device" / "environment.json").unlink()
    with pytest.raises(StoreError, match=r"environment\.json, which .* needs to resume, was removed\. Fix: restore"):
        ray_hosts.run(WORDS, 3, 1)
    assert not fake.actors and not fake.groups


def test_folder_of_an_unfinished_job_that_was_moved_does_not_resume(
    fake: FakeRay, left_behind: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "device", copy / "device")
    with pytest.raises(UsageError, match=f"was started in {tmp_path}, and does not resume in a copied or moved folder"):
        ray_hosts.run(WORDS, 3, 1, folder=copy)


def run_beside(fake: FakeRay, folder: Path, **options: Any) -> int:
    """Type the command again beside a running job."""
    name = ray_hosts.name_for(folder)
    fake.groups.add(name)
    for rank in range(3):
        plan = ray_hosts.HostPlan(str(folder), rank, tuple(WORDS), "")
        fake.actors[f"{name}-host{rank}"] = FakeActor(fake, plan)
    return ray_hosts.run(WORDS, 3, 1, **options)


def test_command_beside_a_running_job_shows_its_progress_and_names_changed_variables(
    fake: FakeRay,
    left_behind: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left_behind()
    log = tmp_path / "device" / "host0" / "run.log"
    log.write_text("step 1\nstep 2\n")
    monkeypatch.setattr(config, "whole_environment", lambda: {**STARTED, "CLUSTER_SECRET": SECRET[::-1], "TERM": "vt"})

    def goes_on() -> None:
        with log.open("a") as file:
            file.write("step 3\nstep")

    def ends() -> None:
        with log.open("a") as file:
            file.write(" 4\njob finished\n")
        fake.status = 7

    fake.status, fake.actions = None, [goes_on, ends]
    assert run_beside(fake, tmp_path) == 7
    first, differs, *shown = capsys.readouterr().out.splitlines()
    assert first == "samebits: the job is already running: this command follows it"
    assert "this command's differs in CLUSTER_SECRET. Fix" in differs
    assert SECRET not in differs and SECRET[::-1] not in differs
    assert shown == ["step 2", "step 3", "step 4", "job finished"]
    assert environment_of(tmp_path) == STARTED


def test_running_job_is_not_started_over(fake: FakeRay, left_behind: Callable[..., None], tmp_path: Path) -> None:
    left_behind()
    with pytest.raises(LockedError, match=r"is running\. Fix: leave --fresh out to follow it"):
        run_beside(fake, tmp_path, is_fresh=True)
    assert not fake.ended


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait_for_hosts_and_its_placement_group(
    fake: FakeRay, by: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_hosts, "_LOOK_S", 0.0)
    fake.has_room = False
    fake.actions = [lambda: None, lambda: os.kill(os.getpid(), by)]
    assert ray_hosts.run(["train.py"], 1, 2) == 128 + by
    assert not fake.actors and not fake.groups
    assert "s for 1 host of the Ray cluster with 2 CPU\n" in capsys.readouterr().out


def test_signal_ends_a_job_whose_first_host_has_no_place(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_hosts, "FIRST_ANSWER_S", 0.0)
    fake.status, fake.is_placed = None, False
    fake.actions = [lambda: os.kill(os.getpid(), signal.SIGINT)]
    assert ray_hosts.run(["train.py"], 2, 1) == 128 + signal.SIGINT
    assert fake.ended == ["host 0", "host 1", "the group"]
    assert "Ctrl-C: host 0 of the job has no place in the cluster" in capsys.readouterr().out


def test_signal_reaches_hosts_that_have_a_place_and_their_status_decides(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_hosts, "ANSWER_S", 0.0)
    fake.status = None

    def end() -> None:
        fake.status = JobStoppedError.exit_code

    fake.actions = [lambda: os.kill(os.getpid(), signal.SIGINT), lambda: None, end]
    assert ray_hosts.run(["train.py"], 2, 1) == JobStoppedError.exit_code
    assert [one.signals for one in fake.actors.values()] == [[signal.SIGINT]] * 2


# --- one host, without Ray --------------------------------------------------------------------------------------------


def host_in(folder: Path, rank: int, *, is_fresh: bool = False) -> ray_hosts.RayHost:
    """Return an actor that has not begun, with its folder's environment."""
    host = object.__new__(ray_hosts.RayHost)
    plan = ray_hosts.HostPlan(str(folder), rank, ("-n", "1", "train.py"), "nonce", is_fresh)
    vars(host).update(_plan=plan, _address="127.0.0.1", _child=None, _stopped_by=0)
    plan.environment_file.parent.mkdir(exist_ok=True)
    plan.environment_file.write_text('{"STEPS": "900"}')
    return host


@pytest.mark.parametrize("rank", [0, 1])
def test_host_recovers_what_an_earlier_actor_of_its_start_began_and_logs_the_output(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: list[list[str]] = []
    popen = subprocess.Popen

    def started(words: list[str], **options: Any) -> object:
        typed.append(words[3:])
        return popen([sys.executable, "-c", "import os; print('has', os.environ['STEPS'])"], **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    log_dir = tmp_path / "device" / f"host{rank}"
    assert host_in(tmp_path, rank, is_fresh=True)._once() == 0
    (log_dir / "start.json").touch()
    assert host_in(tmp_path, rank)._once() == 0
    file = f"file:{tmp_path}/device/scheduler-address"
    ours = ["--node-rank", str(rank), "--sched-host", file, "--die-with-me", "--ray-host"]
    assert typed == [["run", "--fresh", *ours, "-n", "1", "train.py"], ["recover", "--ray-host"]]
    assert (log_dir / "run.log").read_text() == "has 900\nhas 900\n"
    assert capsys.readouterr().out == ("has 900\nhas 900\n" if rank == 0 else "")


def test_recover_by_hand_is_refused_with_the_command_that_applies_the_stored_environment(
    left_behind: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["samebits"])
    monkeypatch.setattr(spelling, "_command", lambda: "samebits")
    again = "samebits run --on ray --nnodes 3 -n 1 train.py"
    with pytest.raises(UsageError, match=f"Fix: run `{again}` in that folder, which follows or resumes the job"):
        recover.main([])
    kept = job_spec.read(tmp_path / "device" / "host0")
    assert kept is not None and kept.continuing() == again
    assert kept.command(fresh=True) == again.replace("run", "run --fresh", 1)


def test_command_of_a_ray_host_is_stored_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("SPARE_NUM", "0")
    ours = ["--fresh", "--node-rank", "1", "--sched-host", "192.0.2.2", "--die-with-me", "--ray-host"]
    request = options.parse([*ours, *WORDS], {})
    assert request.fresh and read_start(request).start.words == ("--on", "ray", *WORDS)


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
