"""Rule 1b: only a replacement that the job's own launcher started takes a lost slot at once."""

from __future__ import annotations

import pytest

from samebits.core.end_kinds import EndKind
from samebits.core.membership.replacement_proofs import TOKEN_BYTES, proof_of
from samebits.core.messages import Activity, Fenced, Refusal
from samebits.core.point import Point
from samebits.core.records import (
    GenerationCommitted,
    ReplacementShown,
    SeatGranted,
    SeatRetired,
    SlotGiven,
    SpareAdmitted,
)
from samebits.core.replacement_names import number_of, replaces, root_of, successor_of, titled
from samebits.core.state import JobState
from tests.core.house import House, policy, training_house

TOKEN = b"t" * TOKEN_BYTES


def launched(world_size: int = 2, **changes: float | bool) -> House:
    """Return a scheduler in its first generation whose launcher has a token."""
    return training_house(world_size, token=TOKEN, **changes)


def comes(house: House, node: str, *, session: str = "", job: str = "job-1", token: bytes = TOKEN) -> None:
    """Register a process that the launcher started, with its proof."""
    session = session or f"s{node}"
    house.register(node, session, proof=proof_of(token, job, node, session))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("worker 2.1 (pid 7) was killed", "worker 2 (second process, pid 7) was killed"),
        ("spare 3.2 took the place of worker 1", "spare 3 (third process) took the place of worker 1"),
        ("rank 1 (node 1.1, host a, pid 7)", "rank 1 (node 1, second process, host a, pid 7)"),
        ("worker 0.12 is lost", "worker 0 (13th process) is lost"),
        ("node 10.0.0.1 and 2.5 s, worker 1.", "node 10.0.0.1 and 2.5 s, worker 1."),
    ],
)
def test_people_read_which_process_of_a_worker_it_is(text: str, read: str) -> None:
    assert titled(text) == read and titled(read) == read


def test_names_of_a_line() -> None:
    assert [successor_of(node) for node in ("2", "2.1", "12.9")] == ["2.1", "2.2", "12.10"]
    assert [root_of(node) for node in ("2", "2.10", "w.1", "10.0.0.9", "2.0", "2.01")] == [
        *("2", "2", "w.1", "10.0.0.9", "2.0", "2.01")
    ]
    assert number_of("2") == number_of("w.1") == 0 and number_of("2.10") == 10
    assert replaces("2.3", "2") and replaces("2.10", "2.9") and not replaces("2", "2.1") and not replaces("3.1", "2")
    with pytest.raises(ValueError):
        successor_of("worker-2")


def test_replacement_takes_the_lost_slot_at_once() -> None:
    house = launched()
    house.close("s1", gone=True)
    house.now += 0.3  # of 30 s
    comes(house, "1.1")
    kinds = [type(record) for record in house.ready.records]
    assert kinds == [SpareAdmitted, ReplacementShown, SeatRetired, SlotGiven]
    assert house.seat("1.1").slot == 1 and house.seat("1").is_retired
    assert house.admission("s1.1").slot == 1, "so that init() returns with its rank"
    house.train()
    assert house.committed().members == (("0", 1), ("1.1", 1))


def test_known_node_itself_still_waits() -> None:
    house = launched()
    house.close("s1", gone=True)
    house.now += 0.3
    house.register("1", "again", proof=proof_of(TOKEN, "job-1", "1", "again"))
    assert house.refusal("again").refusal is Refusal.COOLING_DOWN
    assert house.refusal("again").retry_after_s == pytest.approx(29.7)


def test_without_a_proof_nothing_changes() -> None:
    house = launched()
    house.close("s1", gone=True)
    house.register("1.1")
    said = house.refusal("s1.1")
    assert said.refusal is Refusal.COOLING_DOWN and said.retry_after_s == pytest.approx(30.0)
    house.now += 30
    house.register("1.1")
    assert house.seat("1.1").slot == 1 and not house.records(ReplacementShown)


def test_proof_is_worthless_without_a_token() -> None:
    house = training_house(2)
    house.close("s1", gone=True)
    comes(house, "1.1")
    assert house.refusal("s1.1").refusal is Refusal.COOLING_DOWN


