"""Equality of the ranks: which are asked for what, what ends the job, what is reported once, and the messages."""

from __future__ import annotations

import pytest

from samebits.core.agent.agent_events import Connected as Reconnected
from samebits.core.agent.agent_events import Disconnected, MustEnd, Observed
from samebits.core.end_kinds import EndKind
from samebits.core.messages import Activity, EndJob, Explain, Heartbeat, ReportEnvelope
from samebits.core.point import Point
from samebits.core.records import JobInterrupted, PointCommitted, TrainingFinished
from samebits.core.reports import FINAL, MAX_DIGESTS, Digest, Digests, Part, PartKind, SavedPoints
from samebits.core.state import JobState
from samebits.core.watch.equality import EXPLAIN_S, Judgement, differences, judge, sentence
from tests.core.desk import CREDENTIAL, done, training
from tests.core.house import House, training_house

WEIGHT = Part(PartKind.TRAINED, "model.weight", "aa")
EXTRA = Part(PartKind.UNTRAINED, "model.extra", "bb")
MEAN = Part(PartKind.LOOSE, "model.norm.running_mean", "cc")
STEPS = Part(PartKind.STEPS, "completed_steps", "3")


def says(
    house: House,
    node: str,
    *,
    step: int = 1,
    shared: bytes = b"same",
    loose: bytes = b"",
    commits: int = 1,
    parts: tuple[Part, ...] = (),
    averages: bool = True,
) -> None:
    credential = house.credential(node)
    point = Point(step, house.core.state.generation_number)
    digest = Digest(point, commits, shared, loose, averages, parts)
    house.receive(credential.session, ReportEnvelope(credential, Digests((digest,))))


def asked(house: House) -> list[str]:
    """Return the sessions that the last step asked for parts."""
    return [send.session for send in house.ready.sends if isinstance(send.message, Explain)]


# ---- the judgement


def test_ranks_are_grouped_with_the_largest_group_first() -> None:
    assert judge({0: b"a", 1: b"b", 2: b"b"}).groups == ((1, 2), (0,))
    assert judge({0: b"a", 1: b"b"}).groups == ((0,), (1,)), "of equal groups, the one with the lowest rank"
    assert judge({0: b"a", 1: b"b", 2: b"b"}).has_majority and not judge({0: b"a", 1: b"b"}).has_majority
    assert judge({0: b"a", 1: b"a"}).is_equal and judge({}).is_equal


def test_most_important_difference_comes_first() -> None:
    other = WEIGHT._replace(value="00"), STEPS._replace(value="4"), MEAN
    assert [mine.name for mine, _ in differences((WEIGHT, MEAN, STEPS), other)] == ["completed_steps", "model.weight"]
    assert differences((WEIGHT,), (WEIGHT, EXTRA)) == [(EXTRA, None)]


@pytest.mark.parametrize(
    ("mine", "theirs", "averages", "expected"),
    [
        (
            STEPS,
            STEPS._replace(value="4"),
            True,
            "completed_steps (3 on rank 0, 4 on rank 1): most likely a rank has",
        ),
        (
            Part(PartKind.SAMPLER, "sampler", "epoch 0"),
            Part(PartKind.SAMPLER, "sampler", "epoch 3"),
            True,
            "first in sampler (epoch 0 on rank 0, epoch 3 on rank 1): most likely the ranks took different",
        ),
        (
            WEIGHT,
            WEIGHT._replace(value="00"),
            False,
            "first in model.weight: most likely no DistributedDataParallel is",
        ),
        (
            WEIGHT,
            WEIGHT._replace(value="00"),
            True,
            "first in model.weight: most likely a rank has lost a value outside the state, or used a gradient",
        ),
        (
            EXTRA,
            EXTRA._replace(value="00"),
            True,
            "first in model.extra: most likely this parameter is in no optimizer",
        ),
        (
            Part(PartKind.SHARED, "table", "1"),
            Part(PartKind.SHARED, "table", "2"),
            True,
            "first in table: most likely the state marks it as shared. Fix: make it equal in the state's sync()",
        ),
    ],
)
def test_message_names_rank_step_part_cause_and_fix(mine: Part, theirs: Part, averages: bool, expected: str) -> None:
    one, other = (Digest(Point(3, 1), 1, b"", averages=averages, parts=(part,)) for part in (mine, theirs))
    text = sentence(Judgement(((0, 2), (1,))), one, other)
    assert text.startswith("the ranks are not equal after step 3: rank 1 differs from ranks 0 and 2, ")
    assert expected in text and text.count("Fix: ") == 1


def test_message_without_parts_still_has_a_fix() -> None:
    text = sentence(judge({0: b"a", 1: b"b"}), Digest(Point(5, 1), FINAL, b"a"), Digest(Point(6, 1), FINAL, b"b"))
    assert text.startswith(
        "the ranks are not equal at the end, step 5 on rank 0 and 6 on rank 1: rank 1 differs from rank 0. Fix: "
    )
    assert "Fix: " in text


