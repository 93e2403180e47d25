"""``samebits.report``: accepted values, and which are kept."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import samebits
from samebits.core.reports import Figure
from samebits.errors import UsageError
from samebits.training.process import context
from samebits.training.process.job_status import MOST


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    agent = SimpleNamespace(figures=())
    monkeypatch.setattr(context, "_process", SimpleNamespace(agent=agent))
    yield agent


def test_newest_number_of_each_name_is_kept(agent: Any) -> None:
    samebits.report(queue=12, pace=torch.tensor([2.5]))
    samebits.report(queue=11)
    assert agent.figures == (Figure("queue", 11.0), Figure("pace", 2.5))


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"queue": "many"}, "it is not a number"),
        ({"queue": torch.ones(2)}, "it is not a number"),
        ({"queue": None}, "it is not a number"),
        ({"queue": 10**400}, "it is not a number"),
        ({"queue": float("nan")}, "expected a finite number"),
        ({"queue": float("inf")}, "expected a finite number"),
        ({"cpu": 1.0}, "by itself"),
        ({"x" * 41: 1.0}, "at most 40 characters"),
        ({"a\nb": 1.0}, "under another name"),
        ({"\ud800": 1.0}, "under another name"),
        ({"queue": Decimal("1e400")}, "expected a finite number"),
        ({"queue": "\ud800"}, "it is not a number"),
        ({f"x{number}": 1.0 for number in range(MOST + 1)}, "found 15 names, expected at most 14"),
    ],
)
def test_invalid_value_is_refused_and_changes_nothing(agent: Any, figures: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=r"^samebits\.report.*Fix: ") as refused:
        samebits.report(**figures)
    assert said in str(refused.value)
    str(refused.value).encode()
    assert agent.figures == ()


def test_report_before_init_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_process", None)
    with pytest.raises(UsageError, match=r"samebits\.init"):
        samebits.report(queue=1)