@pytest.mark.parametrize(
    ("why", "proof"),
    [
        ("another token", proof_of(b"u" * TOKEN_BYTES, "job-1", "1.1", "s1.1")),
        ("no key at all", proof_of(b"", "job-1", "1.1", "s1.1")),
        ("another job's", proof_of(TOKEN, "job-2", "1.1", "s1.1")),
        ("another node's", proof_of(TOKEN, "job-1", "0.1", "s1.1")),
        ("another session's", proof_of(TOKEN, "job-1", "1.1", "overheard")),
        ("a part", proof_of(TOKEN, "job-1", "1.1", "s1.1")[:-1]),
        ("one bit", bytes([*proof_of(TOKEN, "job-1", "1.1", "s1.1")[:-1], 0])),
        ("names that run together", proof_of(TOKEN, "job-11", ".1", "s1.1")),
    ],
)
def test_forged_proof_is_refused_permanently(why: str, proof: bytes) -> None:
    house = launched()
    house.close("s1", gone=True)
    house.register("1.1", proof=proof)
    said = house.refusal("s1.1")
    assert said.refusal is Refusal.FULL and said.retry_after_s == 0, why
    assert "Fix:" in said.text and not house.ready.records
    comes(house, "1.1")
    assert house.seat("1.1").slot == 1, "and the real one lost nothing by it"


def test_predecessor_must_be_gone() -> None:
    house = launched()
    comes(house, "1.1")
    said = house.refusal("s1.1")
    assert said.refusal is Refusal.ALIVE and 0 < said.retry_after_s < 0.5
    house.close("s1", gone=True)
    comes(house, "1.1")
    assert house.seat("1.1").slot == 1


def test_lost_slot_is_given_once() -> None:
    house = launched(3)
    house.close("s1", gone=True)
    comes(house, "1.1")
    for node in ("1.1", "1.2"):
        comes(house, node, session=f"second-{node}")
        assert house.refusal(f"second-{node}").refusal is Refusal.ALIVE
    assert len(house.core.state.spares) == 0


def test_overheard_register_is_worthless_once_its_number_is_spent() -> None:
    house = launched()
    for number in range(1, 5):
        before = house.core.state.by_slot[1]
        house.close(house.seat(before).session, gone=True)
        comes(house, f"1.{number}")
        house.train()
    assert sorted(house.core.state.seats) == ["0", "1", "1.4"], "the predecessor is forgotten"
    house.close("s1.4", gone=True)
    for number in (1, 2, 3):
        comes(house, f"1.{number}")
        said = house.refusal(f"s1.{number}")
        assert said.refusal is Refusal.FULL and said.retry_after_s == 0
    house.register("1.3", "bare")
    assert house.refusal("bare").retry_after_s == 0, "nor does the bare number, which would start at incarnation 1"
    house.crash()
    comes(house, "1.2")
    assert house.refusal("s1.2").retry_after_s == 0
    comes(house, "1.5")
    assert house.seat("1.5").slot == 1


def test_replaced_spare_is_not_taken_for_a_spare_unknown_to_a_new_journal() -> None:
    """A spare that claims a seat without a record is fenced, not admitted without the cool-down."""
    house = launched(spare_num=1)
    house.close("s1", gone=True)
    comes(house, "1.1")
    house.train()
    house.close("s1.1", gone=True)
    comes(house, "1.2")
    house.train()
    assert "1.1" not in house.core.state.seats
    proof = proof_of(TOKEN, "job-1", "1.1", "s1.1")
    house.register("1.1", "s1.1", incarnation=1, proof=proof, job="job-1")
    assert not house.records(SpareAdmitted)
    assert not house.answer("s1.1", Fenced).may_return


def test_predecessors_are_forgotten_with_the_last_generation_that_needs_them() -> None:
    house = launched()
    house.close("s1", gone=True)
    comes(house, "1.1")
    house.train()
    house.close("s1.1", gone=True)
    comes(house, "1.2")
    assert "1.1" in house.core.state.seats, "a member of the last generation"
    house.train()
    assert house.records(GenerationCommitted) or "1.1" not in house.core.state.seats
    assert house.core.presence("1.1") is None
    state = house.core.state
    assert JobState.replay(state.snapshot()) == state
    house.crash()
    assert house.core.state.replacements == {"1": 2}


def test_replacement_that_dies_while_waiting_is_replaced_in_its_place() -> None:
    house = House(policy(2, token=TOKEN))
    house.register("0")
    house.close("s0", gone=True)
    comes(house, "0.1")
    house.close("s0.1", gone=True)
    comes(house, "0.2")
    assert house.core.state.by_slot == {0: "0.2"}


def test_replacement_of_a_node_that_left_before_the_first_generation_takes_its_slot() -> None:
    house = House(policy(2, token=TOKEN, spare_num=1, cool_down_s=0.0))
    house.fill().register("7")
    house.leave("0")
    assert house.core.state.by_slot == {0: "0", 1: "1"}, "it may return: a spare of another line leaves it the slot"
    comes(house, "0.1")
    assert house.core.state.by_slot == {0: "0.1", 1: "1"}


def test_replacement_takes_the_lost_slot_while_a_spare_may_be_gone_too() -> None:
    house = launched(spare_num=1)
    house.register("9")
    house.close("s9")
    house.close("s1", gone=True)
    comes(house, "1.1")
    assert house.core.state.by_slot == {0: "0", 1: "1.1"}


