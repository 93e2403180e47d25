"""The durable state: replaying any prefix of the records, or a snapshot of it, gives the same state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebits.core.membership.replacement_proofs import TOKEN_BYTES, proof_of
from samebits.core.messages import Activity, ReportEnvelope, StopJob
from samebits.core.records import SCHEMA, GenerationCommitted, JobRebuilt, SeatQuiet, SeatResumed, SeatRetired
from samebits.core.reports import StopsAfter
from samebits.core.state import JobState
from tests.core.house import House, policy
from tests.core.test_core_consistency import flip, go_back, house_of


def eventful_house() -> tuple[House, list[JobState]]:
    """Run an eventful job; return the state after each of its records."""
    house = House(policy(3, cool_down_s=5.0))
    for node in "cab":
        house.register(node)
    house.train()
    house.close("sb", gone=True)
    house.crash(after_s=2.0)
    house.beat("a")
    house.beat("c")
    house.now += 4
    house.register("d")  # takes b's slot
    house.train(na=[(10, 1)], nc=[(10, 1), (20, 1)])
    house.leave("d", on_purpose=False, text="ValueError")
    house.leave("a", text="SIGTERM")
    house.crash(after_s=7.0, boot_id="boot-2")
    house.register("a", session="a again")
    house.beat("c")
    house.register("b", session="b again")  # takes d's
    house.now += 6
    house.beat("a")
    house.beat("c")
    house.tick()
    house.register("b", session="b again")
    house.train(na=[(20, 2)])
    for node in "abc":
        house.saved(node, (20, 2))
    house.stop("Ctrl-C")
    house.crash(after_s=1.0)
    for node in "abc":
        house.beat(node, Activity.DONE, step=30)
    for node in "abc":
        house.leave(node)
    states = [JobState.replay(house.journal[:count]) for count in range(len(house.journal) + 1)]
    return house, states


def spared_house() -> tuple[House, list[JobState]]:
    """A spare took a slot, the dead node returned as a spare, one spare died and one left."""
    house = House(policy(2, cool_down_s=0.0, spare_num=2))
    for node in ("0", "1", "7", "8"):
        house.register(node)
    house.train()
    house.close("s1", gone=True)
    house.train(n0=[(10, 1)])
    house.register("1", session="1 again")
    house.close("s8", gone=True)
    house.leave("1")
    house.crash(after_s=1.0)
    house.register("8", session="8 again")
    house.close("s0", gone=True)
    states = [JobState.replay(house.journal[:count]) for count in range(len(house.journal) + 1)]
    return house, states


def replaced_house() -> tuple[House, list[JobState]]:
    """A slot's process was replaced twice, and the last one is lost again."""
    token = b"t" * TOKEN_BYTES
    house = House(policy(2, spare_num=1, token=token)).fill().train()
    for number in (1, 2):
        house.close(house.seat(house.core.state.by_slot[1]).session, gone=True)
        house.register(f"1.{number}", proof=proof_of(token, "job-1", f"1.{number}", f"s1.{number}"))
        house.train(n0=[(10 * number, number)])
    house.crash(after_s=1.0)
    house.close("s1.2", gone=True)
    states = [JobState.replay(house.journal[:count]) for count in range(len(house.journal) + 1)]
    return house, states


def outlived_house() -> tuple[House, list[JobState]]:
    """A waiting replacement fell silent, was replaced, and is heard again after all."""
    token = b"t" * TOKEN_BYTES
    house = House(policy(2, spare_num=1, token=token))
    for node in ("0", "1", "7"):
        house.register(node)
    house.train()
    for number, before in ((1, "7"), (2, "7.1")):
        house.close(f"s{before}")
        for node in ("0", "1"):
            house.now += 0.5
            house.beat(node)
        house.tick()
        house.register(f"7.{number}", proof=proof_of(token, "job-1", f"7.{number}", f"s7.{number}"))
    house.register("7.1", "s7.1", incarnation=1, job="job-1")
    states = [JobState.replay(house.journal[:count]) for count in range(len(house.journal) + 1)]
    return house, states


def mended_house() -> tuple[House, list[JobState]]:
    """A bit of one rank's state flipped, and all rolled back."""
    house = house_of(3)
    flip(house, "1")
    go_back(house)
    states = [JobState.replay(house.journal[:count]) for count in range(len(house.journal) + 1)]
    return house, states


def gone_back_house() -> tuple[House, list[JobState]]:
    """The newest point was damaged on every disk, and the job is interrupted before it saves another."""
    house = House(policy(2, cool_down_s=0.0)).fill().train()
    for node in "01":
        house.saved(node, (10, 1), (20, 1))
    for session in ("s1", "1 again"):
        house.close(session, gone=True)
        house.register("1", session=f"1 after {session}" if session == "1 again" else "1 again")
        house.train(n0=[(10, 1)])
    house.stop("Ctrl-C")
    states = [JobState.replay(house.journal[:count]) for count in range(len(house.journal) + 1)]
    return house, states


