"""A lease that is learned, beside the fixed one: how soon a death is seen, how often the living are taken for dead."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from samebits.core.messages import Activity
from samebits.core.suspicion import FEWEST, MOST_LEASES, Arrivals
from tests.core.house import House, policy

FIXED_S, INTERVAL_S = 5.0, 1.0
HOURS = 20
SEED = 28


def patience(gaps: list[float]) -> float:
    arrivals = Arrivals()
    for gap_s in gaps:
        arrivals.take(gap_s)
    return arrivals.patience_s(INTERVAL_S, FIXED_S)


def test_until_enough_is_known_it_is_the_fixed_one() -> None:
    assert patience([1.0] * (FEWEST - 1)) == FIXED_S
    assert patience([1.0] * FEWEST) < FIXED_S


def test_it_follows_the_gaps_and_keeps_its_bounds() -> None:
    assert patience([0.1] * 50) == 2 * INTERVAL_S
    assert patience([1.0, 4.0] * 100) == MOST_LEASES * FIXED_S
    calm, restless = patience([1.0] * 100), patience([0.7, 1.3] * 100)
    assert 2 * INTERVAL_S <= calm < restless < FIXED_S
    assert patience([4.0] * 20 + [1.0] * 300) == pytest.approx(calm, rel=0.01), "what was long ago fades"


# ---- compared: false alarms an hour, and how long after its last heartbeat a dead node is lost


@dataclass(frozen=True)
class Told:
    """Of one network and one detector."""

    alarms_an_hour: float
    delay_s: float


def calm(draw: random.Random) -> float:
    return INTERVAL_S + draw.expovariate(1 / 0.01)


def lossy(draw: random.Random) -> float:
    """A tenth of the heartbeats never arrives."""
    gap_s = calm(draw)
    while draw.random() < 0.1:
        gap_s += calm(draw)
    return gap_s


def paused(draw: random.Random) -> float:
    """A loaded machine: every minute or so a pause of three seconds."""
    return calm(draw) + (3.0 if draw.random() < 1 / 60 else 0.0)


def compare(gap: Callable[[random.Random], float], *, learned: bool) -> Told:
    draw, arrivals, now_s, alarms, waits = random.Random(SEED), Arrivals(), 0.0, 0, []
    while now_s < 3600 * HOURS:
        wait_s = arrivals.patience_s(INTERVAL_S, FIXED_S) if learned else FIXED_S
        gap_s = gap(draw)
        alarms, now_s = alarms + (gap_s > wait_s), now_s + gap_s
        waits.append(wait_s)
        arrivals.take(gap_s)
    return Told(alarms / HOURS, sum(waits) / len(waits))


def test_compared_with_the_fixed_lease() -> None:
    found = {gap.__name__: (compare(gap, learned=False), compare(gap, learned=True)) for gap in (calm, lossy, paused)}
    print(f"\n{'network':8}  {'fixed: alarms/h':>16} {'delay s':>8}  {'phi: alarms/h':>14} {'delay s':>8}")
    for name, (fixed, phi) in found.items():
        left = f"{fixed.alarms_an_hour:16.2f} {fixed.delay_s:8.2f}"
        print(f"{name:8}  {left}  {phi.alarms_an_hour:14.2f} {phi.delay_s:8.2f}")
    assert found["calm"][1].alarms_an_hour == 0 and found["calm"][1].delay_s <= FIXED_S / 2
    assert found["lossy"][1].delay_s < FIXED_S
    assert all(fixed.alarms_an_hour <= 1 for fixed, _ in found.values())
    assert found["paused"][1].alarms_an_hour > 10, "why it is no default"


# ---- in the scheduler


@pytest.mark.parametrize(("accrues", "lost_after_s"), [(False, 5.0), (True, 2.0)])
def test_a_silent_worker_is_lost_after_its_lease(accrues: bool, lost_after_s: float) -> None:
    house = House(policy(2, accrues=accrues)).fill().train()
    for _ in range(40):
        house.now += INTERVAL_S
        for node in ("0", "1"):
            house.beat(node, Activity.TRAINING)
        house.tick()
    died_at = house.now
    while house.core.state.seats["1"].is_held:
        house.now += 0.1
        if abs(house.now - died_at) % INTERVAL_S < 0.05 or abs(house.now - died_at) % INTERVAL_S > 0.95:
            house.beat("0", Activity.TRAINING)
        house.tick()
    assert house.now - died_at == pytest.approx(lost_after_s, abs=0.3)
    assert house.core.state.seats["0"].is_held
    assert ("LEASE_DETECTOR=phi" in house.core.state.seats["1"].reason) is accrues