def test_node_with_a_slot_waits_for_no_other() -> None:
    """Two processes of one node: one names no slot and waits for all to register, one proves that slot 3 is its own."""
    house = House(policy(3, min_world_size=2, max_world_size=4, token=TOKEN))
    house.register("3.1", "bare")
    house.register("1")
    comes(house, "3.1")
    assert house.core.state.by_slot == {1: "1", 3: "3.1"} and house.seat("3.1").session == "s3.1"
    house.register("0")
    assert house.core.state.by_slot == {0: "0", 1: "1", 3: "3.1"}
    house.register("3.1", "bare")
    assert house.refusal("bare").refusal is Refusal.ALIVE


def test_replacement_becomes_a_spare_if_a_spare_has_the_slot() -> None:
    house = launched(spare_num=1)
    house.register("9")
    house.beat("9", Activity.WAITING, generation=0)
    house.close("s1", gone=True)
    assert house.core.state.by_slot[1] == "9"
    comes(house, "1.1")
    assert house.seat("1.1").is_spare
    comes(house, "0.1")
    assert house.refusal("s0.1").refusal is Refusal.ALIVE, "and no seat is free for more"
    house.train()
    house.close("s9", gone=True)
    assert house.core.state.by_slot[1] == "1.1"
    comes(house, "9.1")
    assert house.seat("9.1").is_spare


def test_replacement_that_dies_as_a_spare_is_replaced_beyond_spare_num() -> None:
    house = launched(spare_num=1)
    house.register("9")
    house.beat("9", Activity.WAITING, generation=0)
    house.close("s1", gone=True)
    comes(house, "1.1")
    house.train()
    house.close("s1.1", gone=True)
    house.register("8")
    comes(house, "1.2")
    assert house.core.state.spares.keys() == {"8", "1.2"}


def with_a_lost_replacement() -> House:
    """Replacement 1.1 was a spare and is gone; spare 8 has arrived since, and SPARE_NUM is reached."""
    house = launched(spare_num=1, cool_down_s=10.0)
    house.register("9")
    house.beat("9", Activity.WAITING, generation=0)
    house.close("s1", gone=True)
    comes(house, "1.1")
    house.train()
    house.close("s1.1", gone=True)
    house.register("8")
    assert house.core.state.spares.keys() == {"8"}
    return house


def test_restarted_replacement_gets_the_place_of_its_successor() -> None:
    house = with_a_lost_replacement()
    comes(house, "1.1", session="again")
    assert house.refusal("again").refusal is Refusal.COOLING_DOWN
    for node in ("0", "9", "8"):
        house.beat(node)
    house.now += 10.0
    for node in ("0", "9", "8"):
        house.beat(node)
    comes(house, "1.1", session="again")
    assert house.core.state.spares.keys() == {"8", "1.1"} and house.seat("1.1").incarnation == 2
    house.close("s9", gone=True)
    house.close("s8", gone=True)
    house.beat("1.1", Activity.WAITING, generation=0)
    assert house.core.state.by_slot[1] == "1.1"


@pytest.mark.parametrize(("token", "replaced_by"), [(b"x" * TOKEN_BYTES, ""), (TOKEN, "1.2")])
def test_no_other_process_exceeds_spare_num(token: bytes, replaced_by: str) -> None:
    """A process is refused if it has no proof, or if its successor has registered."""
    house = with_a_lost_replacement()
    if replaced_by:
        comes(house, replaced_by)
    house.now += 10.0
    for node in ("0", "9", "8", *([replaced_by] if replaced_by else [])):
        house.beat(node)
    comes(house, "1.1", session="again", token=token)
    assert house.refusal("again").refusal is Refusal.FULL and house.refusal("again").retry_after_s > 0


def test_replacement_of_an_initial_spare_is_a_spare_only_if_one_is_needed() -> None:
    house = launched(spare_num=1)
    house.register("9")
    house.close("s9", gone=True)
    house.register("8")
    comes(house, "9.1")
    assert house.refusal("s9.1").refusal is Refusal.FULL and house.core.state.spares.keys() == {"8"}


