"""A worker's wait for all seats before the first generation survives disconnections."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.errors import SchedulerLeftError
from samebits.service.agent import Agent
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


class Racing(Agent):
    """An agent whose main thread commits just after the control thread has read the number of commits."""

    made = 3
    races = held_back = False

    @property  # type: ignore[override]
    def commits(self) -> int:
        read = self.made
        if self.races:
            self.races = False
            self.made += 1
            self.held_back = self.stops_here
        return read

    @commits.setter
    def commits(self, made: int) -> None: ...


def test_commit_that_is_made_while_the_next_one_is_named_is_not_trained_past(tmp_path: Path) -> None:
    """The scheduler may agree on the named commit, so no later one may be made before it has answered."""
    house = House(tmp_path, workers=1)
    agent = Racing(house.settings("worker", "0"), "test", "cpu")
    agent.races = True
    agent._stop_after(0)
    assert agent.held_back and agent._stops_after == agent.made == 4
    agent._stop_after(5)
    assert not agent.stops_here, "all stop after a later commit"
    agent._client.close()