def stopped_house() -> tuple[House, list[JobState]]:
    """All workers were stopped after the same commit."""
    house = House(policy(2, cool_down_s=0.0)).fill().train()
    house.step(StopJob("samebits stop", at_commit=True))
    for is_there in (False, True):
        for node in "01":
            sender = house.credential(node)
            house.receive(sender.session, ReportEnvelope(sender, StopsAfter(3, is_there), generation=1))
    states = [JobState.replay(house.journal[:count]) for count in range(len(house.journal) + 1)]
    return house, states


HOUSES = pytest.mark.parametrize(
    "make",
    [eventful_house, spared_house, replaced_house, outlived_house, mended_house, gone_back_house, stopped_house],
)
Make = Callable[[], tuple[House, list[JobState]]]


def test_jobs_cover_every_kind_of_record() -> None:
    house, states = eventful_house()
    others = [make()[0] for make in (spared_house, replaced_house, mended_house, stopped_house)]
    kinds = {type(record) for one in (house, *others) for record in one.journal}
    every = set(SCHEMA.kinds) - {SeatQuiet, JobRebuilt}  # written by compaction only; tested in test_core_rebuild.py
    assert kinds == every
    assert states[-1].finished and states[-1] == house.core.state


def test_replay_of_every_prefix_gives_the_state_at_that_record() -> None:
    """The core's own state after each step equals the replay of its records."""
    house = House(policy(2, cool_down_s=0.0))
    seen = JobState.replay(house.journal)
    assert seen == house.core.state
    actions = [
        lambda: house.register("x"),
        lambda: house.register("y"),
        lambda: house.join("x"),
        lambda: house.join("y"),
        lambda: house.close("sx", gone=True),
        lambda: house.register("z"),
        lambda: house.join("y", [(5, 1)]),
        lambda: house.join("z"),
        lambda: house.leave("y"),
        lambda: house.tick(5.0),
        lambda: house.tick(10.0),
    ]
    for action in actions:
        before = len(house.journal)
        action()
        for record in house.journal[before:]:
            seen.apply(record)
        assert seen == house.core.state


@HOUSES
def test_records_survive_a_round_trip(make: Make) -> None:
    house, _ = make()
    again = [SCHEMA.unpack(SCHEMA.pack(record)) for record in house.journal]
    assert again == house.journal


@HOUSES
def test_snapshot_of_every_prefix_replays_to_the_same_state(make: Make) -> None:
    _, states = make()
    for count, state in enumerate(states):
        if count:
            assert JobState.replay(state.snapshot()) == state, f"after {count} records"


@HOUSES
def test_snapshot_of_a_snapshot_is_the_same(make: Make) -> None:
    _, states = make()
    first = list(states[-1].snapshot())
    assert list(JobState.replay(first).snapshot()) == first


def test_snapshot_is_bounded_by_the_seats() -> None:
    house = House(policy(2))
    house.register("0")
    house.register("1")
    for _ in range(300):
        house.crash(after_s=1.0)
        house.beat("0")
        house.beat("1")
        house.train()
    assert len(house.journal) > 900
    assert len(list(house.core.state.snapshot())) <= 8


@HOUSES
def test_records_after_a_snapshot_apply_as_before(make: Make) -> None:
    """Compaction in the middle of a job changes nothing that follows."""
    whole, _ = make()
    for cut in range(2, len(whole.journal)):
        snapshot = list(JobState.replay(whole.journal[:cut]).snapshot())
        assert JobState.replay([*snapshot, *whole.journal[cut:]]) == whole.core.state, f"cut at {cut}"


def test_retired_node_keeps_its_count_of_incarnations() -> None:
    house, _ = eventful_house()
    retired = [record.node for record in house.journal if isinstance(record, SeatRetired)]
    assert retired == ["b", "d"]
    assert house.core.state.seats["b"].incarnation == 2
    assert house.core.state.seats["d"].slot is None


def test_generations_and_terms_only_rise() -> None:
    house, _ = eventful_house()
    generations = [record.generation for record in house.journal if isinstance(record, GenerationCommitted)]
    assert generations == sorted(set(generations)) == [1, 2, 3]


def test_replaced_process_that_is_heard_again_is_known_to_a_compacted_journal() -> None:
    """The restarted scheduler reads the snapshot and the later records about this node."""
    house, _ = outlived_house()
    assert house.records(SeatResumed) == [SeatResumed("7.1", 1)] and house.seat("7.1").is_spare
