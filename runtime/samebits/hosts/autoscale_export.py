"""Export the autoscaling policy as a HorizontalPodAutoscaler or a KEDA ScaledObject.

Limits, targets and times are those of ``samebits autoscale``. The gain of a worker has no counterpart there and is
omitted, as a comment in the manifest states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from samebits import strict_json
from samebits.errors import UsageError
from samebits.hosts.autoscale import Limits

KINDS = ("hpa", "keda", "adapter")
QUEUE_METRIC = "samebits_queue"
QUEUE_QUERY = 'max(samebits_worker_figure{figure="queue"})'
"""The metric of the dashboard page for the queue's length, from ``samebits.report(queue=…)``."""
DEFAULT_CPU = 0.8
_LONGEST_WINDOW_S, _LONGEST_PERIOD_S = 3600, 1800  # autoscaling/v2 allows no more


def manifest(kind: str, limits: Limits, *, target: str, prometheus: str, query: str, every_s: float) -> str:
    """Return the manifest as YAML.

    Args:
        kind: one of ``KINDS``.
        limits: limits, targets and times.
        target: the StatefulSet's name.
        prometheus: URL of the Prometheus server from which KEDA gets the queue's length.
        query: PromQL for the number of items waiting for all workers; "" to use the workers' reports.
        every_s: seconds between readings.

    Raises:
        UsageError: the policy has nothing that this kind of object can express.
    """
    if kind == "adapter":
        return _written({"externalRules": [_RULE]})
    if kind == "hpa":
        text = _written(_hpa(limits, target))
    else:
        if bool(limits.queue) != bool(prometheus) or (query and not prometheus):
            raise UsageError(
                "--export keda: --prometheus and --queue-per-worker need each other, and --query needs both. Fix: give "
                "both, or none"
            )
        text = _written(_keda(limits, target, prometheus, query or QUEUE_QUERY, every_s))
    return (
        "# by `samebits autoscale --export`: a removed pod gets SIGTERM, and its worker leaves at its next\n"
        "# commit. Whether a worker is worth its cost (--least-gain) is checked only by `samebits autoscale`.\n" + text
    )


_RULE: Mapping[str, Any] = {
    "seriesQuery": 'samebits_worker_figure{figure="queue",namespace!=""}',
    "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
    "name": {"as": QUEUE_METRIC},
    "metricsQuery": 'max(<<.Series>>{<<.LabelMatchers>>,figure="queue"})',
}
"""A rule of prometheus-adapter (its docs/config.md and docs/externalmetrics.md) for the HPA's queue."""


def _reference(target: str) -> dict[str, Any]:
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": target}


def _targets(limits: Limits) -> dict[str, int]:
    """Return the target percentages of a pod's requests by resource, with CPU as the default."""
    shares = {"cpu": limits.cpu, "memory": limits.memory}
    if not any(shares.values()) and not limits.queue:
        shares["cpu"] = DEFAULT_CPU
    return {name: max(1, round(share * 100)) for name, share in shares.items() if share}


def _behavior(limits: Limits) -> dict[str, Any]:
    """Return the scaling behaviour: grow at once and shrink slowly, by any amount, every ``settle_s``."""
    period_s = min(max(1, math.ceil(limits.settle_s)), _LONGEST_PERIOD_S)
    policies = [{"type": "Pods", "value": limits.most, "periodSeconds": period_s}]
    shrink_s = min(math.ceil(limits.shrink_after_s), _LONGEST_WINDOW_S)
    return {
        "scaleUp": {"stabilizationWindowSeconds": 0, "policies": policies},
        "scaleDown": {"stabilizationWindowSeconds": shrink_s, "policies": policies},
    }


def _hpa(limits: Limits, target: str) -> dict[str, Any]:
    metrics: list[dict[str, Any]] = [
        {
            "type": "Resource",
            "resource": {"name": name, "target": {"type": "Utilization", "averageUtilization": percent}},
        }
        for name, percent in _targets(limits).items()
    ]
    if limits.queue:
        average = {"type": "AverageValue", "averageValue": _quantity(limits.queue)}
        metrics.append({"type": "External", "external": {"metric": {"name": QUEUE_METRIC}, "target": average}})
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": target},
        "spec": {
            "scaleTargetRef": _reference(target),
            "minReplicas": limits.least,
            "maxReplicas": limits.most,
            "metrics": metrics,
            "behavior": _behavior(limits),
        },
    }


def _quantity(number: float) -> str:
    """Return a number as a Kubernetes quantity, in thousandths if it is not whole."""
    return f"{number:.0f}" if number == round(number) else f"{max(1, round(number * 1000))}m"


def _keda(limits: Limits, target: str, prometheus: str, query: str, every_s: float) -> dict[str, Any]:
    triggers: list[dict[str, Any]] = [
        {"type": name, "metricType": "Utilization", "metadata": {"value": str(percent)}}
        for name, percent in _targets(limits).items()
    ]
    if limits.queue:
        asked = {"serverAddress": prometheus, "query": query, "threshold": f"{limits.queue:.15g}"}
        triggers.append({"type": "prometheus", "metricType": "AverageValue", "metadata": asked})
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": target},
        "spec": {
            "scaleTargetRef": _reference(target),
            "minReplicaCount": limits.least,
            "maxReplicaCount": limits.most,
            "pollingInterval": max(1, round(every_s)),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(limits)}},
            "triggers": triggers,
        },
    }


def _written(value: Mapping[str, Any]) -> str:
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """Return maps and lists as YAML lines; texts are written as JSON, which is valid YAML (1.2.2, section 1.2)."""
    lines: list[str] = []
    rows = (
        [(f"{name}:", one) for name, one in value.items()] if isinstance(value, Mapping) else [("-", v) for v in value]
    )
    for head, one in rows:
        if isinstance(one, Mapping) and head == "-":
            first, *rest = _lines(one)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        elif isinstance(one, Mapping | list):
            lines += [head, *(f"  {line}" for line in _lines(one))]
        else:
            lines.append(f"{head} {strict_json.dumps(one)}")
    return lines
