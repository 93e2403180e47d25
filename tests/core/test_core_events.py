"""A scheduler's passes as events: a start, a kill with a spare, a scheduler restart."""

from __future__ import annotations

import itertools

import pytest

from samebits.account.events import MAX_TEXT, NAMED, Chronicle, EventKind, JobEvent
from samebits.account.recoveries import recoveries_of
from samebits.core.messages import Activity, Join, Leave, ProcessEnded, ReportEnvelope
from samebits.core.point import Point
from samebits.core.ready import Note, Ready, Severity
from samebits.core.reports import SavedPoints
from samebits.core.scheduler import Received
from tests.core.house import House, policy

WALL_S = 1_700_000_000.0


class Watched(House):
    """A scheduler whose passes are recorded in a chronicle, as the service does it."""

    def load(self) -> Ready:
        self.events: list[JobEvent] = getattr(self, "events", [])
        self.chronicle: Chronicle | None = None
        return super().load()

    def step(self, event: object) -> Ready:
        if isinstance(event, Received):
            self._chronicle().heard(event.message, self.now)
        ready = super().step(event)  # type: ignore[arg-type]
        self.events += self._chronicle().take([], [], [], self.now)
        return ready

    def _take(self, ready: Ready) -> Ready:
        taken = super()._take(ready)
        self.events += self._chronicle().take(ready.records, ready.sends, ready.notes, self.now)
        return taken

    def _chronicle(self) -> Chronicle:
        if self.chronicle is None:
            core = self.core

            def step_of(node: str) -> int:
                presence = core.presence(node)
                return presence.step if presence is not None else 0

            self.chronicle = Chronicle(core.state, step_of, WALL_S)
        return self.chronicle

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events]


def trained(**changes: float) -> Watched:
    house = Watched(policy(2, **changes))
    for node in "01":
        house.register(node)
    for node in "01":
        house.join(node)
    for node in "01":
        house.beat(node)
    return house


def test_start_is_recorded_in_order_and_ends_with_all_training() -> None:
    house = trained()
    assert house.kinds() == [
        *(
            EventKind.JOB,
            EventKind.SCHEDULER,
            EventKind.SEATED,
            EventKind.SEATED,
            EventKind.ROUND,
            EventKind.GENERATION,
            EventKind.TRAINING,
        )
    ]
    assert [event.node for event in house.events if event.kind is EventKind.SEATED] == ["0", "1"]
    assert house.events[-1].more["last"] == "1"
    assert all(event.at == WALL_S + house.now for event in house.events)


def test_kill_with_a_spare_is_one_recovery_with_cause_and_last_joiner() -> None:
    house = trained(spare_num=1)
    house.register("2")
    house.beat("2", Activity.WAITING, generation=0)
    house.now += 2
    for node in "01":
        house.beat(node, step=70)
    house.now += 1
    house.close("s1", gone=True)
    house.now += 0.25
    house.join("0", live=(70, 1))
    house.now += 0.5
    house.join("2", looked=False)
    house.now += 0.125
    for node in "02":
        house.beat(node, step=70)
    (row,) = recoveries_of(house.events)
    assert (row.lost, row.step, row.restore_step, row.steps_lost) == (["1"], 70, 70, 0)
    assert (row.last_to_join, row.last_to_train, row.generation, row.members) == ("2", "2", 2, 2)
    assert row.phases() == {"decide": 0, "meet": 750, "restore": 125}
    assert "rank 0" in row.restored_from
    assert row.cause == "worker 1: its connection closed and its process is gone"
    lost = house.seat("1").process
    killed = ProcessEnded("1", lost.host, lost.pid, lost.started_at, "was killed by signal 9 (SIGKILL)", signal=9)
    house.step(killed)
    (row,) = recoveries_of(house.events)
    assert row.cause.startswith("worker 1 was killed by signal 9 (SIGKILL)"), "recorded after the recovery was over"


