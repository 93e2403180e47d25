"""The Grafana dashboard and the alert rules use only existing metrics and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from samebits.config import Settings
from samebits.dashboard.watching import JobWatch
from samebits.dashboard.web_app import exposition

PLACE = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
METRIC = re.compile(r"\bsamebits_\w+")


@pytest.fixture
def samples(make_folder: Callable[..., Settings]) -> dict[str, set[str]]:
    """Return the labels of every sample's name."""
    watch = JobWatch(make_folder(), None)
    watch.look()
    families = text_string_to_metric_families(exposition(watch.state()))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_grafana_dashboard_uses_existing_metrics(samples: dict[str, set[str]]) -> None:
    board = json.loads((PLACE / "grafana.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(board["panels"]) == len({panel["id"] for panel in board["panels"]}) == 10
    for target in targets:
        (name,) = set(METRIC.findall(target["expr"]))
        assert name in samples
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= samples[name]


def test_alert_rules_use_existing_metrics(samples: dict[str, set[str]]) -> None:
    (group,) = yaml.safe_load((PLACE / "alerts.yml").read_text())["groups"]
    assert len(group["rules"]) == len({rule["alert"] for rule in group["rules"]}) == 7
    for rule in group["rules"]:
        assert set(METRIC.findall(rule["expr"])) <= samples.keys()
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")
    scrape = yaml.safe_load((PLACE / "prometheus.yml").read_text())
    assert scrape["rule_files"] == ["alerts.yml"]
