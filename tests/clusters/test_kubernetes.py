"""deploy/kubernetes: what kustomize makes of it is valid to the letter, and says what the runtime says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from runtime import config
from runtime.exit_codes import codes_to_give_up_at
from runtime.settings_table import VARIABLES
from tests.system.processes import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "nvidia", "ascend", "spares")
VARIANTS = ("jobset", "trainjob")
VERSIONS = ("1.28", "1.37")
NEWEST = VERSIONS[-1]
FINAL = [0, *codes_to_give_up_at()]
CUSTOM = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}

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
    """Each object once: most are the same in all overlays, and looking at one takes a second."""
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
def test_every_object_is_what_kubernetes_knows_and_nothing_else(overlay: str, version: str) -> None:
    for one in rendered(overlay):
        require_valid(json.dumps(one), version)


@needs_kustomize
def test_what_kubernetes_does_not_know_is_found() -> None:
    wrong = the("cpu", "StatefulSet", "samebits-worker") | {"replicas": 4}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


@needs_kustomize
@pytest.mark.parametrize("folder", VARIANTS)
def test_the_variants_are_what_their_controllers_know(folder: str) -> None:
    """A field that the model has no place for does not come back from it."""
    objects = rendered(folder)
    assert any(one["kind"] in CUSTOM for one in objects)
    for one in objects:
        if one["kind"] in CUSTOM:
            model = CUSTOM[one["kind"]].from_dict(one)
            assert model is not None
            lost = missing_from(one, model.to_dict())
            assert lost == [], f"{one['kind']} {one['metadata']['name']}"
        else:
            require_valid(json.dumps(one), NEWEST)


def missing_from(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Where ``found`` lacks, or has otherwise, what ``wanted`` has."""
    if isinstance(wanted, dict):
        there = found if isinstance(found, dict) else {}
        return [lost for key in wanted for lost in missing_from(wanted[key], there.get(key), f"{path}/{key}")]
    if isinstance(wanted, list):
        there = found if isinstance(found, list) and len(found) == len(wanted) else [None] * len(wanted)
        return [lost for i, one in enumerate(wanted) for lost in missing_from(one, there[i], f"{path}/{i}")]
    return [] if wanted == found else [path]


@needs_kustomize
@pytest.mark.parametrize("folder", [*OVERLAYS, *VARIANTS])
def test_every_variable_is_one_and_its_value_can_be_read(folder: str) -> None:
    known = {variable.name for variable in VARIABLES}
    values = settings_in(folder)
    ours = {name: value for name, value in values.items() if name in known}
    assert set(values) - known == {"OMP_NUM_THREADS", "SCRIPT"}
    settings, warnings = config.read({**ours, "ROLE": "worker", "NODE_ID": "0"})
    assert warnings == []
    assert settings.probe_file is not None and settings.cluster_secret_file is not None


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_there_are_as_many_workers_as_the_job_has_seats(overlay: str) -> None:
    values = settings_in(overlay)
    workers = the(overlay, "StatefulSet", "samebits-worker")["spec"]["replicas"]
    assert workers == int(values["WORKER_NUM"]) + int(values.get("SPARE_NUM", 0))


@needs_kustomize
@pytest.mark.parametrize("folder", [*OVERLAYS, *VARIANTS])
def test_every_pod_is_one_that_the_runtime_can_live_in(folder: str) -> None:
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
        assert variables <= {variable.name for variable in VARIABLES}
        volumes = {one["name"] for one in pod["volumes"]} | {"recovery", "checkpoints"}
        assert {one["name"] for one in container["volumeMounts"]} <= volumes


def pods_in(value: Any) -> Any:
    """Every pod's spec, however deep it lies."""
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
def test_the_rules_of_restarting_are_the_exit_codes(folder: str) -> None:
    """In place where starting again can help, else the whole job fails, but for 0 and for who was asked to leave."""
    for pod in pods_in(rendered(folder)):
        (container,) = pod["containers"]
        assert container["restartPolicy"] == "Never"
        (rule,) = container["restartPolicyRules"]
        assert rule == {"action": "Restart", "exitCodes": {"operator": "NotIn", "values": FINAL}}
    policies = list(values_of(rendered(folder), "podFailurePolicy"))
    assert len(policies) == 2
    for policy in policies:
        fails = next(rule for rule in policy["rules"] if rule["action"] == "FailJob")
        assert fails["onExitCodes"]["values"] == [code for code in FINAL if code not in (0, 143)]


def values_of(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        for name, one in value.items():
            if name == key:
                yield one
            else:
                yield from values_of(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from values_of(one, key)


def test_the_script_around_a_process_gives_up_where_starting_again_cannot_help() -> None:
    (listed,) = re.findall(r"^    ([\d|]+)\)$", (FOLDER / "base" / "keep.sh").read_text(), re.MULTILINE)
    assert [int(code) for code in listed.split("|")] == FINAL


def test_the_script_around_a_process_hands_on_its_status_and_its_signal(tmp_path: Path) -> None:
    keep = ["sh", str(FOLDER / "base" / "keep.sh")]
    assert subprocess.run([*keep, "sh", "-c", "exit 77"], timeout=60, check=False).returncode == 77
    waits = "trap 'sleep 0.2; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen([*keep, "sh", "-c", waits], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.terminate()
        assert child.wait(60) == 143
    with subprocess.Popen([*keep, "sh", "-c", "exit 87"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and b"ended with status 87" in child.stdout.readline()
        assert child.poll() is None
        child.terminate()
        assert child.wait(60) == 0