def test_leave_records_the_last_step_made() -> None:
    """When a job is stopped the last heartbeat may be a second old, but the step that is saved is the last one made."""
    house = trained()
    for node in "01":
        house.beat(node, step=70)
    house.stop()
    assert (house.events[-1].kind, house.events[-1].step) == (EventKind.NOTE, 70)
    credential = house.credential("0")
    house.receive("s0", Leave(credential, True, "", 75))
    assert (house.events[-1].kind, house.events[-1].step) == (EventKind.LEFT, 75)
    house.leave("1")
    assert house.events[-1].step == 75, "of an earlier release: nothing is recorded, and nothing lost"


def test_round_after_a_failure_is_a_recovery_and_a_round_to_grow_is_not() -> None:
    house = Watched(policy(2, max_world_size=3)).fill().train()
    house.register("2")
    house.beat("2", Activity.WAITING, generation=0)
    house.train(n0=[(5, 1)])
    assert house.committed().slots == (0, 1, 2) and recoveries_of(house.events) == []
    house.beat("1", Activity.WAITING)
    house.train(n0=[(9, 2)])
    (row,) = recoveries_of(house.events)
    assert (row.cause, row.lost) == ("a collective of generation 2 failed at worker 1", [])
    assert (row.generation, row.total_ms) == (3, 0.0)


def test_a_step_that_a_survivor_tells_after_the_loss_counts_as_redone() -> None:
    def told(kind: EventKind, at: float, step: int, **more: object) -> JobEvent:
        return JobEvent(kind, at, 1, 1, step, "0", "", more)

    (row,) = recoveries_of(
        [
            told(EventKind.TRAINING, 100.0, 0),
            told(EventKind.LOST, 110.0, 23),
            told(EventKind.ROUND, 110.0, 23),
            told(EventKind.GENERATION, 111.0, 40, restore=0),
            told(EventKind.TRAINING, 112.0, 0),
        ]
    )
    assert (row.step, row.steps_lost) == (40, 40)


def test_a_cool_down_after_the_loss_of_all_is_a_wait_for_seats() -> None:
    def told(kind: EventKind, at: float, **more: object) -> JobEvent:
        return JobEvent(kind, at, 1, 1, 70, "0", "", more)

    (row,) = recoveries_of(
        [
            told(EventKind.TRAINING, 100.0),
            told(EventKind.LOST, 110.0),
            told(EventKind.SEATED, 140.0),
            told(EventKind.ROUND, 140.0),
            told(EventKind.GENERATION, 141.0, restore=60),
            told(EventKind.TRAINING, 142.0),
        ]
    )
    assert row.phases() == {"decide": 0, "wait_for_seats": 30_000, "meet": 1000, "restore": 1000}


def test_clock_set_back_between_scheduler_starts_gives_no_negative_recovery() -> None:
    def told(kind: EventKind, at: float, **more: object) -> JobEvent:
        return JobEvent(kind, at, 1, 1, 70, "", "", more)

    (row,) = recoveries_of(
        [
            told(EventKind.TRAINING, 5000.0),
            told(EventKind.LOST, 5010.0),
            told(EventKind.ROUND, 5010.5),
            told(EventKind.SCHEDULER, 1400.0),  # the clock was set back an hour meanwhile
            told(EventKind.GENERATION, 1401.0),
            told(EventKind.TRAINING, 1402.0),
        ]
    )
    assert row.phases() == {"decide": 500, "meet": 0, "restore": 0}
    assert row.total_ms == 500


def test_steps_are_recorded_often_at_first_and_rarely_later() -> None:
    house = trained()
    for step in range(1, 20_000):
        house.now += 0.5
        for node in "01":
            house.beat(node, step=step)
    steps = [event for event in house.events if event.kind is EventKind.STEP]
    assert 300 < len(steps) < 700
    assert steps[0].at - house.events[6].at <= 1.5
    assert max(later.at - before.at for before, later in itertools.pairwise(steps)) <= 61