def test_replacement_of_a_worker_the_world_shrank_without_grows_it() -> None:
    house = launched(3, min_world_size=2, shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.train()
    for node in ("1.1", "1.2"):
        comes(house, node)
        assert house.seat(node).slot == 1
        house.beat(node, Activity.WAITING, generation=0)
        house.train()
        assert house.committed().slots == (0, 1, 2)
        house.close(f"s{node}", gone=True)
        house.train()
        assert house.committed().slots == (0, 2)


def test_two_replacements_at_once_each_take_their_own_slot() -> None:
    house = launched(3)
    for node in ("1", "2"):
        house.close(f"s{node}", gone=True)
    comes(house, "1.1")
    comes(house, "2.1")
    assert house.core.state.by_slot == {0: "0", 1: "1.1", 2: "2.1"}


def test_waiting_replacement_takes_its_own_slot_not_the_first() -> None:
    house = launched(3)
    comes(house, "2.1")  # its launcher knows before the scheduler does
    for node in ("1", "2"):
        house.close(f"s{node}", gone=True)
    comes(house, "2.1")
    assert house.core.state.by_slot == {0: "0", 1: "1", 2: "2.1"}
    comes(house, "1.1")
    assert house.core.state.by_slot == {0: "0", 1: "1.1", 2: "2.1"}


def test_replacement_whose_slot_was_reassigned_takes_a_lost_one() -> None:
    house = launched(2, spare_num=1)
    house.register("9")
    house.beat("9", Activity.WAITING, generation=0)
    house.close("s0", gone=True)
    house.close("s1", gone=True)
    assert house.core.state.by_slot == {0: "9", 1: "1"}
    comes(house, "0.1")
    assert house.core.state.by_slot == {0: "9", 1: "0.1"}
    comes(house, "1.1")
    assert house.seat("1.1").is_spare


def test_replacement_whose_named_slot_was_reassigned_takes_one_after_its_cool_down() -> None:
    """A restarted job seats processes without proof by name, so its lines and its slots may cross."""
    house = House(policy(3, token=TOKEN))
    for node in ("0.1", "1.1", "2.1"):
        house.register(node)
    for node in ("0.1", "2.1"):
        house.close(f"s{node}", gone=True)
    comes(house, "0.2")
    assert house.refusal("s0.2").refusal is Refusal.COOLING_DOWN, "the slot that it names belongs to its line"
    house.tick(30.0)
    house.register("x")
    assert house.core.state.by_slot[0] == "x"
    house.beat("1.1", Activity.WAITING, generation=0)
    comes(house, "0.2")
    assert house.core.state.by_slot == {0: "x", 1: "1.1", 2: "0.2"}


def test_process_that_never_had_a_seat_is_replaced_into_the_slot_of_its_line() -> None:
    house = House(policy(3, token=TOKEN))
    house.register("0")
    comes(house, "2.1")
    assert house.core.state.by_slot == {0: "0", 2: "2.1"}
    assert [type(record) for record in house.ready.records] == [SeatGranted, ReplacementShown]


def test_no_process_is_replaced_with_recovery_off() -> None:
    house = launched(recovery=False)
    house.close("s1", gone=True)
    comes(house, "1.1")
    assert not house.records(SpareAdmitted)


def test_replacement_after_training_gets_its_slot_with_its_seat() -> None:
    """No round assigns slots after training, and the rest of the script needs the rank at once."""
    house = launched()
    for node in "01":
        house.beat(node, Activity.DONE, step=60)
    house.close("s0", gone=True)
    comes(house, "0.1")
    admitted = house.admission("s0.1")
    assert (admitted.slot, admitted.finished) == (0, Point(60, 1))
    house.leave("1")
    assert house.ended is None
    house.leave("0.1")
    assert house.ended is not None and house.ended.kind is EndKind.FINISHED


def test_replacement_after_training_takes_a_lost_slot_that_is_not_its_lines() -> None:
    """If it did not, the rest of that rank's script would never run."""
    house = House(policy(2, token=TOKEN))
    house.register("0")
    house.register("1")
    house.close("s0", gone=True)
    house.tick(30.0)
    house.register("x")
    house.train()
    for node in "x1":
        house.beat(node, Activity.DONE, step=60)
    house.close("sx", gone=True)
    comes(house, "0.1")
    assert house.refusal("s0.1").refusal is Refusal.COOLING_DOWN
    house.tick(30.0)
    comes(house, "0.1")
    assert house.admission("s0.1").slot == 0
    house.leave("1")
    house.leave("0.1")
    assert house.ended is not None and house.ended.kind is EndKind.FINISHED


def test_replacement_of_a_live_process_asks_at_growing_intervals() -> None:
    """The launcher may have lost track of a process that it started."""
    house = launched()
    waits = []
    for _ in range(8):
        comes(house, "1.1")
        waits.append(house.refusal("s1.1").retry_after_s)
        for _ in range(5):
            house.beat("0"), house.beat("1")
            house.tick(waits[-1] / 5)
    assert waits == sorted(waits)
    assert waits[0] <= 0.1 and waits[-1] == house.policy.node_timeout_s
    house.close("s1", gone=True)
    comes(house, "1.1")
    assert house.seat("1.1").slot == 1
