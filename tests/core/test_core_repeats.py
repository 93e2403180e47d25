"""Repeated heartbeats: what a repeat does, and what makes a heartbeat count as new."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebits.core.membership.leases import MOST_SESSIONS_A_SEAT, Repeats
from samebits.core.messages import Activity, Credential, Heartbeat, ReportEnvelope, RoundId, RoundOpened, StopJob
from samebits.core.ready import Ready
from samebits.core.reports import LastWords
from samebits.core.scheduler import Tick
from samebits.core.values import replace
from tests.core.house import House, policy, training_house


def beat_of(house: House, node: str, **changes: object) -> Heartbeat:
    state = house.core.state
    said = Heartbeat(house.credential(node), state.term, Activity.TRAINING, state.generation_number, None, 7)
    return replace(said, **changes)  # type: ignore[arg-type]


def is_repeated(house: House, message: object, session: str = "s1") -> bool:
    return house.core.repeats(session, message, house.now)


def known_beat(house: House) -> Heartbeat:
    """Return a heartbeat of worker 1 that has been sent before."""
    message = beat_of(house, "1")
    assert house.receive("s1", message) == Ready()
    return message


def test_repeated_heartbeat_renews_the_lease_and_reports_the_step() -> None:
    house = training_house()
    message = known_beat(house)
    for number in range(10):
        house.now += 4
        house.beat("0")
        assert is_repeated(house, replace(message, step=100 + number))
        assert house.tick() == Ready()
    presence = house.core.presence("1")
    assert presence is not None
    assert (presence.step, presence.heard_at, presence.lease_until) == (109, house.now, house.now + 5)


def test_repeat_has_the_same_effect_as_a_full_heartbeat() -> None:
    asked, stepped = training_house(), training_house()
    known_beat(asked), known_beat(stepped)
    for house in (asked, stepped):
        house.now += 3
    assert is_repeated(asked, beat_of(asked, "1", step=9))
    assert stepped.receive("s1", beat_of(stepped, "1", step=9)) == Ready()
    assert asked.core.presence("1") == stepped.core.presence("1")


@pytest.mark.parametrize(
    "changed",
    [
        {"activity": Activity.WAITING},
        {"generation": 0},
        {"round": RoundId(1, 9)},
        {"term": 9},
        {"sender": Credential("job-1", "1", "s1", 2)},
        {"sender": Credential("job-1", "0", "s0", 1)},
        {"sender": Credential("another", "1", "s1", 1)},
    ],
    ids=repr,
)
def test_any_other_difference_is_new(changed: dict[str, object]) -> None:
    house = training_house()
    message = known_beat(house)
    assert is_repeated(house, message)
    assert not is_repeated(house, replace(message, **changed))  # type: ignore[arg-type]


def test_only_its_own_session_repeats_a_heartbeat() -> None:
    house = training_house()
    message = known_beat(house)
    assert not is_repeated(house, message, session="s0")
    assert not is_repeated(house, ReportEnvelope(message.sender, LastWords("text"), step=7))


def test_step_is_new_outside_training() -> None:
    """When a worker is done, its step decides where training ended."""
    house = training_house()
    done = beat_of(house, "1", activity=Activity.DONE, step=7)
    assert house.receive("s1", done) == Ready()
    assert is_repeated(house, done)
    assert not is_repeated(house, replace(done, step=8))


@pytest.mark.parametrize(
    "happens",
    [
        lambda house: house.register("1"),
        lambda house: house.close("s1"),
        lambda house: house.close("s0", gone=True),
        lambda house: house.leave("0"),
        lambda house: house.join("0", round_id=RoundId(1, 1)),
        lambda house: house.publish("0", b"blob"),
        lambda house: house.step(StopJob("the test")),
        lambda house: house.beat("0", Activity.WAITING),
        lambda house: house.tick(6.0),
    ],
)
def test_any_event_makes_the_next_heartbeat_new(happens: Callable[[House], object]) -> None:
    house = training_house()
    message = known_beat(house)
    happens(house)
    assert not is_repeated(house, message)


def test_quiet_tick_pause_and_other_heartbeats_cause_no_such_event() -> None:
    house = training_house()
    message = known_beat(house)
    house.step(Tick())
    house.beat("0", step=3)
    house.stall(60.0)
    assert is_repeated(house, message)


def test_superseded_process_never_counts_as_repeating() -> None:
    house = House(policy(2, cool_down_s=0.0)).fill().train()
    message = known_beat(house)
    house.close("s1", gone=True)
    house.register("1", "again")
    before = house.core.presence("1")
    assert before is not None
    until = before.lease_until
    house.now += 1
    assert not is_repeated(house, message)
    house.receive("s1", message)
    assert not is_repeated(house, message)
    after = house.core.presence("1")
    assert after is not None and after.lease_until == until


def test_message_with_an_answer_is_answered_again() -> None:
    house = training_house()
    house.close("s0", gone=True)
    house.tick(1.0)
    waiting = beat_of(house, "1", activity=Activity.WAITING)
    for _ in range(3):
        assert not is_repeated(house, waiting)
        house.receive("s1", waiting)
        house.answer("s1", RoundOpened)


def test_vacated_seat_is_not_renewed() -> None:
    house = training_house()
    message = known_beat(house)
    house.leave("1")
    for _ in range(2):
        assert not is_repeated(house, message)
        house.receive("s1", message)


def test_ended_sessions_are_not_kept_forever() -> None:
    house = training_house()
    repeats, presence, message = Repeats(house.core._ledger), house.core.presence("1"), beat_of(house, "1")
    assert presence is not None
    for number in range(100):
        repeats.remember(f"session-{number}", message, presence)
        assert repeats.take(f"session-{number}", message)
        repeats.forget()
        assert not repeats.take(f"session-{number}", message)
    assert len(repeats._said) <= MOST_SESSIONS_A_SEAT * len(house.core.state.seats)
