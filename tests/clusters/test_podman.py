"""deploy/kubernetes' pods run by podman: a process is restarted, then its container, with one machine's bits.

What podman 4.3 lacks of Kubernetes is replaced: the pod's own address in SCHED_BIND, the Service's name in /etc/hosts,
a word of the command that is a variable of the ConfigMap, and probes, which the test runs.
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import podman
from tests.clusters.podman import IMAGE, NETWORK, SCHEDULER_ADDRESS, Podman, pods_of, wait_until
from tests.clusters.test_kubernetes import needs_kustomize, the
from tests.system.job import PROBE
from tests.system.probe import gate_of
from tests.system.processes import REPOSITORY

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.timeout(600)]

OVERLAY = "cpu"
TRAINED = ("--steps", "60", "--interval", "10")
MIDDLE = 30
SCHEDULER, WORKERS = "samebits-scheduler-0-scheduler", ("samebits-worker-0-worker", "samebits-worker-1-worker")
SCRIPT = """\
import runpy, sys
sys.path.insert(0, {repository!r})
sys.argv[1:] = {arguments!r}
runpy.run_path({probe!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def can_run_pods(can_have_hosts: None) -> None:
    why_not = podman.missing()
    if why_not:
        pytest.skip(f"podman runs no pod on this machine: {why_not}")


class Pods:
    """A job of two workers with each process in a pod of the overlay."""

    def __init__(self, folder: Path, engine: Podman) -> None:
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.engine = engine
        arguments = [*TRAINED, "--gates", str(MIDDLE), "--marks", str(self.marks)]
        script = SCRIPT.format(repository=str(REPOSITORY), arguments=arguments, probe=str(PROBE))
        (self.marks / "train.py").write_text(script)
        settings = copy.deepcopy(the(OVERLAY, "ConfigMap", "samebits-job"))
        settings["data"] |= {"WORKER_NUM": "2", "SCRIPT": str(self.marks / "train.py")}
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "samebits-secret"},
            "data": {"cluster-secret": base64.b64encode(b"a secret of more than sixteen bytes").decode()},
        }
        engine.run("network", "create", "--subnet", NETWORK, "samebits")
        self.play([settings, secret], "scheduler", 1, "--ip", SCHEDULER_ADDRESS)
        self.play([settings], "worker", len(WORKERS))

    def play(self, objects: list[dict[str, Any]], role: str, replicas: int, *options: str) -> None:
        statefulset = copy.deepcopy(the(OVERLAY, "StatefulSet", f"samebits-{role}"))
        statefulset["spec"]["replicas"] = replicas
        annotations = statefulset["spec"]["template"]["metadata"]["annotations"]
        annotations["recover-strategy"] = "recover:1,pod:1,dump"
        pods = pods_of(statefulset, self.marks)
        for pod in pods:
            pod["spec"]["hostAliases"] = [{"ip": SCHEDULER_ADDRESS, "hostnames": ["samebits-scheduler"]}]
            for container in pod["spec"]["containers"]:
                script = str(self.marks / "train.py")
                command = [script if word == "$(SCRIPT)" else word for word in container["command"]]
                container |= {"image": IMAGE, "imagePullPolicy": "Never", "command": command}
                for variable in container["env"]:
                    if variable["name"] == "SCHED_BIND":
                        variable.pop("valueFrom")
                        variable["value"] = SCHEDULER_ADDRESS
        self.engine.play([*objects, *pods], *options)

    def log(self, container: str) -> str:
        return self.engine.run("logs", container, may_fail=True)

    def wait_for(self, container: str, pattern: str, times: int = 1) -> None:
        wait_until(
            lambda: len(re.findall(pattern, self.log(container))) >= times,
            f"{pattern!r}, {times} times, in {container}'s log",
            self.tails,
        )

    def tails(self) -> str:
        return "\n".join(f"--- {one}\n{self.log(one)[-2000:]}" for one in (SCHEDULER, *WORKERS))

    def kill(self, container: str) -> None:
        """kill -9 the process that the container's first one keeps."""
        kill = "for child in $(cat /proc/1/task/1/children); do kill -9 $child; done"
        self.engine.run("exec", container, "sh", "-c", kill)

    def restarts(self, container: str) -> int:
        return int(self.engine.run("inspect", "--format", "{{.RestartCount}}", container))

    def is_ready(self, container: str) -> bool:
        """Run the command of the pod's readiness probe."""
        return self.engine.status("exec", container, "samebits", "probe", "ready") == 0

    def sha256(self) -> str:
        found = {one: re.findall(r"sha256=([0-9a-f]{64})", self.log(one)) for one in WORKERS}
        assert all(found.values()), self.tails()
        (hashed,) = {hashes[-1] for hashes in found.values()}
        return str(hashed)


@pytest.fixture
def pods(tmp_path: Path, can_run_pods: None) -> Iterator[Pods]:
    with Podman() as engine:
        yield Pods(tmp_path, engine)


@needs_kustomize
def test_process_then_its_container_is_restarted_and_no_other(pods: Pods, undisturbed: Callable[..., str]) -> None:
    gate_of(pods.marks, 0).touch()
    for worker in WORKERS:
        pods.wait_for(worker, f"waits at the gate of step {MIDDLE}")
        assert pods.is_ready(worker), pods.tails()
    pods.kill(WORKERS[1])
    pods.wait_for(WORKERS[1], "worker 1: process level, attempt 1 of 1: started again in its place after SIGKILL")
    pods.wait_for(WORKERS[1], r"samebits worker 1: seated", times=2)
    pods.kill(WORKERS[1])  # soon: a seat held for a minute would reset the escalation
    pods.wait_for(WORKERS[1], "worker 1: pod level, attempt 1 of 1, as 1 attempt at the process level failed")
    pods.wait_for(WORKERS[1], r"samebits worker 1: seated", times=3)
    assert [pods.restarts(one) for one in (SCHEDULER, *WORKERS)] == [0, 0, 1]
    history = pods.engine.run("exec", SCHEDULER, "sh", "-c", "SCHED_HOST=$SCHED_BIND samebits history")
    assert "worker 1: process level, attempt 1 of 1" in history
    assert "worker 1: pod level, attempt 1 of 1" in history
    gate_of(pods.marks, MIDDLE).touch()
    for worker in WORKERS:
        pods.wait_for(worker, "ended with status 0, not restarted")
    assert pods.sha256() == undisturbed(*TRAINED, workers=2)
