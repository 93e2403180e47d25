"""deploy/kubernetes: the output of kustomize is valid and agrees with the runtime."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from samebits import config
from samebits.core.causes.escalation import RestartScope, levels_of
from samebits.errors import LevelsSpentError
from samebits.exit_codes import codes_to_give_up_at
from samebits.settings_table import VARIABLES
from tests.clusters.documented import lines_in
from tests.system.processes import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "nvidia", "ascend", "ascend-ranktable", "spares")
VARIANTS = ("jobset", "trainjob", "kueue")
VERSIONS = ("1.28", "1.37")
NEWEST = VERSIONS[-1]
FINAL = [0, *codes_to_give_up_at()]
CUSTOM = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
"""The models in kubeflow_trainer_api of the kinds that Kubernetes itself does not know."""

needs_kustomize = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed on this machine: nothing renders kustomizations"
)


@cache
def rendered(folder: str) -> list[dict[str, Any]]:
    words = ["kubectl", "kustomize", str(FOLDER / folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def require_valid(text: str, version: str) -> None:
    """Validate each object once: most are the same in all overlays, and validation takes a second."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


def the(folder: str, kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in rendered(folder) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def settings_in(folder: str) -> dict[str, str]:
    (found,) = [
        one["data"]
        for one in rendered(folder)
        if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", "samebits-job")
    ]
    return dict(found)


@needs_kustomize
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_has_only_fields_known_to_kubernetes(overlay: str, version: str) -> None:
    for one in rendered(overlay):
        require_valid(json.dumps(one), version)


@needs_kustomize
def test_unknown_field_is_detected() -> None:
    wrong = the("cpu", "StatefulSet", "samebits-worker") | {"replicas": 4}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


@needs_kustomize
@pytest.mark.parametrize("folder", VARIANTS)
def test_variants_are_valid_for_their_controllers(folder: str) -> None:
    """A field that the model lacks is dropped by it."""
    from kubeflow_trainer_api import models  # takes seconds, so not when the tests are collected

    objects = rendered(folder)
    assert any(one["kind"] in CUSTOM for one in objects)
    for one in objects:
        if one["kind"] in CUSTOM:
            model = getattr(models, CUSTOM[one["kind"]]).from_dict(one)
            assert model is not None
            lost = missing_from(one, model.to_dict())
            assert lost == [], f"{one['kind']} {one['metadata']['name']}"
        else:
            require_valid(json.dumps(one), NEWEST)


def missing_from(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Return where ``found`` lacks or contradicts ``wanted``."""
    if isinstance(wanted, dict):
        there = found if isinstance(found, dict) else {}
        return [lost for key in wanted for lost in missing_from(wanted[key], there.get(key), f"{path}/{key}")]
    if isinstance(wanted, list):
        there = found if isinstance(found, list) and len(found) == len(wanted) else [None] * len(wanted)
        return [lost for i, one in enumerate(wanted) for lost in missing_from(one, there[i], f"{path}/{i}")]
    return [] if wanted == found else [path]


@needs_kustomize
@pytest.mark.parametrize("folder", [*OVERLAYS, *VARIANTS])
def test_every_variable_is_known_and_valid(folder: str) -> None:
    known = {variable.name for variable in VARIABLES}
    values = settings_in(folder)
    ours = {name: value for name, value in values.items() if name in known}
    assert set(values) - known == {"OMP_NUM_THREADS", "SCRIPT"}
    settings, warnings = config.read({**ours, "ROLE": "worker", "NODE_ID": "0"})
    assert warnings == []
    assert settings.probe_file is not None and settings.cluster_secret_file is not None


@needs_kustomize
def test_rank_table_is_where_its_variable_says() -> None:
    pod = the("ascend-ranktable", "StatefulSet", "samebits-worker")["spec"]["template"]["spec"]
    (table,) = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == "RANK_TABLE_FILE"]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "ranktable"]
    assert table == f"{mount['mountPath']}/hccl.json" and mount["readOnly"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "ranktable"]
    assert volume["hostPath"]["path"].startswith(f"{mount['mountPath']}/default.")


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_number_of_workers_equals_the_jobs_seats(overlay: str) -> None:
    values = settings_in(overlay)
    workers = the(overlay, "StatefulSet", "samebits-worker")["spec"]["replicas"]
    assert workers == int(values["WORKER_NUM"]) + int(values.get("SPARE_NUM", 0))


@needs_kustomize
@pytest.mark.parametrize("folder", [*OVERLAYS, *VARIANTS])
def test_every_pod_satisfies_the_runtimes_needs(folder: str) -> None:
    pods = list(pods_in(rendered(folder)))
    assert len(pods) == 2
    for pod in pods:
        (container,) = pod["containers"]
        assert pod["enableServiceLinks"] is False
        assert container["securityContext"]["runAsNonRoot"] is True
        commands = {
            name: container[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe", "readinessProbe")
        }
        assert commands == {
            "startupProbe": ["samebits", "probe", "alive"],
            "livenessProbe": ["samebits", "probe", "alive"],
            "readinessProbe": ["samebits", "probe", "ready"],
        }
        variables = {one["name"] for one in container["env"]}
        assert variables - {"RANK_TABLE_FILE"} <= {variable.name for variable in VARIABLES}
        volumes = {one["name"] for one in pod["volumes"]} | {"recovery", "checkpoints"}
        assert {one["name"] for one in container["volumeMounts"]} <= volumes


def pods_in(value: Any) -> Any:
    """Return every pod's spec at any depth."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        else:
            for one in value.values():
                yield from pods_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from pods_in(one)


@needs_kustomize
@pytest.mark.parametrize("folder", VARIANTS)
def test_restart_rules_match_the_exit_codes(folder: str) -> None:
    """Restart in place if that can help; otherwise the job fails, except for 0 and for a worker asked to leave."""
    for pod in pods_in(rendered(folder)):
        (container,) = pod["containers"]
        assert container["restartPolicy"] == "Never"
        (rule,) = container["restartPolicyRules"]
        assert rule == {"action": "Restart", "exitCodes": {"operator": "NotIn", "values": FINAL}}
    policies = list(values_of(rendered(folder), "podFailurePolicy"))
    assert len(policies) == 2
    for policy in policies:
        fails = [rule["onExitCodes"]["values"] for rule in policy["rules"] if rule["action"] == "FailJob"]
        next_level = LevelsSpentError.exit_code
        assert fails == [[next_level], [code for code in FINAL if code not in (0, next_level, 143)]]


def values_of(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        for name, one in value.items():
            if name == key:
                yield one
            yield from values_of(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from values_of(one, key)


@needs_kustomize
@pytest.mark.parametrize("folder", VARIANTS)
def test_job_level_is_a_new_job_and_hopeless_failures_are_not_retried(folder: str) -> None:
    (policy,) = values_of(rendered(folder), "failurePolicy")
    job_level, hopeless = policy["rules"]
    message = f"Container worker for pod default/x failed with exit code {LevelsSpentError.exit_code} matching FailJob"
    assert job_level["action"] == "RestartJobSet"
    assert [bool(re.fullmatch(one, message)) for one in job_level["onJobFailureMessagePatterns"]] == [True]
    assert not re.fullmatch(job_level["onJobFailureMessagePatterns"][0], message.replace("92", "87"))
    assert hopeless["action"] == "FailJobSet"
    assert policy["maxRestarts"] > 0


@needs_kustomize
@pytest.mark.parametrize("folder", [*OVERLAYS, *VARIANTS])
def test_levels_use_ascends_spelling(folder: str) -> None:
    """By the pod's labels and its annotation, passed to ``samebits keep``; a StatefulSet has no job to recreate."""
    templates = [one for one in values_of(rendered(folder), "template") if "containers" in one["spec"]]
    assert len(templates) == 2
    for template in templates:
        metadata, (container,) = template["metadata"], template["spec"]["containers"]
        told = {"ROLE": "worker", "NODE_ID": "0", "WORKER_NUM": "1"}
        for one in container["env"]:
            path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            found = re.fullmatch(r"metadata\.(labels|annotations)\['(pod-res|process-rec|recover-str)(.*)'\]", path)
            if found is not None:
                told[one["name"]] = metadata[found[1]][found[2] + found[3]]
        settings = config.read(told)[0]
        levels = levels_of(
            settings.recover_strategy.attempts, process=settings.process_recover, pod=settings.pod_rescheduling
        )
        assert tuple(levels) == (
            tuple(RestartScope) if folder in VARIANTS else (RestartScope.PROCESS, RestartScope.POD)
        )
        stays = ["--stay"] if folder in OVERLAYS else []
        assert container["command"][: 2 + len(stays)] == ["samebits", "keep", *stays]


@needs_kustomize
def test_commands_on_the_page_use_existing_names() -> None:
    lines = lines_in("kubernetes")
    (folder,) = [found[1] for one in lines if (found := re.fullmatch(r"kubectl apply -k deploy/kubernetes/(\w+)", one))]
    assert folder in OVERLAYS
    pods = {f"{one['metadata']['name']}-0" for one in rendered(folder) if one["kind"] == "StatefulSet"}
    assert {word for one in lines for word in re.findall(r"samebits-\w+-0", one)} <= pods
    (name, key) = next(found.groups() for one in lines if (found := re.search(r"secret generic (\S+) .*=(\S+?)=", one)))
    mounted = {one["secretName"] for one in values_of(rendered(folder), "secret")}
    assert mounted == {name}
    assert settings_in(folder)["CLUSTER_SECRET_FILE"].endswith(f"/{key}")
    (image,) = {one["image"].partition(":")[0] for pod in pods_in(rendered(folder)) for one in pod["containers"]}
    (build,) = [one for one in lines if one.startswith("podman build")]
    assert f" -t {image} " in build
    assert (REPOSITORY / "deploy" / "container" / "Containerfile").is_file()
