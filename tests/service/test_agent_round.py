"""A worker's wait for all seats before the first generation survives disconnections."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.errors import SchedulerLeftError
from tests.service.house import PATIENCE_S, House


@pytest.mark.parametrize("restarts", [False, True])
def test_worker_waits_until_all_have_a_seat(tmp_path: Path, restarts: bool) -> None:
    house = House(tmp_path, workers=2)
    try:
        served = house.scheduler()
        (first,) = house.seated("0")
        waiting = house.pool.submit(first.wait_for_round)
        if restarts:
            assert house.service is not None
            house.service.abandon()
            with pytest.raises(SchedulerLeftError):
                served.result(PATIENCE_S)
            house.scheduler()
        assert not waiting.done()
        (second,) = house.seated("1")
        house.pool.submit(second.wait_for_round).result(PATIENCE_S)
        waiting.result(PATIENCE_S)
    finally:
        house.close()
