"""Settings that decide whether ranks meet in a collective must be equal on all workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.errors import RefusedError
from tests.service.house import House


@pytest.mark.parametrize(
    ("name", "here", "there"), [("LOSS_ANOMALY", "recompute", "tell"), ("CONSISTENCY_EVERY", "7", "50")]
)
def test_worker_with_another_value_is_refused_with_both(tmp_path: Path, name: str, here: str, there: str) -> None:
    house = House(tmp_path, workers=2)
    try:
        house.scheduler()
        house.environ[name] = here
        with pytest.raises(RefusedError, match=rf"{name} is {here} here and {there} there\. Start it with the job's"):
            house.agent("1").register()
        del house.environ[name]
        house.seated("0", "1")
    finally:
        house.close()
