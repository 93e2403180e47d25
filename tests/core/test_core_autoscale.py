"""World sizes by load and by gain: bounded, with a reason, and without oscillation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from samebits.errors import UsageError
from samebits.hosts.autoscale import Autoscaler, Limits, LoadReading, ScalingDecision

EVERY_S = 10.0
LINEAR = float
NO_GAIN = lambda workers: min(workers, 3)  # noqa: E731


def run(
    limits: Limits,
    loads: Sequence[float],
    speed: Callable[[int], float] = LINEAR,
    *,
    size: int = 2,
    room: int | None = None,
    of: str = "queue",
) -> list[ScalingDecision]:
    """Return the decisions of a job that follows each at once; ``loads`` are sums over all workers."""
    scaler, decisions = Autoscaler(limits), []
    for number, load in enumerate(loads):
        value = load if of == "queue" else load / size
        reading = LoadReading(number * EVERY_S, size, speed=speed(size), room=room, **{of: value})
        decisions.append(scaler.decide(reading))
        size = decisions[-1].size
    return decisions


def turns(decisions: Sequence[ScalingDecision]) -> int:
    """Count the changes of direction."""
    sizes = [one.size for one in decisions]
    steps = [math.copysign(1, now - before) for before, now in itertools.pairwise(sizes) if now != before]
    return sum(now != before for before, now in itertools.pairwise(steps))


LIMITS = Limits(1, 8, queue=10, settle_s=20, shrink_after_s=60)


def test_queue_grows_the_world_at_once_and_shrinks_it_later() -> None:
    decisions = run(LIMITS, [20] * 5 + [60] * 10 + [10] * 20)
    sizes = [one.size for one in decisions]
    assert sizes[:5] == [2] * 5
    assert sizes[5] == 6
    assert sizes[-1] == 1
    assert sizes[15:20] == [6] * 5  # the smaller size has not been enough for long
    assert decisions[5].reason == "the queue is 300% of its target"
    assert "would have been enough for 60 s" in next(one.reason for one in decisions[15:] if one.size == 1)


def test_world_shrinks_as_soon_as_the_smaller_size_would_have_sufficed_for_long() -> None:
    sizes = [one.size for one in run(LIMITS, [10] * 10)]  # the first counts at 20 s
    assert sizes == [2] * 8 + [1] * 2
    sizes = [one.size for one in run(LIMITS, [20] * 3 + [10] * 8)]  # the drop at 30 s is no evidence for a smaller size
    assert sizes == [2] * 10 + [1]


def test_nothing_changes_within_the_tolerance() -> None:
    assert {one.size for one in run(LIMITS, [18.5, 21.5] * 30)} == {2}


def test_bounds_hold_and_are_reported() -> None:
    decisions = run(LIMITS, [1000] * 10)
    assert decisions[-1].size == 8
    assert run(LIMITS, [0] * 30)[-1].size == 1
    short = run(LIMITS, [60] * 10, room=3)
    assert short[-1].size == 3 and "above the limits or the available room" in short[-1].reason


def test_growth_without_gain_is_undone_and_not_retried_at_this_load() -> None:
    decisions = run(LIMITS, [60] * 40, NO_GAIN)
    sizes = [one.size for one in decisions]
    assert max(sizes) == 6
    assert sizes[-1] == 2
    assert turns(decisions) == 1
    assert any("of what they cost beside 2" in one.reason for one in decisions)


def test_growth_by_another_cause_is_not_judged() -> None:
    scaler = Autoscaler(Limits(1, 8, queue=10, settle_s=0))
    sizes = [
        scaler.decide(LoadReading(number * EVERY_S, size, queue=60, speed=2.0, room=size)).size
        for number, size in enumerate([2, 2, 3, 3])
    ]
    assert sizes == [2, 2, 3, 3]


def test_growth_is_tried_again_at_another_load() -> None:
    decisions = run(LIMITS, [60] * 20 + [78] * 20, NO_GAIN)
    sizes = [one.size for one in decisions]
    assert sizes[19] == 2
    assert max(sizes[20:]) == 8


def test_without_a_target_free_capacity_is_used_while_it_pays() -> None:
    limits = Limits(1, 8, settle_s=0)
    scaler, size, sizes = Autoscaler(limits), 1, []
    for number in range(30):
        size = scaler.decide(LoadReading(number * EVERY_S, size, speed=NO_GAIN(size), room=6)).size
        sizes.append(size)
    assert max(sizes) == 4
    assert sizes[-1] == 3


def test_free_capacity_alone_counts_only_without_a_target() -> None:
    met = Autoscaler(Limits(1, 8, queue=10, settle_s=0))
    full = Autoscaler(Limits(1, 8, settle_s=0))
    for at_s in (0.0, 10.0, 20.0):
        of_target = met.decide(LoadReading(at_s, 2, queue=20, room=6))
        without_room = full.decide(LoadReading(at_s, 2, room=2))
        unknown_room = full.decide(LoadReading(at_s + 1, 2))
    assert of_target == ScalingDecision(2, "the queue is 100% of its target")
    assert without_room == unknown_room == ScalingDecision(2, "no target is missed")


@pytest.mark.parametrize("of", ["cpu", "queue"])
@pytest.mark.parametrize("seed", range(20))
def test_direction_never_turns_without_a_change_of_load(of: str, seed: int) -> None:
    draw = random.Random(seed)
    target = {
        "queue": Limits(1, 8, queue=10, settle_s=20, shrink_after_s=60),
        "cpu": Limits(1, 8, cpu=0.8, settle_s=20),
    }
    stays = [draw.uniform(0.1, 6.5) if of == "cpu" else draw.uniform(1, 90) for _ in range(6)]
    loads = [stay * draw.uniform(0.97, 1.03) for stay in stays for _ in range(50)]
    speed = draw.choice([LINEAR, NO_GAIN, math.sqrt])
    decisions = run(target[of], loads, speed, of=of)
    # A growth without gain is undone once for each load.
    assert turns(decisions) <= 2 * len(stays)
    for begin in range(0, len(loads), 50):
        assert turns(decisions[begin : begin + 50]) <= 1


@pytest.mark.parametrize(
    "extreme",
    [
        {"cpu": 0.0, "memory": 0.0},
        {"cpu": 1.0, "memory": 1.0},
        {"queue": 0.0, "tolerance": 0.0, "settle_s": 0.0, "shrink_after_s": 0.0, "least_gain": 0.0},
        {"least_gain": 1.0},
    ],
)
def test_limits_at_their_bounds_are_allowed(extreme: dict[str, float]) -> None:
    assert Limits(1, 1, **extreme).most == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": 0, "most": 3},
        {"least": 4, "most": 3},
        {"least": 1, "most": 3, "cpu": 1.5},
        {"least": 1, "most": 3, "queue": math.inf},
        {"least": 1, "most": 3, "tolerance": 1.0},
        {"least": 1, "most": 3, "settle_s": -1.0},
        {"least": 1, "most": 3, "settle_s": math.inf},
        {"least": 1, "most": 3, "shrink_after_s": math.inf},
        {"least": 1, "most": 3, "least_gain": math.nan},
    ],
)
def test_invalid_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"^autoscaling: .*\. Fix: "):
        Limits(**wrong)  # type: ignore[arg-type]