def test_parts_of_a_single_rank_name_no_difference() -> None:
    one, other = Digest(Point(3, 1), 1, b"a", parts=(WEIGHT,)), Digest(Point(3, 1), 1, b"b")
    for pair in ((one, other), (other, one)):
        assert "first in" not in sentence(judge({0: b"a", 1: b"b"}), *pair)


# ---- the scheduler's side


def test_difference_ends_the_job_once_two_ranks_have_sent_their_parts() -> None:
    house = training_house(3)
    says(house, "0")
    says(house, "1", shared=b"other")
    assert not asked(house), "the third may show which is in the minority"
    says(house, "2")
    assert asked(house) == ["s0", "s1"] and house.ended is None
    says(house, "0", parts=(WEIGHT,))
    says(house, "1", shared=b"other", parts=(WEIGHT._replace(value="00"),))
    (record,) = house.records(JobInterrupted)
    assert record.kind is EndKind.UNEQUAL
    assert record.cause.startswith(
        "the ranks are not equal after step 1: rank 1 differs from ranks 0 and 2, first in model.w"
    )
    assert {send.message.kind for send in house.ready.sends if isinstance(send.message, EndJob)} == {EndKind.UNEQUAL}
    assert house.core.first_cause == record.cause
    assert JobState.replay(house.journal).interruptions == (record,)


def test_silent_rank_is_not_waited_for() -> None:
    house = training_house(2)
    says(house, "0")
    says(house, "1", shared=b"other")
    house.tick(EXPLAIN_S - 0.1)
    assert house.ended is None and house.core.wake_at() is not None
    for node in "01":
        house.beat(node)
    house.tick(0.1)
    assert house.records(JobInterrupted)[0].kind is EndKind.UNEQUAL


def test_time_while_the_scheduler_stands_still_does_not_count() -> None:
    house = training_house(2)
    says(house, "0")
    says(house, "1", shared=b"other")
    house.tick(0.5)
    house.stall(3.0)
    house.tick(EXPLAIN_S - 1.0)
    assert not house.core.state.interruptions
    house.tick(0.5)
    assert house.core.state.interruptions[-1].kind is EndKind.UNEQUAL


def test_training_is_finished_only_if_all_ranks_end_equal() -> None:
    house = training_house(2)
    house.beat("0", Activity.DONE, step=9)
    says(house, "1", step=9, shared=b"other", commits=FINAL)
    assert asked(house) == ["s0", "s1"]
    credential = house.credential("1")
    house.receive("s1", ReportEnvelope(credential, Digests((Digest(Point(9, 1), FINAL, b"other"),))))
    assert not house.records(TrainingFinished)
    house.tick(EXPLAIN_S)
    assert not [record for record in house.journal if isinstance(record, TrainingFinished)]
    assert house.core.state.interruptions[-1].kind is EndKind.UNEQUAL


def test_rank_that_ends_at_another_step_has_another_state() -> None:
    house = training_house(2)
    says(house, "0", step=9, commits=FINAL)
    says(house, "1", step=10, shared=b"other", commits=FINAL)
    assert asked(house) == ["s0", "s1"]


def test_digest_may_arrive_after_done() -> None:
    house = training_house(2)
    house.beat("0", Activity.DONE, step=9)
    state = house.core.state
    beat = Heartbeat(house.credential("1"), state.term, Activity.DONE, state.generation_number, None, 9)
    house.receive("s1", beat)
    assert not house.records(TrainingFinished)
    house.told("1", (9, 1), commits=FINAL)
    assert house.records(TrainingFinished) == [TrainingFinished(Point(9, 1))]


def test_point_is_common_only_if_it_is_equal_everywhere() -> None:
    house = training_house(2)
    for node in "01":
        house.saved(node, (10, 1))
    assert house.records(PointCommitted)
    house.saved("0", (10, 1), (20, 1))
    house.receive("s1", ReportEnvelope(house.credential("1"), Digests((Digest(Point(20, 1), 1, b"other"),))))
    assert house.core.state.committed_point == Point(10, 1)
    assert asked(house) == ["s0", "s1"]


def test_digest_that_arrives_after_the_point_makes_it_common() -> None:
    house = training_house(2)
    house.saved("0", (10, 1))
    credential = house.credential("1")
    house.receive("s1", ReportEnvelope(credential, SavedPoints((Point(10, 1),))))
    assert not house.records(PointCommitted)
    house.told("1", (10, 1))
    assert house.records(PointCommitted) == [PointCommitted(Point(10, 1))]


