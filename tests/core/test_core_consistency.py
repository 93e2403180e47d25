"""Ranks that were equal and now differ: which are trusted, who rolls back to what, and what ends the job."""

from __future__ import annotations

import itertools
import random

import pytest

from samebits.core.agent.agent_events import EnterAgain, Entered, Failed, Trains
from samebits.core.end_kinds import EndKind
from samebits.core.ledger import MOST_GENERATIONS, Trust, Witnesses
from samebits.core.messages import (
    SCHEMA,
    Activity,
    Depart,
    EqualPoint,
    Explain,
    GenerationStarted,
    Heartbeat,
    Holdings,
    Join,
    ReportEnvelope,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted, JobInterrupted, RolledBack
from samebits.core.reports import FINAL, MAX_DIGESTS, MAX_PARTS, Anomaly, Digest, Digests, Part, PartKind
from samebits.core.restore import choose_restore_point
from samebits.core.state import JobState
from samebits.core.values import replace
from samebits.core.watch.consistency import MOST_AT_ONE_STEP, GoBack, RankProcesses, Repair, Stop, decide
from samebits.core.watch.equality import EXPLAIN_S, RankDifference, judge
from samebits.errors import ProtocolError
from samebits.printable import listed
from tests.core.desk import training, waiting
from tests.core.house import NUMERICS, House, policy

WEIGHT = Part(PartKind.TRAINED, "model.linear.weight", "aa")
MOMENT = Part(PartKind.TRAINED, "exp_avg of model.linear.weight", "bb")
FLIPPED = (WEIGHT._replace(value="00"), MOMENT)
SOUND = (WEIGHT, MOMENT)
BACK = Point(50, 1)


def house_of(size: int, trust: Trust = Trust.MAJORITY, **changes: float | bool | str) -> House:
    """Return a scheduler that repairs differences, in its first generation."""
    house = House(policy(size, trust=trust, **changes)).fill()
    if not changes:
        house.train()
    return house


def says(
    house: House,
    node: str,
    step: int,
    shared: bytes = b"same",
    *,
    generation: int | None = None,
    commits: int | None = None,
    parts: tuple[Part, ...] = (),
    is_kept: bool = True,
) -> None:
    credential = house.credential(node)
    number = house.core.state.generation_number if generation is None else generation
    digest = Digest(Point(step, number), step if commits is None else commits, shared, parts=parts, is_kept=is_kept)
    house.receive(credential.session, ReportEnvelope(credential, Digests((digest,))))


def all_say(house: House, step: int, *odd: str, wrong: bytes = b"other") -> None:
    for node in sorted(house.core.state.by_slot.values()):
        says(house, node, step, wrong if node in odd else b"same")


def explain(house: House, step: int, *odd: str, wrong: bytes = b"other") -> None:
    """Answer the request for parts on behalf of each rank asked."""
    for node in sorted(house.core.state.by_slot.values()):
        asked = [one for one in house.sent.get(f"s{node}", []) if isinstance(one, Explain) and one.point.step == step]
        if asked:
            says(house, node, step, wrong if node in odd else b"same", parts=FLIPPED if node in odd else SOUND)


def flip(house: House, odd: str, *, equal: int = 50, seen: int = 100, wrong: bytes = b"other") -> None:
    """Make one rank differ after all were equal."""
    all_say(house, equal)
    all_say(house, seen, odd, wrong=wrong)
    explain(house, seen, odd, wrong=wrong)


def go_back(house: House, *, live: tuple[int, int] = (50, 1), own_parts: bool = False) -> None:
    """Let every rank join with its copy of the rollback point."""
    for node in sorted(house.core.state.by_slot.values()):
        credential, opened = house.credential(node), house.last(house.seat(node).session, RoundOpened)
        join = Join(
            credential,
            opened.round,
            Holdings((), own_parts, NUMERICS, live=Point(*live), commits=live[0], back_to=opened.back_to),
        )
        house.receive(credential.session, join)


def test_rank_that_is_steps_ahead_is_not_called_a_faulty_device() -> None:
    house = house_of(3)
    all_say(house, 50)
    steps = [Part(PartKind.STEPS, "completed_steps", one) for one in ("100", "102")]
    for parts in ((), (steps[0], *SOUND)):
        for node in "02":
            says(house, node, 100, parts=parts)
        says(house, "1", 100, b"other", parts=(steps[1], *FLIPPED) if parts else ())
    house.tick(EXPLAIN_S)
    text = next(record.text for record in house.journal if isinstance(record, RolledBack))
    assert "first in completed_steps (100 on rank 0, 102 on rank 1) and 1 more" in text
    assert "it made more or fewer steps than the others" in text and "(device)" not in text


def test_difference_within_one_step_with_unknown_rank_is_described_fully() -> None:
    house = house_of(3)
    for commits, odd in ((50, b"same"), (FINAL, b"other")):
        for node in "012":
            says(house, node, 50, odd if node == "1" else b"same", commits=commits)
    house.tick(EXPLAIN_S)
    record = next(record for record in house.journal if isinstance(record, RolledBack))
    assert ", since that commit: " in record.text and house.core.notices[-1][1] == record.text
    unknown = replace(record, suspects=())
    assert unknown.reason == "all ranks roll back to step 50: the ranks differed after step 50"


# ---- no false alarms


def false_alarms(commits: int, seed: int, size: int = 3) -> int:
    """Let equal ranks report this many commits, and return the number of requests, rollbacks and ends.

    Reports arrive in any order, some late, some twice, and some only with the next report, which repeats them.
    """
    rng, house, alarms, step = random.Random(seed), house_of(size), 0, 0
    nodes = [str(one) for one in range(size)]
    told: dict[str, list[Digest]] = {node: [] for node in nodes}
    for commit in range(1, commits + 1):
        step += rng.randint(1, 50)
        is_kept, shared = rng.random() < 0.5, rng.randbytes(16)
        for node in rng.sample(nodes, size):
            point = Point(step, house.core.state.generation_number)
            loose = b"" if rng.random() < 0.5 else b"loose"
            told[node] = [*told[node], Digest(point, commit, shared, loose, is_kept=is_kept)][-MAX_DIGESTS:]
            for _ in range(rng.choice((0, 1, 1, 1, 2))):
                credential = house.credential(node)
                digests = told[node] if rng.random() < 0.9 else told[node][:-1]
                house.receive(credential.session, ReportEnvelope(credential, Digests(tuple(digests))))
        alarms += sum(isinstance(one, Explain) for sent in house.sent.values() for one in sent)
        for sent in house.sent.values():
            sent.clear()
    return alarms + sum(isinstance(one, (RolledBack, JobInterrupted)) for one in house.journal)


@pytest.mark.parametrize("seed", range(4))
def test_equal_ranks_raise_no_alarm(seed: int) -> None:
    assert false_alarms(100, seed) == 0


# ---- the decision


def found(
    *values: bytes, step: int = 100, equal: Point | None = BACK, commits: tuple[int, int] = (1, 1)
) -> RankDifference:
    by_rank = dict(enumerate(values))
    one, other = (Digest(Point(step, 1), number, b"") for number in commits)
    return RankDifference(judge(by_rank), one, other, by_rank, equal)


@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("size", [3, 4, 5])
def test_the_differing_rank_takes_its_state_from_the_others(size: int, trust: Trust) -> None:
    for odd in range(size):
        decision = decide(found(*(b"x" if rank == odd else b"a" for rank in range(size))), trust)
        if trust is Trust.STOP:
            assert decision == Stop("no rollback (CONSISTENCY=stop)")
        elif trust is Trust.LEADER and odd == 0:
            assert decision == GoBack(BACK, tuple(range(1, size)))
        else:
            assert decision == GoBack(BACK, (odd,))


@pytest.mark.parametrize("values", [b"ab", b"aabb", b"abc", b"aabbc", b"aabc"])
def test_without_a_majority_all_roll_back_and_none_is_suspected(values: bytes) -> None:
    difference = found(*(bytes([one]) for one in values))
    assert decide(difference, Trust.MAJORITY) == GoBack(BACK, ())
    again = [Repair(100, 50, difference.values)]
    assert isinstance(decide(difference, Trust.MAJORITY, again), Stop), "the result was the same"
    leader = decide(difference, Trust.LEADER)
    assert isinstance(leader, GoBack) and 0 not in leader.suspects and leader.to == BACK


def test_ranks_that_were_never_equal_point_to_the_script() -> None:
    assert decide(found(b"a", b"a", b"b", equal=None), Trust.MAJORITY) == Stop("")
    assert decide(found(b"a", b"b", equal=Point(0, 1)), Trust.MAJORITY) == Stop("")


MEMBERS = {0: ("0", 1), 1: ("1", 1), 2: ("2", 1)}


def repaired(value: bytes = b"x") -> Repair:
    """Return a rollback because rank 1 had this value."""
    return Repair(100, 50, {1: value}, {1: MEMBERS[1]})


AGAIN = repaired()


def decided(
    *repairs: Repair,
    odd: bytes = b"x",
    step: int = 100,
    room: int = 0,
    now: tuple[str, int] = ("1", 1),
    trust: Trust = Trust.MAJORITY,
    has_lost_state: bool = False,
) -> GoBack | Stop:
    """Return the decision when rank 1, which is ``now`` this process, differs again."""
    processes = RankProcesses(MEMBERS | {1: now}, room, has_lost_state)
    return decide(found(b"a", odd, b"a", step=step), trust, repairs, None, processes)


def test_worker_that_repeats_a_difference_is_replaced_before_the_script_is_blamed() -> None:
    assert decided(AGAIN, room=1) == GoBack(BACK, (1,), replaces=True)
    assert decided(AGAIN, room=1, now=("1", 2)) == GoBack(BACK, (1,), replaces=True), "a restart keeps the device"
    assert decided(repaired(b"y"), room=1) == GoBack(BACK, (1,)), "another value, for now"
    assert decided(AGAIN, room=1, step=50) == GoBack(BACK, (1,), replaces=True)
    assert decided(repaired(b"y"), repaired(b"z"), room=1) == GoBack(BACK, (1,), replaces=True)
    only_one = decide(
        found(b"a", b"x", b"x", b"a", b"a"),
        Trust.MAJORITY,
        [Repair(100, 50, {1: b"x", 2: b"x"}, {1: ("1", 1), 2: ("2", 1)})],
        None,
        RankProcesses(MEMBERS, room=1),
    )
    assert isinstance(only_one, Stop) and "devices of worker 1, 2" in only_one.why, "both have to be replaced"


def test_without_room_it_is_unknown_whether_the_device_or_the_script_is_at_fault() -> None:
    for repairs, step in (((AGAIN,), 100), ((AGAIN,), 50), ((repaired(b"y"),) * 2, 100)):
        stop = decided(*repairs, step=step)
        assert isinstance(stop, Stop) and "not a device fault" not in stop.why
        assert ", by a permanent fault of worker 1's device, such as a stuck bit, or by the script" in stop.why
        assert stop.fix == "resume with a spare on another host (SPARE_NUM) or without that host"


def test_difference_that_another_worker_repeats_is_the_scripts() -> None:
    for repairs in ((AGAIN,), (AGAIN, AGAIN)):
        stop = decided(*repairs, now=("9", 1), room=9)
        why = "the same difference appeared again after the rollback on another worker, so it is not a device fault"
        assert stop == Stop(why)
    other = decided(*(repaired(value) for value in (b"y", b"z")), now=("9", 1), room=9)
    assert other == Stop("the ranks differed at the same step again after 2 rollbacks"), "any number of devices"


@pytest.mark.parametrize("values", [b"aab", b"ab"])
def test_difference_that_lost_state_or_other_steps_explain_replaces_no_worker(values: bytes) -> None:
    difference = found(*(bytes([one]) for one in values))
    odd = {2: b"b"} if len(values) == 3 else difference.values
    before = [Repair(100, 50, odd, {rank: MEMBERS[rank] for rank in odd})]
    lost = decide(difference, Trust.MAJORITY, before, None, RankProcesses(MEMBERS, 9, has_lost_state=True))
    uneven = found(*difference.values.values(), commits=(1, 2))
    steps = decide(uneven, Trust.MAJORITY, before, None, RankProcesses(MEMBERS, 9))
    assert lost == steps == Stop("the same difference appeared again after the rollback, so it is not a device fault")


@pytest.mark.parametrize("trust", [Trust.MAJORITY, Trust.LEADER])
def test_repeated_difference_without_a_majority_replaces_no_worker(trust: Trust) -> None:
    """The trusted leader may be the rank with the faulty device."""
    difference = found(b"a", b"b")
    odd = {1: b"b"} if trust is Trust.LEADER else difference.values
    before = [Repair(100, 50, odd, {rank: MEMBERS[rank] for rank in odd})]
    stop = decide(difference, trust, before, None, RankProcesses(MEMBERS, 9))
    assert isinstance(stop, Stop) and stop.why.endswith("by a permanent fault of a device or by the script")
    assert stop.fix == "resume on other hosts"


def test_worker_that_does_not_leave_is_not_waited_for_forever() -> None:
    repairs: list[Repair] = []
    while isinstance(decided(*repairs, room=1), GoBack):
        repairs.append(AGAIN)
    assert len(repairs) == MOST_AT_ONE_STEP


def test_same_wrong_value_twice_is_not_the_device() -> None:
    difference, before = found(b"a", b"x", b"a"), Repair(100, 50, {1: b"x"})
    assert isinstance(decide(difference, Trust.MAJORITY, [before]), Stop)
    assert isinstance(decide(difference, Trust.MAJORITY, [Repair(100, 50, {1: b"y"})]), GoBack), "another value"
    assert isinstance(decide(difference, Trust.MAJORITY, [Repair(150, 50, {1: b"x"})]), GoBack), "another step"
    assert isinstance(decide(difference, Trust.MAJORITY, [Repair(100, 50, {2: b"x"})]), GoBack), "another rank"


def test_difference_at_the_rollback_point_is_not_the_device() -> None:
    """For example, a callback of the script changes one rank's weights whenever a generation begins."""
    difference = found(b"a", b"x", b"a", step=50, equal=BACK)
    assert isinstance(decide(difference, Trust.MAJORITY, [Repair(100, 50, {1: b"y"})]), Stop)
    assert isinstance(decide(difference, Trust.MAJORITY, [Repair(45, 40, {1: b"y"})]), GoBack), "they trained past it"


def test_job_stuck_at_a_step_does_not_roll_back_forever() -> None:
    before = [Repair(100, 50, {1: b"1"}), Repair(100, 50, {1: b"2"})]
    assert isinstance(decide(found(b"a", b"x", b"a"), Trust.MAJORITY, before[:1]), GoBack)
    assert isinstance(decide(found(b"a", b"x", b"a"), Trust.MAJORITY, before), Stop)


def test_rank_that_took_anothers_state_is_no_witness_of_it() -> None:
    a, b = ("0", 1), ("1", 1)
    difference = found(b"x", b"a", b"a", b"x")
    assert decide(difference, Trust.MAJORITY, (), {0: a, 1: b, 2: ("2", 1), 3: a}) == GoBack(BACK, (0, 3))
    assert decide(difference, Trust.MAJORITY, (), {0: a, 1: b, 2: b, 3: ("3", 2)}) == GoBack(BACK, (1, 2))
    most = found(b"x", b"a", b"x")
    assert decide(most, Trust.MAJORITY) == GoBack(BACK, (1,))
    assert decide(most, Trust.MAJORITY, (), {0: a, 1: b, 2: a}) == GoBack(BACK, ())


def test_loss_of_the_rank_that_could_decide_rolls_all_back_and_names_none() -> None:
    """The other rank was a member when all were equal, in the previous generation."""
    since = Point(40, 0)
    assert decide(found(b"x", b"a", equal=since), Trust.MAJORITY) == GoBack(since, ())
    assert isinstance(decide(found(b"x", b"a", equal=since), Trust.STOP), Stop)
    again = [Repair(100, 40, {0: b"x", 1: b"a"})]
    assert isinstance(decide(found(b"x", b"a", equal=since), Trust.MAJORITY, again), Stop), "the result was the same"
    assert isinstance(decide(found(b"y", b"a", equal=since), Trust.MAJORITY, again), GoBack)


def test_state_is_traced_through_generations() -> None:
    zero, one, two, three = ("0", 1), ("1", 1), ("2", 1), ("3", 1)
    witnesses = Witnesses()
    witnesses.begin(2, (zero, ("1", 2), two), {1: 0})
    witnesses.begin(3, (three, ("1", 2), two), {0: 1})
    witnesses.begin(4, (three, ("1", 2), ("2", 2)), {})
    assert witnesses.origins((three, ("1", 2), two), since=1) == {0: zero, 1: zero, 2: two}
    assert witnesses.origins((three, ("1", 2), two), since=2) == {0: ("1", 2), 1: ("1", 2), 2: two}
    assert witnesses.origins((three, one), since=4) == {0: three, 1: one}
    for generation in range(5, 5 + 2 * MOST_GENERATIONS):
        witnesses.begin(generation, (zero, one), {1: 0})
    assert len(witnesses._took) <= MOST_GENERATIONS


# ---- the scheduler


@pytest.mark.parametrize("odd", ["0", "1", "2", "3"])
@pytest.mark.parametrize("size", [3, 4])
def test_flip_is_named_and_all_return_to_the_last_equal_point(size: int, odd: str) -> None:
    if int(odd) >= size:
        return
    house = house_of(size)
    house.beat("0", step=103)
    flip(house, odd)
    (record,) = [one for one in house.journal if isinstance(one, RolledBack)]
    assert (record.to, record.suspects, record.step, record.generation) == (BACK, ((odd, 1),), 100, 1)
    others = listed(rank for rank in range(size) if str(rank) != odd)
    assert record.text.startswith(f"rank {odd} (worker {odd}, pid ")
    assert (
        f"differs from ranks {others} after step 100, first in model.linear.weight, since some step from 51 to 100"
        in (record.text)
    )
    assert record.text.endswith("all ranks roll back to step 50, where all were equal, and repeat 53 steps")
    assert record.text in house.notes
    opened = [house.last(f"s{rank}", RoundOpened) for rank in range(size)]
    assert {one.back_to for one in opened} == {BACK} and house.ended is None
    go_back(house, own_parts=True)
    started = [house.last(f"s{rank}", GenerationStarted) for rank in range(size)]
    assert {one.restore for one in started} == {BACK}
    holder = next(rank for rank in range(size) if str(rank) != odd)
    assert [one.source for one in started] == [holder if str(rank) == odd else rank for rank in range(size)]
    assert house.core.state.rolled_back is None and house.core.state.generation_number == 2


def test_parts_of_an_earlier_line_are_not_requested_twice() -> None:
    """Reports about the abandoned line change nothing, whether early or late."""
    house = house_of(3)
    flip(house, "1")
    for step in (101, 150):
        says(house, "2", step, b"late")
    go_back(house)
    for node in "012":
        says(house, node, 100, b"other" if node == "1" else b"same", generation=1)
    assert house.core.state.generation_number == 2 and house.core.state.rolled_back is None
    assert not house.records(RolledBack) and house.ended is None
    for node in "012":
        house.beat(node)
    all_say(house, 100)
    assert house.core.phase() == "training"


def test_every_order_of_reports_with_or_without_duplicates_has_the_same_result() -> None:
    """Six messages of three ranks in every order that keeps each rank's own order; then each of them twice."""
    texts = set()
    for order in set(itertools.permutations("001122")):
        for often in (1, 2):
            house, told = house_of(3), dict[str, tuple[Digest, ...]]()
            for node in order:
                before = told.get(node, ())
                shared = b"other" if node == "1" and before else b"same"
                step = 100 if before else 50
                told[node] = (*before, Digest(Point(step, 1), step, shared, is_kept=True))
                for _ in range(often):
                    house.receive(f"s{node}", ReportEnvelope(house.credential(node), Digests(told[node])))
            explain(house, 100, "1")
            (record,) = [one for one in house.journal if isinstance(one, RolledBack)]
            texts.add((record.to, record.suspects, record.text))
    assert len(texts) == 1


def test_rank_that_has_not_reported_is_waited_for() -> None:
    house = house_of(3)
    all_say(house, 50)
    says(house, "0", 100)
    says(house, "1", 100, b"other")
    house.tick(0.9)
    assert not [one for one in house.sent["s0"] if isinstance(one, Explain)] and house.core.state.rolled_back is None


def test_rank_that_does_not_send_its_parts_is_not_waited_for() -> None:
    house = house_of(3)
    all_say(house, 50)
    all_say(house, 100, "2")
    assert house.core.state.rolled_back is None
    house.tick(EXPLAIN_S)
    record = house.core.state.rolled_back
    assert record is not None and "first in" not in record.text and record.suspects == (("2", 1),)


def test_two_against_two_roll_back_without_a_suspect() -> None:
    house = house_of(4)
    all_say(house, 50)
    all_say(house, 100, "1", "3")
    explain(house, 100, "1", "3")
    record = house.core.state.rolled_back
    assert record is not None and record.to == BACK and not record.suspects
    assert record.text.startswith(
        "ranks 0 and 2 differ from ranks 1 and 3 after step 100, first in model.linear.weight, "
    )
    assert "and without a majority it is unknown which is wrong; all ranks roll back to step 50" in record.text


def test_rollback_names_the_point_that_all_ranks_hold() -> None:
    """The save of step 80 is not on every disk yet, so only the copies of step 50 can be restored."""
    house = house_of(3)
    all_say(house, 50)
    for node in "012":
        says(house, node, 80, is_kept=False)
    all_say(house, 100, "2")
    explain(house, 100, "2")
    record = house.core.state.rolled_back
    assert record is not None and record.to == BACK
    assert "since some step from 81 to 100" in record.text
    assert "all ranks roll back to step 50, where all were equal, and repeat 50 steps" in record.text


# ---- shards


def tells_shards(house: House, step: int, *odd: int, shards: int = 2, commits: int | None = None) -> None:
    """Report equal states, whose shards are equal too except on these ranks."""
    for rank, node in enumerate(sorted(house.core.state.by_slot.values())):
        credential, key = house.credential(node), rank % shards
        point = Point(step, house.core.state.generation_number)
        part = Part(PartKind.SHARD, "model.linear.weight", f"{key}{rank in odd}")
        digest = Digest(
            point, commits or step, b"same", parts=(part,), key=(key,), held=b"odd" if rank in odd else b"%d" % key
        )
        house.receive(credential.session, ReportEnvelope(credential, Digests((digest,))))


def test_shards_are_compared_between_the_ranks_that_hold_them() -> None:
    house = house_of(6)
    tells_shards(house, 50)
    assert house.core.state.rolled_back is None and house.core._equality.is_equal(BACK)
    tells_shards(house, 100, 3)
    record = house.core.state.rolled_back
    assert record is not None and record.to == BACK and record.suspects == (("3", 1),)
    assert (
        record.text.startswith("rank 3 (worker 3, ")
        and " differs from ranks 1 and 5 after step 100, first in" in record.text
    )


def test_of_two_replicas_of_a_shard_none_is_suspected() -> None:
    house = house_of(4)
    tells_shards(house, 50)
    tells_shards(house, 100, 3)
    record = house.core.state.rolled_back
    assert record is not None and record.to == BACK and not record.suspects
    assert record.text.startswith("rank 1 differs from rank 3 after step 100, first in model.linear.weight, since")


def test_equal_values_of_other_shards_are_not_compared() -> None:
    """A rank whose shard got the value of another shard differs from its own replica."""
    house = house_of(4)
    tells_shards(house, 50)
    for rank in range(4):
        credential = house.credential(str(rank))
        digest = Digest(Point(100, 1), 100, b"same", key=(rank % 2,), held=b"1" if rank == 2 else b"%d" % (rank % 2))
        house.receive(credential.session, ReportEnvelope(credential, Digests((digest,))))
    house.tick(EXPLAIN_S)
    record = house.core.state.rolled_back
    assert record is not None and record.text.startswith("rank 0 differs from rank 2 after step 100")


def test_job_is_not_finished_if_final_shards_differ() -> None:
    house = house_of(4)
    tells_shards(house, 50)
    tells_shards(house, 60, 2, commits=FINAL)
    assert not house.core._equality.is_final_equal and house.core.state.rolled_back is not None


def test_parts_of_shards_are_not_compared_between_other_shards() -> None:
    one = Digest(BACK, 1, b"a", parts=(Part(PartKind.SHARD, "w", "1"), Part(PartKind.STEPS, "s", "1")), key=(0,))
    other = Digest(BACK, 1, b"b", parts=(Part(PartKind.SHARD, "w", "2"), Part(PartKind.STEPS, "s", "2")), key=(1,))
    found = RankDifference(judge({0: b"a", 1: b"b"}), one, other, {0: b"a", 1: b"b"}, None)
    assert found.first_part() == "s (1 on rank 0, 2 on rank 1)"


def test_round_asks_again_members_that_joined_with_later_points() -> None:
    house = house_of(3)
    all_say(house, 50)
    all_say(house, 100, "1")
    house.core._failed_collective = "a collective failed"  # as a member's heartbeat would report
    house.tick()
    house.join("0", live=(104, 1))
    house.join("1", live=(104, 1))
    house.join("2", live=(104, 1))
    assert house.core.state.generation_number == 1, "held until the rollback point is known"
    explain(house, 100, "1")
    assert house.last("s0", RoundOpened).back_to == BACK
    for node in "012":
        house.join(node, live=(104, 1))
    assert house.core.state.generation_number == 1 and house.ended is None, "sent before the news arrived"
    go_back(house)
    assert house.committed().restore == BACK and house.core.state.generation_number == 2


def test_scheduler_killed_in_between_still_rolls_everyone_back() -> None:
    house = house_of(3)
    flip(house, "1")
    house.crash(after_s=0.1)
    assert house.core.state.back_to == BACK
    for node in "012":
        house.register(node, incarnation=1, job="job-1")
        house.beat(node)
    house.tick(1.0)
    for node in "012":
        house.beat(node)
    assert {house.last(f"s{rank}", RoundOpened).back_to for rank in range(3)} == {BACK}
    go_back(house)
    assert house.committed().restore == BACK
    assert JobState.replay(JobState.replay(house.journal).snapshot()).rolled_back is None


def test_rollback_survives_compaction() -> None:
    house = house_of(3)
    flip(house, "1")
    state = JobState.replay(house.journal)
    assert JobState.replay(state.snapshot()).rolled_back == state.rolled_back is not None


def test_restarted_scheduler_finds_the_difference_in_repeated_reports() -> None:
    house = house_of(3)
    house.crash(after_s=0.1)
    for node in "012":
        house.register(node, incarnation=1, job="job-1")
        credential = house.credential(node)
        told = tuple(
            Digest(Point(step, 1), step, b"other" if (node, step) == ("1", 100) else b"same", is_kept=True)
            for step in (50, 100)
        )
        house.receive(credential.session, ReportEnvelope(credential, Digests(told)))
    explain(house, 100, "1")
    assert house.core.state.back_to == BACK


def test_difference_at_the_end_of_training_is_repaired_too() -> None:
    house = house_of(3)
    all_say(house, 50)
    for node in "012":
        says(house, node, 60, b"other" if node == "2" else b"same", commits=FINAL, is_kept=False)
        credential = house.credential(node)
        house.receive(credential.session, Heartbeat(credential, 1, Activity.DONE, 1, None, 60))
    house.tick(EXPLAIN_S)
    record = house.core.state.rolled_back
    assert record is not None and record.to == BACK and "differs from ranks 0 and 1 at the end, step 60" in record.text
    assert house.core.state.final is None


def test_job_ends_if_no_earlier_point_is_left() -> None:
    house = house_of(3)
    flip(house, "1")
    for node in "012":
        credential, opened = house.credential(node), house.last(f"s{node}", RoundOpened)
        live = Point(90, 1)
        house.receive(
            credential.session,
            Join(credential, opened.round, Holdings((), False, NUMERICS, live=live, back_to=opened.back_to)),
        )
    assert house.core.state.generation_number == 1
    (record,) = [one for one in house.journal if isinstance(one, JobInterrupted)]
    assert record.kind is EndKind.UNEQUAL and "no rank's memory or disk holds a point" in record.cause


def test_older_point_on_a_disk_suffices() -> None:
    house = house_of(3)
    flip(house, "1")
    for node in "012":
        credential, opened = house.credential(node), house.last(f"s{node}", RoundOpened)
        house.receive(
            credential.session,
            Join(
                credential,
                opened.round,
                Holdings((Point(40, 1), Point(75, 1)), False, NUMERICS, back_to=opened.back_to),
            ),
        )
    assert house.committed().restore == Point(40, 1), "points after the last comparison are not trusted"


def test_node_that_differed_twice_is_asked_to_leave_if_a_spare_is_warm() -> None:
    house = house_of(3, spare_num=1)
    house.register("9", "s9")
    house.train()
    house.beat("9", Activity.WAITING)
    flip(house, "1")
    go_back(house)
    assert not [one for one in house.sent["s1"] if isinstance(one, Depart)]
    for node in "012":
        house.beat(node)
    house.beat("9", Activity.WAITING)
    flip(house, "1", equal=100, seen=150, wrong=b"again")
    (asked,) = [one for one in house.sent["s1"] if isinstance(one, Depart)]
    assert "2 times" in asked.text
    house.leave("1", text="asked to leave")
    assert house.core.state.by_slot[1] == "9", "the spare takes the place"
    assert not [one for node in "02" for one in house.sent[f"s{node}"] if isinstance(one, Depart)]


def test_without_a_spare_the_node_stays_and_that_is_logged() -> None:
    house = house_of(3)
    flip(house, "1")
    go_back(house)
    for node in "012":
        house.beat(node)
    flip(house, "1", equal=100, seen=150, wrong=b"again")
    assert not [one for one in house.sent["s1"] if isinstance(one, Depart)]
    assert any("it keeps its rank, because no spare is ready" in text for text in house.notes)


def differ_again(house: House, odd: str) -> None:
    """Let all train again after a rollback, and the same difference appear on this node."""
    go_back(house)
    for node in house.core.state.by_slot.values():
        house.beat(node)
    for node in house.core.state.spares:
        house.beat(node, Activity.WAITING)
    all_say(house, 100, odd)
    explain(house, 100, odd)


@pytest.mark.parametrize("comes_again", [False, True])
def test_node_that_repeats_the_difference_is_replaced_by_a_spare(comes_again: bool) -> None:
    """A stuck bit of the node's device ends with it, whereas a mistake in the script appears on the spare too."""
    house = house_of(3, spare_num=1)
    house.register("9", "s9")
    house.train()
    house.beat("9", Activity.WAITING)
    flip(house, "1")
    differ_again(house, "1")
    (asked,) = [one for one in house.sent["s1"] if isinstance(one, Depart)]
    assert asked.text == "worker 1 differed again after the rollback: it is asked to leave" and house.ended is None
    house.leave("1", text="asked to leave")
    assert house.core.state.by_slot[1] == "9", "the spare takes the place"
    differ_again(house, "9" if comes_again else "")
    ends = [one.cause for one in house.journal if isinstance(one, JobInterrupted)]
    again = "Not repaired: the same difference appeared again after the rollback on another worker, so it is not a"
    assert all(again in cause for cause in ends) and len(ends) == comes_again
    assert comes_again or (house.core.phase() == "training" and house.committed().restore == BACK)


def test_node_that_repeats_the_difference_leaves_if_the_world_may_shrink() -> None:
    house = house_of(4, min_world_size=3)
    house.train()
    flip(house, "1")
    differ_again(house, "1")
    assert [one for one in house.sent["s1"] if isinstance(one, Depart)] and house.ended is None
    assert not [one for node in "023" for one in house.sent[f"s{node}"] if isinstance(one, Depart)]


def test_repeated_difference_without_a_spare_ends_the_job_with_both_fixes() -> None:
    house = house_of(3)
    flip(house, "1")
    differ_again(house, "1")
    record = next(one for one in house.journal if isinstance(one, JobInterrupted))
    assert record.kind is EndKind.UNEQUAL and record.cause.startswith(
        "the ranks are not equal after step 100: rank 1 differs from ranks 0 and 2, first in model.linear.weight. Not "
        "repaired: the same difference appeared again after the rollback, by a permanent fault of worker 1's device, "
        "such as a stuck bit, or by the script. Fix: resume with a spare on another host (SPARE_NUM) or without that "
        "host; if it appears there too, most likely a rank has lost a value outside the state"
    )


@pytest.mark.parametrize("has_recovered", [False, True])
def test_hidden_state_is_named_as_the_cause_after_a_recovery(has_recovered: bool) -> None:
    house = house_of(3 if has_recovered else 2)
    credential = house.credential("0")
    text = "hidden state: opt.cov (train.py:7) changed outside the state. Fix: keep it in TorchState(…)"
    house.receive(credential.session, ReportEnvelope(credential, Anomaly(4, text)))
    if has_recovered:
        flip(house, "1")
        go_back(house)
        for node in "012":
            house.beat(node)
    all_say(house, 100, "1")
    explain(house, 100, "1")
    record = next(one for one in house.journal if isinstance(one, JobInterrupted))
    assert ("first in model.linear.weight: most likely hidden state: opt.cov" in record.cause) == has_recovered


@pytest.mark.parametrize("is_named", [False, True])
def test_hidden_state_is_named_before_a_device_when_ranks_differ_after_a_recovery(is_named: bool) -> None:
    house = house_of(3)
    flip(house, "1")
    go_back(house)
    for node in "012":
        house.beat(node)
    credential = house.credential("0")
    text = "hidden state: opt.cov (train.py:7) changed outside the state, and later steps read it. Fix: keep it"
    if is_named:
        house.receive(credential.session, ReportEnvelope(credential, Anomaly(4, text)))
    flip(house, "2", equal=150, seen=200)
    *_, record = [one for one in house.journal if isinstance(one, RolledBack)]
    cause = ": most likely hidden state: opt.cov (train.py:7) changed outside the state; all ranks roll back"
    assert (cause in record.text) == is_named
    assert ("device" in record.text) != is_named


def test_ranks_with_different_commit_counts_at_a_step_differ() -> None:
    house = house_of(3)
    all_say(house, 50)
    says(house, "0", 100)
    says(house, "1", 100, commits=101)
    says(house, "2", 100)
    house.tick(EXPLAIN_S)
    record = house.core.state.rolled_back
    assert record is not None and record.suspects == (("1", 1),) and "first in the number of commits" in record.text


def test_second_commit_after_the_same_step_is_no_difference() -> None:
    house = house_of(2)
    for node, commits in (("0", 50), ("1", 50), ("0", 51)):
        says(house, node, 50, commits=commits, is_kept=commits == 50)
    house.tick(EXPLAIN_S)
    assert house.core.state.rolled_back is None and house.ended is None


def test_difference_with_recovery_off_ends_the_job() -> None:
    house = house_of(3, recovery=False)
    house.train()
    all_say(house, 50)
    all_say(house, 100, "1")
    explain(house, 100, "1")
    assert house.core.state.rolled_back is None
    assert [one.kind for one in house.journal if isinstance(one, JobInterrupted)] == [EndKind.UNEQUAL]


def test_holders_of_copies_learn_the_last_equal_point() -> None:
    house = house_of(3)
    all_say(house, 50)
    for rank in range(3):
        told = [one for one in house.sent[f"s{rank}"] if isinstance(one, EqualPoint)]
        assert [one.point for one in told] == [BACK]
    all_say(house, 50)
    assert not [send for send in house.ready.sends if isinstance(send.message, EqualPoint)], "once"
    for node in "012":
        says(house, node, 60, is_kept=False)
    assert not [send for send in house.ready.sends if isinstance(send.message, EqualPoint)], "no rank keeps it"


# ---- false reports


def test_false_reports_change_nothing() -> None:
    house = house_of(3)
    all_say(house, 50)
    honest, lie = house.credential("1"), (Digest(Point(100, 1), 100, b"lie"),)
    for sender in (replace(honest, node="7"), replace(honest, incarnation=9), replace(honest, session="s0")):
        for _ in range(3):
            house.receive("s1", ReportEnvelope(sender, Digests(lie)))
    for step, generation in ((100, 7), (100, 0), (2**40, 1)):
        says(house, "1", step, b"lie", generation=generation)
    assert house.core.state.rolled_back is None and house.ended is None
    all_say(house, 100)
    assert house.core.state.rolled_back is None and house.core.phase() == "training"


def test_oversized_report_is_ignored() -> None:
    credential = house_of(2).credential("0")
    digest = Digest(BACK, 1, b"x")
    with pytest.raises(ProtocolError):
        SCHEMA.unpack(SCHEMA.pack(ReportEnvelope(credential, Digests((digest,) * (MAX_DIGESTS + 1)))))
    with pytest.raises(ProtocolError):
        SCHEMA.unpack(SCHEMA.pack(ReportEnvelope(credential, Digests((Digest(BACK, 1, b"x" * 65),)))))
    with pytest.raises(ProtocolError):
        SCHEMA.unpack(
            SCHEMA.pack(
                ReportEnvelope(credential, Digests((Digest(BACK, 1, b"x", parts=(WEIGHT,) * (MAX_PARTS + 1)),)))
            )
        )


# ---- the restore point


def joined(live: Point | None, *, own_parts: bool = False, points: tuple[Point, ...] = ()) -> Holdings:
    return Holdings(points, own_parts, NUMERICS, live=live, commits=50)


@pytest.mark.parametrize("own_parts", [False, True])
def test_suspected_rank_takes_the_point_from_another(own_parts: bool) -> None:
    committed = GenerationCommitted(1, RoundId(1, 1), (("0", 1), ("1", 1), ("2", 1)), None, (), NUMERICS, (0, 1, 2))
    restore = choose_restore_point(
        {rank: joined(BACK, own_parts=own_parts) for rank in range(3)}, committed, suspects={0}
    )
    assert (restore.point, restore.holders, dict(restore.sources)) == (BACK, {1, 2}, {0: 1})
    alone = choose_restore_point(
        {rank: joined(BACK if rank == 0 else None) for rank in range(3)}, committed, suspects={0}
    )
    assert alone.point == BACK and alone.holders == {0}, "no other rank has it"


# ---- the agent


def test_agent_that_joined_with_too_new_a_point_is_asked_to_roll_back() -> None:
    desk = waiting()
    desk.opens()
    desk.hear(opened(back_to=BACK))
    assert desk.told(EnterAgain) == [EnterAgain(None, look=False, back_to=BACK)] and not desk.said(Join)
    desk.hear(opened(back_to=BACK))
    assert not desk.told(EnterAgain), "it was asked"
    desk.step(Entered(Holdings((), False, NUMERICS, live=BACK, back_to=BACK)))
    (join,) = desk.said(Join)
    assert (join.holdings.live, join.holdings.back_to) == (BACK, BACK)


def test_training_agent_leaves_and_joins_only_after_rolling_back() -> None:
    desk = training()
    desk.hear(opened(back_to=BACK, number=2))
    desk.step(Entered(Holdings((), False, NUMERICS, live=Point(104, 1))))
    assert not desk.said(Join) and [one.back_to for one in desk.told(EnterAgain)] == [BACK]
    desk.step(Entered(Holdings((), False, NUMERICS, live=BACK, back_to=BACK)))
    assert desk.said(Join)


def test_agent_is_not_asked_again_to_roll_back() -> None:
    """The next generation breaks before the next round is offered, so nothing indicates a rollback yet."""
    desk = training()
    desk.hear(opened(back_to=BACK, number=2))
    desk.step(Entered(Holdings((), False, NUMERICS, live=BACK, back_to=BACK)))
    desk.starts(2, number=2)
    desk.step(Trains(2))
    desk.step(Failed())
    desk.step(Entered(Holdings((), False, NUMERICS, live=Point(104, 2))))
    assert not desk.told(EnterAgain)


def test_agent_accepts_the_last_equal_point_only_of_its_own_generation() -> None:
    desk = training()
    desk.hear(EqualPoint("job-1", 1, 1, BACK))
    assert desk.told(EqualPoint) == [EqualPoint("job-1", 1, 1, BACK)]
    desk.hear(EqualPoint("job-1", 1, 7, BACK))
    desk.hear(EqualPoint("another", 1, 1, BACK))
    assert not desk.told(EqualPoint)


def opened(*, back_to: Point | None, number: int = 1) -> RoundOpened:
    return RoundOpened("job-1", 1, 1, RoundId(1, number), "because", "", back_to=back_to)
