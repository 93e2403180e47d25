"""Scheduler failover: with several addresses, which schedulers a worker leaves, and after what silence."""

from __future__ import annotations

import pytest

from samebits.core.agent.agent_events import (
    Connected,
    Disconnected,
    MustEnd,
    RefusedByAll,
    SchedulerAway,
    ToldToWait,
    Trains,
)
from samebits.core.agent.failover import TryNextAddress
from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    Activity,
    Admitted,
    EndJob,
    Fenced,
    Finished,
    FromScheduler,
    Heartbeat,
    Pending,
    Refusal,
    Refused,
    Register,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Point
from samebits.core.records import SeatLost
from tests.core.desk import Desk
from tests.core.house import House, policy

PATIENCE_S = 8.0


def desk_at(term: int = 2) -> Desk:
    """Return a training worker that a scheduler of this term admitted, with several addresses to choose from."""
    desk = Desk(failover_s=PATIENCE_S)
    desk.step(Connected())
    desk.admitted(term=term)
    desk.enters()
    desk.opens(term=term)
    desk.starts(term=term)
    desk.step(Trains(1))
    return desk


def look(desk: Desk) -> list[str]:
    return [notice.text for notice in desk.told(TryNextAddress)]


OLD_WORDS = [
    Admitted("mine", "job-1", 1, 3, 1, 4, None),
    Refused("mine", Refusal.ALIVE, 5.0, "held", "job-1", 1),
    Fenced("job-1", "mine", 1, "replaced", term=1),
    RoundOpened("job-1", 1, 1, RoundId(1, 9), "because", ""),
    EndJob("job-1", 1, EndKind.INTERRUPTED, "no worker is left"),
]


@pytest.mark.parametrize("word", OLD_WORDS, ids=lambda word: type(word).__name__)
def test_superseded_scheduler_is_left_whatever_it_sends(word: FromScheduler) -> None:
    desk = desk_at(term=2)
    desk.step(Disconnected())
    desk.step(Connected())
    desk.hear(word)
    assert look(desk) == ["the scheduler there has term 1, but a scheduler with term 2 has replaced it"]
    assert len(desk.ready.notices) == 1 and desk.ready.sends == [], "and nothing else happens"
    assert desk.agent.term == 2


def test_finished_is_accepted_from_any_term() -> None:
    desk = desk_at(term=2)
    desk.hear(Finished("job-1", 1, Point(7, 1)))
    assert look(desk) == []
    assert desk.agent.activity is Activity.FINISHED


@pytest.mark.parametrize("refusal", [Refusal.OTHER_JOB, Refusal.OTHER_SETTINGS, Refusal.PROTOCOL])
def test_another_jobs_scheduler_is_named_and_left(refusal: Refusal) -> None:
    desk = desk_at()
    desk.step(Disconnected())
    desk.step(Connected())
    desk.hear(Refused("mine", refusal, 0.0, "this scheduler runs job job-9", "job-9", 5))
    assert look(desk) == ["this scheduler runs job job-9"]
    assert desk.told(MustEnd) == []
    desk.hear(Admitted("mine", "job-9", 5, 0, 1, 4, None))
    assert look(desk) == ["the scheduler there runs job job-9, but this worker belongs to job job-1"]
    assert desk.agent.job == "job-1"


def test_worker_without_a_seat_leaves_another_job_and_ends_if_settings_differ() -> None:
    desk = Desk(failover_s=PATIENCE_S)
    desk.step(Connected())
    desk.hear(Refused("mine", Refusal.OTHER_JOB, 0.0, "was started for another", "job-9", 5))
    assert look(desk) == ["was started for another"] and desk.told(MustEnd) == []
    desk.hear(Refused("mine", Refusal.OTHER_SETTINGS, 0.0, "WORKER_NUM differs", "job-1", 1))
    assert look(desk) == [] and len(desk.told(MustEnd)) == 1


@pytest.mark.parametrize("trains", [False, True])
def test_worker_refused_at_every_address_ends_at_once_unless_it_trains(trains: bool) -> None:
    desk = desk_at() if trains else Desk(failover_s=PATIENCE_S)
    desk.step(Connected())
    desk.hear(Refused("mine", Refusal.OTHER_JOB, 0.0, "another's", "job-9", 5))
    assert [notice.is_refusal for notice in desk.told(TryNextAddress)] == [True]
    desk.step(RefusedByAll("all of them"))
    ends = [] if trains else [MustEnd(EndKind.REFUSED, "worker 3: all of them")]
    assert desk.told(MustEnd) == ends


def test_superseded_or_silent_scheduler_does_not_count_as_a_refusal() -> None:
    replaced = desk_at(term=2)
    replaced.hear(OLD_WORDS[0])
    silent = Desk(failover_s=PATIENCE_S)
    silent.step(Connected())
    silent.passes(2 * PATIENCE_S)
    assert [notice.is_refusal for one in (replaced, silent) for notice in one.told(TryNextAddress)] == [False, False]