def test_harmless_difference_is_reported_once_and_ends_nothing() -> None:
    house = training_house(2)
    for step in (1, 2, 3):
        says(house, "0", step=step, loose=b"mine")
        says(house, "1", step=step, loose=b"yours")
        if step == 1:
            assert asked(house) == ["s0", "s1"]
            says(house, "0", step=step, loose=b"mine", parts=(MEAN,))
            says(house, "1", step=step, loose=b"yours", parts=(MEAN._replace(value="00"),))
        else:
            assert not asked(house)
    (said,) = [note for note in house.notes if "differs from" in note]
    assert said.startswith("rank 1 differs from rank 0 in model.norm.running_mean after step 1.")
    assert house.ended is None
    assert house.core.notices == [(1, said)], "each follower shows it"


def test_end_after_differing_values_names_them_before_its_fix() -> None:
    house = training_house(2)
    for node, loose in (("0", b"mine"), ("1", b"yours")):
        says(house, node, loose=loose)
    for node, loose, value in (("0", b"mine", "cc"), ("1", b"yours", "00")):
        says(house, node, loose=loose, parts=(MEAN._replace(name="seen", value=value),))
    for node in "01":
        says(house, node, step=2, shared=node.encode())
    house.tick(EXPLAIN_S)
    (ended,) = [record for record in house.journal if isinstance(record, JobInterrupted)]
    before, _, fix = ended.cause.partition(" Before that, rank 1 differs from rank 0 in seen after step 1, which may")
    assert before.endswith(".") and " Fix: " in fix and " Fix: " not in before, ended.cause


def test_repeated_report_changes_nothing() -> None:
    house = training_house(2)
    says(house, "0")
    for _ in range(2):
        says(house, "0")
    says(house, "1")
    assert house.ready.is_empty
    assert [one.tellers for one in house.core._equality._tallies.values()] == [2]


def test_report_of_a_dead_process_is_forgotten_with_it() -> None:
    house = training_house(2, cool_down_s=0.0)
    says(house, "1", step=11, shared=b"other")
    house.close("s1", gone=True)
    house.register("1", session="1 again")
    house.train(n0=[(10, 1)])
    says(house, "0", step=11)
    assert not asked(house)
    says(house, "1", step=11)
    assert not asked(house) and house.ended is None


# ---- the worker's side


def digest(step: int, **more: object) -> Digest:
    return Digest(Point(step, 1), 1, b"x", parts=(WEIGHT,), **more)  # type: ignore[arg-type]


def test_agent_sends_digests_without_parts_until_asked() -> None:
    desk = training()
    desk.step(Observed(Digests.of((digest(1), digest(2)))))
    (said,) = desk.reported(Digests)
    assert [one.parts for one in said.body.digests] == [(), ()]
    desk.hear(Explain("job-1", 1, Point(2, 1), 1))
    (said,) = desk.reported(Digests)
    assert [one.parts for one in said.body.digests] == [(), (WEIGHT,)]
    desk.hear(Explain("job-2", 1, Point(1, 1), 1))
    assert not desk.reported(Digests), "another job's scheduler"


def test_agent_sends_digests_again_after_reconnecting_and_while_done() -> None:
    desk = training()
    desk.step(Observed(Digests.of(tuple(digest(step) for step in range(1, MAX_DIGESTS + 3)))))
    assert len(desk.reported(Digests)[0].body.digests) == MAX_DIGESTS
    desk.step(Disconnected())
    desk.step(Reconnected())
    desk.admitted(term=2)
    assert desk.reported(Digests)
    assert not desk.passes(1.0).sends or not desk.reported(Digests)
    desk = done()
    desk.step(Observed(Digests.of((digest(60),))))
    desk.passes(1.0, 60)
    assert [message.sender for message in desk.reported(Digests)] == [CREDENTIAL]


def test_difference_ends_every_worker() -> None:
    desk = training()
    desk.hear(EndJob("job-1", 1, EndKind.UNEQUAL, "they differ"))
    assert [notice.text for notice in desk.told(MustEnd)] == ["they differ"]


# ---- the point from which the job resumes


def test_differing_point_is_never_restored() -> None:
    house = training_house(2, cool_down_s=0.0)
    for node in "01":
        house.saved(node, (10, 1))
    for node in "01":
        says(house, node, step=20, shared=node.encode())
    house.tick(EXPLAIN_S)
    assert house.core.state.is_in_doubt
    assert JobState.replay(house.core.state.snapshot()).is_in_doubt
    house.crash(after_s=1.0)
    house.tick(6.0)  # their processes have ended
    for node in "01":
        house.register(node, session=f"{node} again")
    for node in "01":
        house.join(node, [(20, 1), (10, 1)])
    assert house.committed().restore == Point(10, 1)
    assert not house.core.state.is_in_doubt


def test_job_without_an_equal_point_starts_from_step_0() -> None:
    house = training_house(2, cool_down_s=0.0)
    for node in "01":
        says(house, node, step=20, shared=node.encode())
    house.tick(EXPLAIN_S)
    house.crash(after_s=1.0)
    house.tick(6.0)  # their processes have ended
    for node in "01":
        house.register(node, session=f"{node} again")
    for node in "01":
        house.join(node, [(20, 1)])
    assert house.committed().restore is None
