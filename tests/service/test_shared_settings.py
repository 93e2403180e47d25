"""Settings that decide whether ranks meet in a collective must be equal on all workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.errors import RefusedError
from tests.service.house import House


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LOSS_ANOMALY", "recompute", "LOSS_ANOMALY is recompute here and tell there"),
        ("CONSISTENCY", "majority:7", "CONSISTENCY's interval is 7 here and 50 there"),
    ],
)
def test_worker_with_another_value_is_refused_with_both(tmp_path: Path, name: str, value: str, said: str) -> None:
    house = House(tmp_path, workers=2)
    try:
        house.scheduler()
        house.environ[name] = value
        with pytest.raises(RefusedError, match=rf"{said}\. Start it with the job's"):
            house.agent("1").register()
        del house.environ[name]
        house.seated("0", "1")
    finally:
        house.close()
