"""The size of a StatefulSet by its ``scale`` subresource: the request as documented, and every way it is refused."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits import config
from samebits.errors import UsageError
from samebits.ops import scaling
from samebits.ops.statefulset import MAX_ANSWER_BYTES, StatefulSet
from tests.clusters.api_server import PATH, ApiServer
from tests.clusters.test_kubernetes import FOLDER, NEWEST, needs_kustomize, rendered, require_valid, settings_in, the
from tests.ops.shell_job import UNTIL_TOLD, ShellJob
from tests.system.processes import REPOSITORY

NAME = "samebits-worker"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path)
    yield made
    made.close()


def workers(server: ApiServer, name: str = NAME) -> StatefulSet:
    return StatefulSet.of_this_pod(name, server.environment, server.folder)


def test_a_size_is_read_and_changed(server: ApiServer) -> None:
    found = workers(server)
    assert found.size() == 2
    found.scale(5)
    assert (server.replicas, found.size()) == (5, 5)
    found.scale(0)
    assert found.size() == 0, "a number that is 0 is left out of the answer"
    assert server.asked[:2] == [("GET", PATH), ("PATCH", PATH)]
    require_valid(json.dumps({**server.scale(), "metadata": {"name": NAME}}), NEWEST)


def test_a_token_that_changes_is_read_anew(server: ApiServer) -> None:
    found, token = workers(server), server.folder / "token"
    right = token.read_text()
    token.write_text("an old one")
    with pytest.raises(UsageError, match=r"status 401: Unauthorized. Fix: its service account"):
        found.size()
    token.write_text(right)
    assert found.size() == 2


def test_one_that_is_not_there_is_said(server: ApiServer) -> None:
    with pytest.raises(UsageError, match=r"status 404: statefulsets.apps not found"):
        workers(server, "other").scale(3)
    assert server.replicas == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"{}"), "answered no Scale"),
        ((200, b'{"spec": {"replicas": "7"}}'), "answered no Scale"),
        ((200, b"[" * 100_000), "answered no Scale"),
        ((200, b'{"spec":' + b" " * (MAX_ANSWER_BYTES + 1) + b'{"replicas": 3}}'), "answered no Scale"),
        ((200, b'{"spec": {"replicas": 9}}'), "asked for 3 pods, and the API server says 9"),
        ((500, b"\x1b[2J\xff"), "status 500: \\u001b[2J"),
    ],
    ids=["empty", "text", "deep", "long", "other", "no JSON"],
)
def test_what_is_no_answer_is_said_and_counts_for_nothing(
    server: ApiServer, answer: tuple[int, bytes], said: str
) -> None:
    server.answer = answer
    with pytest.raises(UsageError) as refused:
        workers(server).scale(3)
    assert said in str(refused.value) and str(refused.value).isprintable()


def test_who_has_another_certificate_is_told_nothing(server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = ApiServer(tmp_path / "b")
    (server.folder / "ca.crt").write_bytes((other.folder / "ca.crt").read_bytes())
    with pytest.raises(UsageError, match=r"does not answer .SSLCertVerificationError"):
        workers(server).size()
    other.close()
    assert server.asked == []


def test_who_is_in_no_cluster_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no pod with a service account.* Fix: run it in the cluster"):
        StatefulSet.of_this_pod(NAME, {}, tmp_path)
    there = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(UsageError, match=r"no pod with a service account"):
        StatefulSet.of_this_pod(NAME, there, tmp_path)


def test_a_size_that_it_has_already_is_neither_asked_for_nor_kept(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(scaling, "decide_once", lambda settings, text: kept.append(text))
    bring_to = scaling.of_statefulset(workers(server), config.read({"WORKER_NUM": "2"}, role_required=False)[0])
    for _ in range(3):
        bring_to(4, "the queue is 200% of its target")
    assert [method for method, _ in server.asked] == ["GET", "PATCH", "GET", "GET"]
    assert kept == ["statefulset samebits-worker: 2 → 4 pods: the queue is 200% of its target"]


@pytest.mark.system
@pytest.mark.thorough
def test_a_pod_that_knows_only_its_environment_sizes_the_job(server: ApiServer, tmp_path: Path) -> None:
    """The test is the cluster: what the StatefulSet is to have it starts, or has leave."""
    folder, pod = tmp_path / "a job", tmp_path / "pod"
    folder.mkdir(), pod.mkdir()
    job = ShellJob(folder, WORKER_NUM="1", MIN_WORKER_NUM="1", MAX_WORKER_NUM="3")
    try:
        server.replicas = 1
        (folder / "queue").write_text("30")
        shell = job.run("--reports", "queue", *UNTIL_TOLD)
        job.wait_view(lambda view: view.alive == 1 and "queue" in view.workers[0].figures)
        account = "mount -t tmpfs t /run && mkdir -p /run/secrets/kubernetes.io && ln -s "
        account += f"'{server.folder}' /run/secrets/kubernetes.io/serviceaccount"  # in a /run of its own
        words = [sys.executable, "-P", "-m", "samebits", "autoscale", "--statefulset", NAME, "--every", "0.2"]
        words += ["--queue-per-worker", "15", "--settle", "0", "--shrink-after", "0.5", "--least-gain", "0"]
        scaler = job.shell(
            *("unshare", "--mount", "sh", "-c", f'{account} && exec "$@"', "pod", *words),
            folder=pod,
            **job.settings,
            **server.environment,
            PYTHONPATH=str(REPOSITORY),
        )
        scaler.wait_for(r"1 → 2 workers: the queue is 200% of its target\n")
        scaler.wait_until(lambda: server.replicas == 2)
        assert job.tool("scale", "--add", "1").end() == 0
        (folder / "queue.new").write_text("0")
        (folder / "queue.new").rename(folder / "queue")
        job.wait_view(lambda view: view.alive == view.world_size == 2)
        scaler.wait_until(lambda: server.replicas == 1)
        assert job.tool("scale", "--remove", "1").end() == 0
        job.wait_view(lambda view: view.alive == view.world_size == 1)
        scaler.send(signal.SIGTERM)
        scaler.end()
        job.let_finish()
        assert shell.end() == 0, shell.text
        history = job.tool("history")
        assert history.end() == 0 and "statefulset samebits-worker: 1 → 2 pods: the queue is 200%" in history.text
    finally:
        left = job.close()
    assert not left, f"left behind: {left}\n{job.tails()}"


# ---- deploy/kubernetes/autoscale


@needs_kustomize
def test_the_autoscalers_pod_may_change_the_size_of_the_workers_and_nothing_else() -> None:
    for one in rendered("autoscale"):
        require_valid(json.dumps(one), NEWEST)
    (rule,) = the("autoscale", "Role", "samebits-autoscaler")["rules"]
    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["statefulsets/scale"],
        "resourceNames": [the("autoscale", "StatefulSet", NAME)["metadata"]["name"]],
        "verbs": ["get", "patch"],
    }
    pod = the("autoscale", "Deployment", "samebits-autoscaler")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "samebits-autoscaler" and pod["automountServiceAccountToken"] is True
    (container,) = pod["containers"]
    assert container["command"][2:] == ["samebits", "autoscale", "--statefulset", NAME]
    values = settings_in("autoscale")
    assert int(values["MIN_WORKER_NUM"]) < int(values["WORKER_NUM"]) < int(values["MAX_WORKER_NUM"])
    assert (FOLDER / "autoscale" / "kustomization.yaml").exists()