def test_single_address_behaves_as_before() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.admitted(term=2)
    for word in OLD_WORDS:
        desk.hear(word)
        assert look(desk) == []
    desk.passes(1000.0)
    assert look(desk) == [] and desk.said(Register) == []


def test_unresponsive_scheduler_is_left_in_time() -> None:
    desk = Desk(failover_s=PATIENCE_S)
    desk.step(Connected())
    for _ in range(15):
        desk.passes(1.0)
        assert look(desk) == [] and len(desk.said(Register)) == 1
    desk.passes(1.0)
    assert look(desk) == ["the scheduler there has said nothing for 8 s"]
    desk.passes(1.0)
    assert look(desk) == [], "once, until the next one had its time"
    desk.step(Disconnected())
    desk.passes(100.0)
    assert look(desk) == [], "there is no scheduler to leave"
    desk.step(Connected())
    desk.passes(2 * PATIENCE_S - 0.1)
    assert look(desk) == []


def test_silent_scheduler_is_asked_and_any_answer_is_enough() -> None:
    desk = desk_at(term=1)
    for _ in range(3):
        desk.passes(1.0)
        assert desk.said(Register) == []
    for _ in range(3):
        desk.passes(1.0)
        assert len(desk.said(Register)) == 1
        assert desk.said(Register)[0].incarnation == 1
    desk.admitted()
    assert desk.ready.notices == [] and desk.ready.sends == []
    desk.passes(1.0)
    assert desk.said(Register) == [] and len(desk.said(Heartbeat)) == 1


def test_scheduler_with_a_hung_thread_is_left_although_its_connection_is_open() -> None:
    desk = desk_at(term=1)
    for _ in range(7):
        assert look(desk) == []
        desk.passes(1.0)
    desk.passes(1.0)
    assert look(desk) == ["the scheduler there has said nothing for 8 s"]
    desk.step(Disconnected())
    assert desk.told(SchedulerAway) == [SchedulerAway()]


def test_agent_wakes_up_for_each_of_these_deadlines() -> None:
    desk = Desk(failover_s=PATIENCE_S, first_beat_s=1.0)
    desk.step(Connected())
    desk.admitted()
    asked, left = 0, 0
    for _ in range(40):
        if desk.ready.wake_at is None:
            break
        desk.passes(max(0.001, desk.ready.wake_at - desk.now))
        asked += len(desk.said(Register))
        left += len(look(desk))
        if left:
            break
    assert (asked >= 3, left) == (True, 1)
    assert desk.now <= 50.0 + PATIENCE_S + 0.01


def test_worker_that_must_wait_stays_with_its_scheduler() -> None:
    desk = Desk(failover_s=PATIENCE_S)
    desk.step(Connected())
    desk.hear(Refused("mine", Refusal.COOLING_DOWN, 30.0, "cooling down", "job-1", 1))
    assert len(desk.told(ToldToWait)) == 1
    desk.passes(30.0)
    assert look(desk) == [] and len(desk.said(Register)) == 1
    desk.admitted()
    assert len(desk.told(Admitted)) == 1


def test_waiting_for_a_full_world_does_not_count_as_silence() -> None:
    desk = Desk(failover_s=PATIENCE_S)
    desk.step(Connected())
    for _ in range(40):
        desk.passes(1.0)
        assert look(desk) == []
        desk.hear(Pending("mine", 1, 1, 4))


# ---- the scheduler's side: its workers may have moved to another address


def moved(search_s: float) -> House:
    """Return the restarted scheduler of a job of two before any worker has found it."""
    house = House(policy(search_s=search_s))
    house.register("0", "a")
    house.register("1", "b")
    house.crash()
    return house


def lost(house: House) -> list[str]:
    return [record.node for record in house.journal if isinstance(record, SeatLost)]


def test_new_scheduler_gives_its_workers_time_to_find_it() -> None:
    house = moved(search_s=6.0)
    house.tick(10.5)
    assert lost(house) == []
    house.register("0", "a")
    house.tick(1.0)
    assert lost(house) == ["1"]
    house.tick(4.5)
    assert lost(house) == ["1", "0"], "a worker that reported has the usual lease"


def test_after_a_long_pause_workers_may_be_at_another_address_for_a_while() -> None:
    house = House(policy(search_s=6.0))
    house.register("0", "a")
    house.register("1", "b")
    house.tick(1.0)
    house.stall(20.0)
    house.close("a")
    house.tick(3.0)
    assert lost(house) == []
    house.register("0", "a")
    house.beat("1")
    house.tick(3.0)
    assert lost(house) == []
    house.close("a")
    house.tick(0.6)
    assert lost(house) == ["0"], "the pause is long past"


def test_single_address_gives_no_extra_time() -> None:
    house = moved(search_s=0.0)
    house.tick(5.5)
    assert lost(house) == ["0", "1"]