def test_workers_that_trained_through_a_restart_are_training_without_a_round() -> None:
    house = trained()
    before = len(house.events)
    house.crash(after_s=3)
    for node in "01":
        house.register(node, incarnation=1, job=house.core.state.job)
        house.beat(node, step=33)
    later = house.events[before:]
    assert [event.kind for event in later if event.kind is not EventKind.RETURNED] == [
        EventKind.SCHEDULER,
        EventKind.TRAINING,
    ]
    assert (later[-1].term, later[-1].step) == (2, 33)


@pytest.mark.parametrize(("seen", "at_least"), [(130, 130), (90, 100), (0, 100)])
def test_recovery_after_a_total_kill_records_the_step_that_was_reached(seen: int, at_least: int) -> None:
    house = trained()
    house.now += 2
    for node in "01":
        house.beat(node, step=seen)
    house.crash(after_s=60)
    house.tick(5)
    house.now += 30
    for node in "01":
        house.register(node, f"s{node}-2")
    for node in "01":
        house.join(node, [(100, 1)])
    for node in "01":
        house.beat(node, step=100)
    (row,) = recoveries_of(house.events)
    assert (row.step, row.restore_step, row.steps_lost) == (at_least, 100, at_least - 100)
    assert row.all_lost


def test_thousand_seats_in_one_pass_make_few_events() -> None:
    chronicle = Chronicle(House(policy(2)).core.state, lambda node: 0, WALL_S)
    house = House(policy(1000))
    records = [record for node in range(1000) for record in house.register(str(node)).records]
    taken = chronicle.take(records, [], [], 1.0)
    seated = [event for event in taken if event.kind is EventKind.SEATED]
    assert len(seated) == NAMED + 1
    assert seated[-1].more == {"count": 1000 - NAMED}


def test_warning_is_an_event_and_texts_are_bounded() -> None:
    chronicle = Chronicle(House(policy(2)).core.state, lambda node: 0, WALL_S)
    notes = [Note(Severity.INFO, "said"), Note(Severity.WARNING, "words " * 1000)]
    (event,) = chronicle.take([], [], notes, 1.0)
    assert event.kind is EventKind.NOTE and MAX_TEXT - 10 < len(event.text) <= MAX_TEXT
    assert event.text.endswith("words… (`samebits logs` shows the rest)")


def test_only_joins_and_heartbeats_are_examined() -> None:
    chronicle = Chronicle(House(policy(2)).core.state, lambda node: 0, WALL_S)
    chronicle.heard(object(), 1.0)
    chronicle.heard(Join, 1.0)
    assert chronicle.take([], [], [], 1.0) == []


def stalled(house: Watched, node: str, step: int, seconds: float) -> None:
    """Report what the node's process holds and how long its steps have waited for saves in total."""
    house.told(node, (step, 1))
    credential = house.credential(node)
    house.receive(credential.session, ReportEnvelope(credential, SavedPoints((Point(step, 1),), seconds)))


def stalls(house: Watched) -> list[float]:
    return [event.more["stalled_ms"] for event in house.events if "stalled_ms" in event.more]


def test_save_wait_is_that_of_the_rank_that_waited_longest() -> None:
    house = trained()
    for step, waits in [(10, (0.2, 0.5)), (20, (0.6, 0.55)), (20, (0.6, 0.55))]:
        house.now += 5
        for node, seconds in zip("01", waits, strict=True):
            stalled(house, node, step, seconds)
        for node in "01":
            house.beat(node, step=step)
    assert sum(stalls(house)) == 600


def test_report_to_an_earlier_term_is_not_recorded_again() -> None:
    house = trained()
    stalled(house, "0", 10, 0.5)
    house.now += 5
    house.beat("0", step=11)
    assert stalls(house) == [500]
    house.crash(after_s=1)
    for node in "01":
        house.register(node, f"s{node}", incarnation=1, job=house.core.state.job)
        house.beat(node, step=30)
    stalled(house, "0", 20, 0.75)
    house.now += 5
    house.beat("0", step=31)
    stalled(house, "0", 30, 1.0)
    house.now += 5
    house.beat("0", step=32)
    assert stalls(house) == [500, 250]
