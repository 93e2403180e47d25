"""Stragglers: which rank is slower, in which part, over how many steps; 500 random cases; swaps for a spare."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from samebits.core.messages import Activity, Depart, Process, ReportEnvelope
from samebits.core.reports import MAX_STEP_US, Ailment, HealthReport, Sign, StepTime, StepTiming
from samebits.core.watch import stragglers
from samebits.core.watch.stragglers import LOOK_S, STEPS, Slowness, compare, mean_of, sentence
from tests.core.house import House, policy

CASES = 500
SEED = 28


def usual(own_ms: float = 250.0, *, data: float = 0.0, compute: float = 0.0, commit: float = 0.0) -> StepTime:
    """Return step times: a tenth each for data and commit, plus extra milliseconds in one part. Waiting takes as long
    again.
    """
    parts = (own_ms / 10 + data, own_ms * 0.8 + compute, own_ms, own_ms / 10 + commit)
    return StepTime(*(int(part * 1000) for part in parts))


# ---- one window


def test_mean_leaves_out_a_save_and_a_pause() -> None:
    steps = [usual()] * 18 + [usual(commit=9000), usual(compute=9000)]
    assert mean_of(steps) == usual()
    assert mean_of([usual(data=100)] * 20) == usual(data=100)
    assert mean_of([StepTime(MAX_STEP_US, 0, 0, 0)] * 3).data_us == MAX_STEP_US


@pytest.mark.parametrize("part", ["data", "compute", "commit"])
def test_slow_part_is_named(part: str) -> None:
    times = {"0": usual(), "1": usual(), "2": usual(**{part: 200})}
    found = compare(times)
    assert found["2"].part == part and found["2"].ratio == pytest.approx(1.8)
    assert found["2"].exceeds(1.2) and not found["0"].exceeds(1.2)


def test_waiting_rank_is_not_slow_and_two_can_be_compared() -> None:
    waits = StepTime(0, 10_000, 900_000, 0)
    assert not compare({"0": waits, "1": StepTime(0, 10_000, 0, 0)})["0"].exceeds(1.2)
    found = compare({"0": usual(), "1": usual(compute=250)})
    assert found["1"].exceeds(1.2) and not found["0"].exceeds(1.2)


def test_empty_step_has_no_stragglers() -> None:
    assert not any(
        one.exceeds(1.2) for one in compare({"0": StepTime(0, 0, 9, 0), "1": StepTime(0, 900, 9, 0)}).values()
    )
    assert compare({}) == {}


def test_sentence() -> None:
    slow = Slowness(1.8, "data", 96_000, 12_000, 84_000)
    assert sentence("2", slow, 20) == (
        "worker 2 is 1.8 × slower than the median over 20 steps: data (96 ms a step, 12 ms elsewhere)"
    )


# ---- 500 random cases


def drawn_case(rng: random.Random, slowest: float) -> tuple[dict[str, StepTime], str, str]:
    """Draw twenty steps of 2 to 16 ranks as they would report them, with the true straggler and its part."""
    ranks, own_ms = rng.randint(2, 16), 10 ** rng.uniform(1, 3.5)
    slow, part = str(rng.randrange(ranks)), rng.choice(("data", "compute", "commit"))
    if rng.random() < 0.5:
        slow = ""
    longer = slowest if rng.random() < 0.3 else rng.uniform(slowest, 4)
    told = {}
    for rank in map(str, range(ranks)):
        lasting = rng.uniform(0.97, 1.03)  # no two machines are equal
        steps = []
        for _ in range(STEPS):
            noise = lasting * max(0.5, rng.gauss(1, 0.06))
            pause = own_ms * rng.uniform(1, 10) if rng.random() < 0.03 else 0.0
            more = {part: own_ms * (longer - 1)} if rank == slow else {}
            one = usual(own_ms, **more)
            steps.append(
                StepTime(*(int(value * noise) for value in one[:3]), int(one.commit_us * noise + pause * 1000))
            )
        told[rank] = mean_of(steps)
    return told, slow, part


@pytest.mark.parametrize(("factor", "slowest"), [(1.2, 1.3), (1.1, 1.2)])
def test_precision_and_recall_over_500_random_cases(factor: float, slowest: float) -> None:
    rng = random.Random(SEED)
    named = right = there = part_right = 0
    for _ in range(CASES):
        told, slow, part = drawn_case(rng, slowest)
        found = {rank: one for rank, one in compare(told).items() if one.exceeds(factor)}
        named, right, there = named + len(found), right + (slow in found), there + bool(slow)
        part_right += slow in found and found[slow].part == part
    print(f"factor {factor}: {right} of {there} found, {named - right} false, {part_right} with the right part")
    assert there > CASES / 3
    assert right / there >= 0.99 and right / named >= 0.99 and part_right / right >= 0.99


# ---- the scheduler's side


def house_of(world_size: int = 3, *, spares: int = 0, **changes: object) -> House:
    house = House(policy(world_size, spare_num=2, **changes))  # type: ignore[arg-type]
    for node in range(world_size + spares):
        house.register(str(node), process=Process(f"host-{node}", 100 + node, 1, "cpu"))
    house.train()
    for node in range(world_size, world_size + spares):
        house.beat(str(node), Activity.WAITING)
    return house


def tell(house: House, times: dict[str, StepTime], *, steps: int = STEPS, generation: int | None = None) -> list[str]:
    """Let each rank report a window; return the nodes that are asked to leave."""
    asked = []
    for node, time in times.items():
        credential = house.credential(node)
        number = house.core.state.generation_number if generation is None else generation
        asked += house.receive(credential.session, ReportEnvelope(credential, StepTiming(steps, time), number)).sends
    asked += house.tick(LOOK_S).sends
    return [send.session for send in asked if isinstance(send.message, Depart)]


EQUAL = {str(node): usual() for node in range(3)}
SLOW = {**EQUAL, "2": usual(data=200)}
FAST_STEPS = {node: StepTime(*(part // 100 for part in time)) for node, time in SLOW.items()}


def test_twenty_long_steps_suffice_and_start_and_end_are_reported_once() -> None:
    house = house_of()
    for _ in range(4):
        tell(house, SLOW)
    said = "worker 2 is 1.8 × slower than the median over 20 steps: data (225 ms a step, 25 ms elsewhere)"
    assert house.core.stragglers == [said]
    for _ in range(4):
        tell(house, EQUAL)
    assert house.core.stragglers == []
    notes = [note for note in house.notes if note.startswith("worker 2 ")]
    assert notes == [said, "worker 2 keeps up with the others again"]


def test_fast_steps_are_observed_for_five_consecutive_seconds() -> None:
    house = house_of()
    for seconds in (4, 0, 4):  # of 7 ms steps
        tell(house, FAST_STEPS if seconds else dict.fromkeys(EQUAL, FAST_STEPS["0"]), steps=seconds * 140 or STEPS)
        assert house.core.stragglers == []
    tell(house, FAST_STEPS, steps=280)
    assert len(house.core.stragglers) == 1


def test_nothing_changes_between_the_limits() -> None:
    house = house_of()
    tell(house, {**EQUAL, "2": usual(compute=40)})
    assert house.core.stragglers == [], "1.16 is not slow"
    tell(house, SLOW)
    tell(house, {**EQUAL, "2": usual(compute=40)})
    assert len(house.core.stragglers) == 1, "1.16 does not keep up yet"


@pytest.mark.parametrize("why", ["not all have told", "another generation's", "off"])
def test_no_rank_is_compared_otherwise(why: str) -> None:
    house = house_of(**({"straggler_factor": None} if why == "off" else {}))
    times = {node: SLOW[node] for node in ("1", "2")} if why == "not all have told" else SLOW
    for _ in range(3):
        tell(house, times, generation=9 if why == "another generation's" else None)
    assert house.core.stragglers == []


def test_departed_rank_is_forgotten() -> None:
    house = house_of()
    tell(house, SLOW)
    house.leave("2")
    assert house.core.stragglers == []


def test_no_worker_is_swapped_unless_requested() -> None:
    house = house_of(spares=1)
    assert tell(house, SLOW) == [] and len(house.core.stragglers) == 1
    assert tell(house, SLOW) == []


def test_straggler_gives_its_slot_to_a_warm_spare_and_is_asked_until_it_has() -> None:
    house = house_of(spares=1, swaps_stragglers=True)
    assert tell(house, SLOW) == ["s2"]
    assert tell(house, SLOW) == ["s2"], "the first request may be lost"
    assert [
        note
        for note in house.notes
        if "is asked to leave at its next commit, and warm spare 3 takes its place: " in note
    ]
    house.leave("2", text="it was asked to (SIGTERM)")
    assert house.core.state.by_slot[2] == "3"
    assert house.core.stragglers == []


@pytest.mark.parametrize("why", ["no spare", "spare is cold", "spare is unhealthy", "another is asked already"])
def test_no_worker_is_swapped_otherwise(why: str) -> None:
    house = house_of(spares=0 if why == "no spare" else 1, swaps_stragglers=True)
    full = (Ailment(Sign.DISK, "/ckpt", 0.95, 0.9, drains=True),)
    if why == "spare is cold":
        house.beat("3", Activity.SEATED)
    if why in ("spare is unhealthy", "another is asked already"):
        credential = house.credential("3" if why == "spare is unhealthy" else "1")
        house.receive(credential.session, ReportEnvelope(credential, HealthReport(full)))
        house.tick(0.1)
    assert tell(house, SLOW) == (["s1"] if why == "another is asked already" else [])


# ---- broken builds that the tests above catch


def _pauses_count(steps: list[StepTime]) -> StepTime:
    return StepTime(*(sum(part) // len(steps) for part in zip(*steps, strict=True)))


def _waiting_counts(time: StepTime) -> int:
    return sum(time)


@pytest.mark.parametrize(("name", "broken"), [("mean_of", _pauses_count), ("own_us", _waiting_counts)])
def test_random_cases_catch_the_broken_build(
    name: str, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stragglers, name, broken)
    monkeypatch.setitem(globals(), name, broken)
    monkeypatch.setitem(globals(), "CASES", 100)
    with pytest.raises(AssertionError):
        test_precision_and_recall_over_500_random_cases(1.2, 1.3)
