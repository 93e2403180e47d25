"""The size of a StatefulSet by its ``scale`` subresource: the request as documented, and every way it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import UsageError
from runtime.ops.statefulset import MAX_ANSWER_BYTES, StatefulSet
from tests.clusters.api_server import PATH, ApiServer
from tests.clusters.test_kubernetes import FOLDER, NEWEST, needs_kustomize, rendered, require_valid, settings_in, the

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
        ((500, b"\x1b[2J\xff"), "status 500:  [2J"),
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
