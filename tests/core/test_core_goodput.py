"""Goodput: buckets sum to the wall time whatever the events are, and each interval lies in the right bucket."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from samebits.account.event_log import events_in, line_of
from samebits.account.events import EventKind, JobEvent, event_in
from samebits.account.goodput import BADPUT_TYPES, Bucket, Goodput, badput_s, goodput_of
from samebits.account.history import RecoveryFeed, StepColumn, account, recovery_line, summary
from samebits.account.recoveries import recoveries_of
from samebits.store.text_log import EVENTS_FILE

S = 1_000_000


def event(kind: EventKind, at: float, step: int = 0, **more: object) -> JobEvent:
    return JobEvent(kind, at, 1, 1, step, str(more.pop("node", "")), "", more)


START = [event(EventKind.SCHEDULER, 100), event(EventKind.GENERATION, 104, members=2), event(EventKind.TRAINING, 105)]
KILL = [
    event(EventKind.STEP, 115, 100),
    event(EventKind.LOST, 120, 150, node="1", slot=1),
    event(EventKind.ROUND, 120, 150),
    event(EventKind.SEATED, 127, slot=1, node="1"),
    event(EventKind.GENERATION, 128, 150, restore=100, members=2, last="1"),
    event(EventKind.TRAINING, 130, 100, last="1"),
    event(EventKind.STEP, 140, 200),
]


def spent(events: list[JobEvent], until: float | None = None) -> dict[str, float]:
    fold = goodput_of(events)
    buckets = fold.buckets(until)
    assert sum(buckets.values()) == fold.wall_us(until)
    return {str(bucket): us / S for bucket, us in buckets.items() if us}


def test_job_without_a_loss_starts_up_and_trains() -> None:
    assert spent(START, until=145.5) == {"start_up": 5, "productive": 40.5}


def test_loss_is_split_into_detection_forming_restore_and_redone_steps() -> None:
    assert spent(START + KILL, until=141) == {
        "start_up": 5,
        "productive": 15 + 5 + 1,  # half of the hundred steps after the recovery are new
        "waiting_for_seats": 7,
        "forming": 1,
        "restoring": 2,
        "redone": 5,
    }


def test_recovery_is_one_row_whose_phases_sum_to_it() -> None:
    (row,) = recoveries_of(START + KILL)
    assert (row.cause, row.lost, row.steps_lost, row.last_to_join) == ("worker 1: ", ["1"], 50, "1")
    assert row.phases() == {"decide": 0, "wait_for_seats": 7000, "meet": 1000, "restore": 2000}
    assert sum(row.phases().values()) == row.total_ms == 10_000


def test_scheduler_outage_costs_nothing_while_workers_train() -> None:
    away = [event(EventKind.STEP, 110, 50), event(EventKind.SCHEDULER, 130), event(EventKind.TRAINING, 131, 250)]
    assert spent([*START, *away]) == {"start_up": 5, "productive": 26}


def test_scheduler_outage_is_idle_time_if_workers_stopped() -> None:
    away = [event(EventKind.STEP, 110, 50), event(EventKind.SCHEDULER, 130), event(EventKind.ROUND, 131)]
    assert spent([*START, *away], until=132) == {"start_up": 5, "productive": 5, "idle": 21, "forming": 1}


ALL_KILLED = [
    *START,
    event(EventKind.STEP, 110, 308),
    event(EventKind.SCHEDULER, 120),
    event(EventKind.LOST, 120, node="0", slot=0),
    event(EventKind.LOST, 120, node="1", slot=1),
    event(EventKind.SEATED, 150, slot=0, node="0"),
    event(EventKind.ROUND, 150),
    event(EventKind.SEATED, 151, slot=1, node="1"),
    event(EventKind.GENERATION, 153, restore=300, members=2, last="1"),
    event(EventKind.TRAINING, 154, 300, last="1"),
]


def test_cool_down_after_all_were_killed_is_a_wait_and_not_idle_time() -> None:
    found = spent(ALL_KILLED)
    assert found == {
        "start_up": 5,
        "productive": 5,
        "idle": 10,  # no scheduler ran
        "waiting_for_seats": 31,
        "forming": 2,
        "restoring": 1,
    }


KILLED_AT_START = [
    event(EventKind.SCHEDULER, 100),
    event(EventKind.SEATED, 104, slot=1, node="1"),
    event(EventKind.SCHEDULER, 110),
    event(EventKind.LOST, 110, slot=1, node="1"),
    event(EventKind.PROMOTED, 117, slot=1, node="1.1"),
    event(EventKind.ROUND, 118),
    event(EventKind.GENERATION, 120, members=2),
    event(EventKind.TRAINING, 121),
    event(EventKind.STEP, 131, 100),
]


def test_loss_before_the_first_step_is_a_recovery() -> None:
    (row,) = recoveries_of(KILLED_AT_START)
    assert (row.lost, row.steps_lost, row.total_ms, row.all_lost) == (["1"], 0, 11_000, False)
    assert recovery_line(row).endswith(
        "worker 1: ; training began after 11.0 s "
        "(waiting for replacements 7.0 s, workers joining 3.0 s, restoring 1.0 s)"
    )
    assert spent(KILLED_AT_START) == {
        "start_up": 4,
        "idle": 6,
        "waiting_for_seats": 7,
        "forming": 3,
        "restoring": 1,
        "productive": 10,
    }
    assert recoveries_of([one for one in KILLED_AT_START if one.kind is not EventKind.LOST]) == []


@pytest.mark.parametrize(
    ("known", "slots", "text"),
    [
        (363, (0, 1), "at least 63 steps redone"),
        (300, (0, 1), "any steps after step 300 redone"),
        (363, (1,), "63 steps redone"),
        (300, (1,), "no step redone"),
    ],
)
def test_redone_steps_are_a_lower_bound_if_no_worker_survived(known: int, slots: tuple[int, ...], text: str) -> None:
    lost = [event(EventKind.LOST, 120, slot=slot, node=str(slot)) for slot in slots]
    spare = [event(EventKind.LOST, 120, spare=1, node="2")]
    killed = [
        *START,
        event(EventKind.STEP, 110, known),
        event(EventKind.SCHEDULER, 120),
        *lost,
        *spare,
        *ALL_KILLED[7:],
    ]
    (row,) = recoveries_of(killed)
    assert recovery_line(row).endswith(f", {text}")
    assert row.plain()["all_lost"] == (len(slots) == 2)


def test_loss_that_an_earlier_scheduler_noticed_is_counted() -> None:
    """It died before it wrote the event."""
    retired = event(EventKind.RETIRED, 121, slot=1, node="1")
    lost = event(EventKind.LOST, 120, slot=0, node="0")
    events = [*START, event(EventKind.STEP, 110, 300), event(EventKind.SCHEDULER, 120), lost]
    for found, text in (
        ([retired], "any steps after step 300 redone"),
        ([event(EventKind.LEFT, 121, slot=1, node="1"), retired], "no step redone"),
    ):
        (row,) = recoveries_of([*events, *found, *ALL_KILLED[7:]])
        assert recovery_line(row).endswith(f", {text}")


def test_job_that_ends_during_a_recovery_has_not_recovered_and_resumes_without_one() -> None:
    ended = [*START, *KILL[:3], event(EventKind.INTERRUPTED, 125, 150)]
    resumed = [
        event(EventKind.SCHEDULER, 200),
        event(EventKind.PROMOTED, 210, slot=1, node="1.1"),
        event(EventKind.ROUND, 210),
        event(EventKind.GENERATION, 212, restore=100, members=2),
        event(EventKind.TRAINING, 213, 100),
    ]
    assert len(recoveries_of(ended[:-1])) == 1
    assert recoveries_of(ended) == recoveries_of(ended + resumed) == []
    (row,) = recoveries_of(ended + resumed + [event(EventKind.LOST, 220, 150, slot=1, node="1.1"), *KILL[2:]])
    assert row.number == 1


SPARE_AND_SCHEDULER = [
    *START,
    event(EventKind.LOST, 110, 50, node="1", slot=1),
    event(EventKind.RETIRED, 110, 50, node="1", slot=1),
    event(EventKind.PROMOTED, 110, 50, node="2", slot=1),
    event(EventKind.ROUND, 110, 50),
    event(EventKind.SCHEDULER, 112),
    event(EventKind.RETURNED, 115, node="0", slot=0),
    event(EventKind.GENERATION, 116, 50, restore=50, members=2),
    event(EventKind.TRAINING, 117, 50),
]


def test_survivors_that_reach_a_new_scheduler_do_not_count_as_awaited_replacements() -> None:
    (row,) = recoveries_of(SPARE_AND_SCHEDULER)
    assert row.phases() == {"decide": 0, "idle": 2000, "meet": 4000, "restore": 1000}
    assert spent(SPARE_AND_SCHEDULER) == {"start_up": 5, "productive": 5, "idle": 2, "forming": 4, "restoring": 1}


CUT = [  # the host of worker 1 was cut off at 115: the others wait, and samples show no progress
    *START,
    event(EventKind.STEP, 114, 90),
    event(EventKind.STEP, 115, 100),
    event(EventKind.STEP, 116, 100),
    event(EventKind.LOST, 120, 100, node="1", silent_ms=5000),  # the spare takes its slot in the same pass
    event(EventKind.PROMOTED, 120, 100, node="2", slot=1),
    event(EventKind.ROUND, 120, 100),
    event(EventKind.GENERATION, 120.25, 100, restore=100, members=2, last="2"),
    event(EventKind.TRAINING, 120.5, 100, last="2"),
]
CUT_DURING_SCHEDULER_RESTART = [
    *START,
    event(EventKind.STEP, 110, 90),
    event(EventKind.SCHEDULER, 112),
    event(EventKind.LOST, 120, 90, node="1", slot=1, silent_ms=9000),
    event(EventKind.PROMOTED, 120, 90, node="2", slot=1),
    event(EventKind.ROUND, 120, 90),
    event(EventKind.GENERATION, 121, 90, restore=90, members=2, last="2"),
    event(EventKind.TRAINING, 122, 90, last="2"),
]
LONE = [  # the only worker is lost, so no round begins until it is replaced
    *START,
    event(EventKind.STEP, 110, 90),
    event(EventKind.LOST, 120, 90, node="1", slot=1, silent_ms=4000),
    event(EventKind.SEATED, 150, 90, node="1", slot=1),
    event(EventKind.ROUND, 150, 90),
    event(EventKind.GENERATION, 151, 90, restore=90, members=2, last="1"),
    event(EventKind.TRAINING, 152, 90, last="1"),
]


LOST_TWICE = [  # the second loss strikes while the state is restored after the first
    *START,
    event(EventKind.LOST, 110, 90, node="1", slot=1),
    event(EventKind.ROUND, 110.5, 90),
    event(EventKind.SEATED, 111, 90, node="1", slot=1),
    event(EventKind.GENERATION, 112, 90, restore=90, members=2, last="1"),
    event(EventKind.LOST, 150, 90, node="1", slot=1),
    event(EventKind.ROUND, 150, 90),
    event(EventKind.SEATED, 150.25, 90, node="1", slot=1),
    event(EventKind.GENERATION, 151, 90, restore=90, members=2, last="1"),
    event(EventKind.TRAINING, 153, 90, last="1"),
]
SHRUNK = [  # the slot is given up instead of filled
    *START,
    event(EventKind.LOST, 110, 90, node="1", slot=1),
    event(EventKind.ROUND, 110, 90),
    event(EventKind.RETIRED, 120, 90, node="1", slot=1),
    event(EventKind.GENERATION, 120, 90, restore=90, members=1, last="0"),
    event(EventKind.TRAINING, 121, 90, last="0"),
]


def test_restoring_before_a_second_loss_is_no_wait_for_a_replacement() -> None:
    (row,) = recoveries_of(LOST_TWICE)
    assert row.phases() == {"decide": 500, "wait_for_seats": 750, "meet": 1750, "restore": 40_000}


def test_slot_that_is_given_up_was_waited_for() -> None:
    (row,) = recoveries_of(SHRUNK)
    assert row.phases() == {"decide": 0, "wait_for_seats": 10_000, "meet": 0, "restore": 1000}


def test_time_until_a_silent_worker_counts_as_lost_is_lost_time() -> None:
    assert spent(CUT) == {"start_up": 5, "productive": 10, "noticing_losses": 5, "forming": 0.25, "restoring": 0.25}
    (row,) = recoveries_of(CUT)
    assert (row.total_ms, row.began_at, row.noticed_at) == (5500, 115, 120)
    assert recovery_line(row).endswith(
        "all workers trained again after 5.5 s (silent for 5.0 s, then workers joining 250 ms, restoring 250 ms), "
        "no step redone"
    )


def test_worker_lost_although_training_continued_costs_no_time_before_the_last_progress() -> None:
    went_on = [event(EventKind.STEP, 119, 140) if one.at == 116 else one for one in CUT]
    assert spent(went_on)["noticing_losses"] == 1
    (row,) = recoveries_of(went_on)
    assert row.phases()["silent"] == 1000


def test_loss_of_a_node_that_is_no_member_yet_costs_no_time() -> None:
    joiner = [
        event(EventKind.LOST, 112, 50, node="2", slot=2, silent_ms=5000),
        event(EventKind.STEP, 115, 100),
        event(EventKind.LOST, 117, 110, node="2", slot=2, silent_ms=1000),
        event(EventKind.TRAINED, 120, 150),
    ]
    assert spent([*START, *joiner]) == {"start_up": 5, "productive": 15}


def test_workers_lost_together_are_silent_since_the_first_of_them() -> None:
    both = [*CUT[:6], event(EventKind.LOST, 120, 100, node="0", slot=0, silent_ms=3000), *CUT[6:]]
    first = [*CUT[:6], *both[5:7][::-1], *CUT[6:]]
    for events in (both, first):
        assert spent(events)["noticing_losses"] == 5
        assert recoveries_of(events)[0].phases()["silent"] == 5000


def test_scheduler_that_starts_after_a_loss_leaves_no_negative_time() -> None:
    found = spent([*LONE[:5], event(EventKind.SCHEDULER, 130, 90), *LONE[5:]])
    assert min(found.values()) >= 0 and found["noticing_losses"] == 4


@pytest.mark.parametrize(
    "events",
    [START + KILL, ALL_KILLED, CUT, CUT_DURING_SCHEDULER_RESTART, LONE, LOST_TWICE, SHRUNK],
    ids=["one", "all", "cut", "restart", "lone", "twice", "shrunk"],
)
def test_recovery_and_the_time_buckets_agree(events: list[JobEvent]) -> None:
    (row,), found = recoveries_of(events), spent(events)
    phases = row.phases()
    assert phases.get("silent", 0) == 1000 * found.get("noticing_losses", 0)
    assert phases["decide"] + phases.get("wait_for_seats", 0) == 1000 * found.get("waiting_for_seats", 0)
    assert phases["meet"] == 1000 * found.get("forming", 0)
    assert phases["restore"] == 1000 * found.get("restoring", 0)


@pytest.mark.parametrize("seed", range(200))
def test_recoveries_take_no_more_time_than_the_buckets_have(seed: int) -> None:
    events = drawn(random.Random(seed), 60)
    found, rows = spent(events), recoveries_of(events)
    for phase, bucket in (("silent", "noticing_losses"), ("restore", "restoring"), ("idle", "idle")):
        taken_ms = [row.phases().get(phase, 0) for row in rows]
        assert min(taken_ms, default=0) >= 0
        assert sum(taken_ms) <= 1000 * found.get(bucket, 0) + len(rows), phase


def test_line_of_a_recovery_names_all_that_were_lost_and_what_was_redone() -> None:
    (row,) = recoveries_of(ALL_KILLED)
    said = recovery_line(row)
    assert "workers 0 and 1 were lost; worker 0: " in said and said.endswith(", at least 8 steps redone")
    phases = "waiting for replacements 31.0 s, workers joining 2.0 s, restoring 1.0 s"
    assert f"; all workers trained again after 34.0 s ({phases})" in said


def test_no_productivity_is_claimed_for_a_job_whose_steps_only_its_script_counts() -> None:
    events = START + KILL
    assert "productive" in "".join(summary(events)) and account(events)["goodput"] is not None
    told = summary(events, has_steps=False)
    assert "productive" not in "".join(told) and "workers running 20.0 s" in told[-1]
    assert account(events, has_steps=False)["goodput"] is None


def test_change_of_the_world_that_was_ordered_is_no_recovery() -> None:
    asked = JobEvent(EventKind.DECIDED, 119, more={"drain": ["1"]})
    change = [
        event(EventKind.LEFT, 120, 150, node="1", slot=1),
        event(EventKind.ROUND, 120, 150),
        event(EventKind.GENERATION, 121, 150, restore=150, members=1),
        event(EventKind.TRAINING, 122, 150),
    ]
    assert recoveries_of([*START, asked, *change]) == []
    assert len(recoveries_of([*START, *change])) == 1, "it left by itself, as before a preemption"
    assert len(recoveries_of([*START, asked, *change, *KILL[1:]])) == 1, "a loss after it"


def test_step_column_says_what_the_events_say_and_only_goes_back_with_training() -> None:
    events = [*ALL_KILLED[:4], event(EventKind.COMMITTED, 116, 282, point=300), *ALL_KILLED[4:]]
    events.append(event(EventKind.COMMITTED, 160, 310, point=350))
    column = StepColumn()
    shown = {(one.kind, one.at): column.of(one) for one in events}
    assert (shown[EventKind.COMMITTED, 116.0], shown[EventKind.COMMITTED, 160.0]) == (300, 350)
    assert shown[EventKind.LOST, 120.0] == shown[EventKind.ROUND, 150.0] == 308, "a new scheduler has heard no step yet"
    assert shown[EventKind.GENERATION, 153.0] == shown[EventKind.TRAINING, 154.0] == 300


def test_follower_prints_a_recovery_once_as_the_history_has_it(tmp_path: Path) -> None:
    kept = tmp_path / EVENTS_FILE
    kept.write_text("".join(f"{line_of(one)}\n" for one in START))
    feed = RecoveryFeed(tmp_path)
    assert feed.new() == [] and feed.trained == 1
    with kept.open("a") as file:
        file.writelines(f"{line_of(one)}\n" for one in KILL)
    said = [recovery_line(row) for row in feed.new()]
    assert said and said == [one for one in summary(START + KILL) if one.startswith("recovery")]
    assert feed.new() == [] and len(feed.over) == 1
    later = RecoveryFeed(tmp_path)
    assert later.new() == [], "a later follower does not repeat it"
    assert (len(later.over), later.lost_s) == (1, 10.0), "but it counts it: the next one is recovery 2"


def test_no_time_counts_between_the_end_and_a_restart() -> None:
    stopped = [*START, event(EventKind.INTERRUPTED, 125, 90)]
    assert spent(stopped, until=1000) == {"start_up": 5, "productive": 20}
    again = [*stopped, event(EventKind.SCHEDULER, 200), event(EventKind.TRAINING, 203, 90)]
    assert spent(again, until=204) == {"start_up": 8, "productive": 21, "idle": 75}


def test_time_waiting_for_saves_is_neither_productive_nor_redone() -> None:
    saved = [event(EventKind.COMMITTED, 110, 40, stalled_ms=500), event(EventKind.STEP, 115, 100, stalled_ms=250.5)]
    assert spent([*START, *saved]) == {"start_up": 5, "productive": 9.2495, "checkpoint_stalls": 0.7505}
    again = [*START, *KILL[:-1], event(EventKind.COMMITTED, 139, 190, stalled_ms=1000), KILL[-1]]
    found = spent(again)
    assert (found["checkpoint_stalls"], found["redone"]) == (1, 4.5)


def test_save_wait_is_at_most_the_training_time() -> None:
    nothing = event(EventKind.COMMITTED, 105.5, 1, stalled_ms=float("nan"))
    lies = [event(EventKind.COMMITTED, 106, 1, stalled_ms=10**9), event(EventKind.ROUND, 107, 2)]
    assert spent([*START, nothing, *lies], until=110) == {"start_up": 5, "checkpoint_stalls": 2, "forming": 3}
    assert spent([*START, lies[0]], until=110) == {"start_up": 5, "checkpoint_stalls": 5}


def test_world_that_only_grows_trains_until_its_next_generation() -> None:
    grown = [event(EventKind.ROUND, 110, 10, gently=True), event(EventKind.GENERATION, 112, 12, restore=12)]
    assert spent([*START, *grown, event(EventKind.TRAINING, 113, 12)]) == {
        "start_up": 5,
        "productive": 7,
        "restoring": 1,
    }


def drawn(rng: random.Random, length: int) -> list[JobEvent]:
    """Draw random events in random order, clock jumps included."""
    at, events = 1.7e9, []
    for _ in range(length):
        at += rng.choice([0, 1e-6, 0.001, 1, 30, 1e5, -40]) * rng.random()
        more = {
            "slot": rng.choice([0, 1, 2, "x", None, 2**62]),  # the most that a line may hold
            "gently": rng.choice([True, False]),
            "restore": rng.choice([None, 0, 7, "x"]),
            "stalled_ms": rng.choice([0, 0.4, 250, 10**12, -5, None, "x"]),
            "silent_ms": rng.choice([0, 0.4, 5000, 10**12, -5, None, "x"]),
            "spare": rng.choice([1, None]),
        }
        kind = rng.choice([kind for kind in EventKind if kind is not EventKind.CARRIED])
        events.append(JobEvent(kind, at, 1, rng.randrange(5), rng.randrange(100), "1", "", more))
    return events


@pytest.mark.parametrize("seed", range(300))
def test_buckets_sum_to_the_wall_time_exactly(seed: int) -> None:
    rng = random.Random(seed)
    events = drawn(rng, rng.randrange(60))
    fold = Goodput()
    for one in events:
        fold.add(one)
        until = one.at + rng.random() * 100
        buckets = fold.buckets(until)
        assert sum(buckets.values()) == fold.wall_us(until)
        assert min(buckets.values()) >= 0
    recoveries_of(events)


@pytest.mark.parametrize("seed", range(100))
def test_carried_sums_stand_for_the_events_they_were_made_of(seed: int) -> None:
    rng = random.Random(seed)
    events = drawn(rng, 60)
    cut = rng.randrange(60)
    before = goodput_of(events[:cut])
    carried = JobEvent(EventKind.CARRIED, before.seen_us / S, more=before.carried())
    (read,) = events_in([line_of(carried)])
    whole, rest = goodput_of(events), goodput_of([read, *events[cut:]])
    assert rest.buckets() == whole.buckets()
    assert goodput_of([*events[:cut], read, *events[cut:]]).buckets() == whole.buckets()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stage": "training"},
        {"totals_us": {}, "missing": [], "stage": "nonsense"},
        {**goodput_of(START + KILL).carried(), "began_us": "0"},
        {**goodput_of(START + KILL).carried(), "totals_us": {"productive": 10**15}},
        {**goodput_of(START + KILL).carried(), "totals_us": []},
        {**goodput_of(START + KILL).carried(), "mark_us": -5},
        {**goodput_of(START + KILL).carried(), "owed_us": -(10**12)},
        {**goodput_of(START + KILL).carried(), "owed_us": 10**18},
    ],
)
def test_false_carried_sum_breaks_no_total(more: dict[str, object]) -> None:
    fold = goodput_of([JobEvent(EventKind.CARRIED, 100.0, more=more), *START])
    assert sum(fold.buckets(200).values()) == fold.wall_us(200)


@pytest.mark.parametrize("seed", range(50))
def test_event_survives_its_line_unchanged(seed: int) -> None:
    events = drawn(random.Random(seed), 20)
    assert [one.plain() for one in events_in(map(line_of, events))] == [one.plain() for one in events]


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"kind": "lost"},
        {"kind": "lost", "at": "now"},
        {"kind": "unheard of", "at": 1},
        {"kind": [], "at": 1},
        {"kind": "lost", "at": 1, "step": 1.5},
        {"kind": "lost", "at": 1, "step": True},
        {"kind": "lost", "at": 1, "step": 1 << 64},
        {"kind": "lost", "at": float("inf")},
        {"kind": "lost", "at": float("nan")},
        {"kind": "lost", "at": 1, "node": 5},
    ],
)
def test_invalid_event_is_rejected(plain: object) -> None:
    assert event_in(plain) is None


def test_every_bucket_has_a_unique_name() -> None:
    assert len({str(bucket) for bucket in Bucket}) == len(Bucket) == 9


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
def test_line_with_a_number_invalid_in_json_is_rejected(number: str) -> None:
    """A single such line in the page's data would leave the browser blank."""
    line = line_of(JobEvent(EventKind.TRAINING, 1.5, more={"last": 0.25}))
    assert len(events_in([line])) == 1
    assert events_in([line.replace("1.5", number), line.replace("0.25", number)]) == []


def test_unproductive_time_has_the_names_of_googles_library() -> None:
    buckets_s = {str(bucket): float(2**number) for number, bucket in enumerate(Bucket)}
    assert BADPUT_TYPES.keys() == set(Bucket) - {Bucket.PRODUCTIVE}
    assert badput_s(buckets_s) == {
        "PROGRAM_STARTUP": 2,
        "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": 4 + 8 + 16,
        "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME": 32,
        "WASTED_PROGRESS_FROM_DISRUPTION": 64,
        "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME": 128,
        "OTHER": 256,
    }
    assert badput_s({}) == {}
