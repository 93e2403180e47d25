"""``samebits autoscale --export``: the output is valid Kubernetes YAML and agrees with the policy."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml

from samebits.commands.autoscale import main
from samebits.dashboard.web_app import exposition
from samebits.errors import UsageError
from tests.clusters.test_kubernetes import NEWEST, VERSIONS, require_valid

BOUNDS = ["--least", "2", "--most", "8"]
QUEUE = ["--queue-per-worker", "100", "--prometheus", "http://prometheus:9090", "--query", 'sum(jobs{of="a \\"b\\""})']

Shape = dict[str, Any] | type | list[Any]
BEHAVIOR: Shape = {
    side: {"stabilizationWindowSeconds": int, "policies": [{"type": str, "value": int, "periodSeconds": int}]}
    for side in ("scaleUp", "scaleDown")
}
SCALED_OBJECT: Shape = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "scaleTargetRef": {"apiVersion": str, "kind": str, "name": str},
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "pollingInterval": int,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": BEHAVIOR}},
        "triggers": [{"type": str, "metricType": str, "metadata": {str: str}}],
    },
}
"""The fields in use of KEDA's definition (keda.sh/v1alpha1, ScaledObject) with their types.

Compared with config/crd/bases/keda.sh_scaledobjects.yaml of kedacore/keda at 8b4f083 (20 August 2026).
"""


def exported(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["--export", *words, *BOUNDS]) == 0
    (found,) = yaml.safe_load_all(capsys.readouterr().out)
    return dict(found)


def require_shape(found: Any, shape: Any, where: str = "") -> None:
    """Require exactly these fields, of these types."""
    if isinstance(shape, type):
        assert type(found) is shape, where
    elif isinstance(shape, list):
        assert isinstance(found, list) and found, where
        for one in found:
            require_shape(one, shape[0], f"{where}[]")
    elif str in shape:
        assert all(type(name) is str and type(value) is str for name, value in found.items()), where
    else:
        assert found.keys() == shape.keys(), where
        for name, inner in shape.items():
            require_shape(found[name], inner, f"{where}.{name}")


@pytest.mark.parametrize("version", VERSIONS)
def test_hpa_has_only_fields_known_to_kubernetes(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = exported(capsys, "hpa", "--cpu", "0.75", "--memory", "0.9", "--shrink-after", "86400")
    require_valid(json.dumps(found), version)
    spec = found["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "samebits-worker"}
    told = {one["resource"]["name"]: one["resource"]["target"]["averageUtilization"] for one in spec["metrics"]}
    assert told == {"cpu": 75, "memory": 90}
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 3600, "Kubernetes accepts no longer one"
    assert spec["behavior"]["scaleUp"]["policies"] == [{"type": "Pods", "value": 8, "periodSeconds": 30}]


def test_target_defaults_to_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    (metric,) = exported(capsys, "hpa")["spec"]["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}


def test_unknown_field_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = exported(capsys, "hpa")
    wrong["spec"]["minReplica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_keda_object_has_the_queue_and_other_targets(capsys: pytest.CaptureFixture[str]) -> None:
    found = exported(capsys, "keda", *QUEUE, "--cpu", "0.5", "--target", "other")
    require_shape(found, SCALED_OBJECT)
    assert (found["apiVersion"], found["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    cpu, queue = found["spec"]["triggers"]
    assert (cpu["type"], cpu["metadata"]) == ("cpu", {"value": "50"})
    assert queue["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": QUEUE[-1],
        "threshold": "100",
    }
    assert found["spec"]["scaleTargetRef"]["name"] == "other"
    (alone,) = exported(capsys, "keda", *QUEUE)["spec"]["triggers"]
    assert alone["type"] == "prometheus"


@pytest.mark.parametrize(("given", "written"), [("100", "100"), ("0.25", "250m"), ("1.5", "1500m"), ("1e6", "1000000")])
def test_hpa_reads_the_queue_from_prometheus_adapter(
    given: str, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = exported(capsys, "hpa", "--queue-per-worker", given)
    require_valid(json.dumps(found), NEWEST)
    (queue,) = found["spec"]["metrics"]
    assert queue["external"]["target"] == {"type": "AverageValue", "averageValue": written}
    (rule,) = exported(capsys, "adapter")["externalRules"]
    require_shape(
        rule,
        {
            "seriesQuery": str,
            "resources": {"overrides": {"namespace": {"resource": str}}},
            "name": {"as": str},
            "metricsQuery": str,
        },
    )
    assert rule["name"]["as"] == queue["external"]["metric"]["name"]


def test_queue_metric_name_matches_the_exported_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    state = {"job": None, "linked": True, "recovery_count": 0, "losses": 0, "buckets_s": {}, "goodput": None}
    row = {"role": "worker", "node": "0", "slot": 0, "host": "a", "state": "alive", "step": 3}
    ranks = [{**row, "figures": {"queue": 7.0}}]
    text = exposition({**state, "committed_step": None, "recoveries": [], "ailments": [], "ranks": ranks})
    assert 'samebits_worker_figure{node="0",slot="0",figure="queue"} 7.0' in text
    (trigger,) = exported(capsys, "keda", *QUEUE[:4])["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'max(samebits_worker_figure{figure="queue"})'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hpa", "--least", "3", "--most", "2"], "expected 1 or more, with --least not above --most"),
        (["hpa"], "--least 0, --most 0"),
        (["keda", *BOUNDS, "--queue-per-worker", "5"], "need each other"),
        (["keda", *BOUNDS, "--query", "x", "--prometheus", "http://p"], "need each other"),
        (["hpa", *BOUNDS, "--cpu", "1.5"], "expected shares from 0 to 1"),
    ],
)
def test_invalid_arguments_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match="Fix: ") as refused:
        main(["--export", *words])
    assert said in str(refused.value)


def test_name_invalid_in_kubernetes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--export", "hpa", *BOUNDS, "--target", "a: b"])
    assert "expected lower-case letters" in capsys.readouterr().err
