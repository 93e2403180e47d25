"""Worlds with a device mesh: a lost slot takes its whole shard group out, which returns when it is complete again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from samebits.core.membership.replacement_proofs import TOKEN_BYTES, proof_of
from samebits.core.messages import Activity, EndJob, GenerationStarted, RankPosition, RoundOpened, Sharding
from samebits.core.point import Point
from samebits.core.records import SCHEMA, GenerationCommitted, SeatRetired, SlotGiven, TrainingFinished
from samebits.core.restore import choose_restore_point
from tests.core.house import House, policy
from tests.core.test_core_restore import committed, in_mesh

HYBRID = Sharding((2, 2), (True, False), 0)  # shard groups 0 and 1, 2 and 3
INNER = Sharding((2, 2), (False, True), 1)  # shard groups 0 and 2, 1 and 3
THREE = Sharding((3, 2), (True, False), 0)
TOKEN = b"t" * TOKEN_BYTES


def training(
    sharding: Sharding = HYBRID, low: int = 2, *, world_size: int = 0, spare_num: int = 0, grace_s: float = 0.0
) -> House:
    """Return a scheduler in its first generation, of all slots of the mesh or of ``world_size``."""
    high = sharding.sizes[0] * sharding.sizes[1]
    settings = policy(
        world_size or high,
        min_world_size=low,
        max_world_size=high,
        spare_num=spare_num,
        shrink_grace_s=grace_s,
        node_timeout_s=60.0,
        token=TOKEN,
    )
    house = House(settings).fill()
    form(house, range(world_size or high), sharding)
    return house


def form(house: House, slots: Iterable[int], sharding: Sharding = HYBRID, live: tuple[int, int] | None = None) -> None:
    """Let the holders of these slots join the open round, and train if it has formed a generation with them."""
    before = house.core.state.generation_number
    nodes = {slot: house.core.state.by_slot[slot] for slot in slots}
    for node in nodes.values():
        house.join(node, live=live, sharding=sharding)
    state = house.core.state
    for slot, node in nodes.items():
        is_in_it = state.generation_number > before and slot in house.committed().slots
        house.beat(node, Activity.TRAINING if is_in_it else Activity.WAITING, generation=before + is_in_it)


def lose(house: House, *nodes: str) -> None:
    for node in nodes:
        house.close(house.seat(node).session, gone=True)
    house.tick()


def return_as_replacement(house: House, node: str, activity: Activity = Activity.WAITING) -> None:
    """Register a replacement that the launcher has started, and bring it to the given stage."""
    session = f"s{node}"
    house.register(node, session, proof=proof_of(TOKEN, house.core.state.job, node, session))
    house.beat(node, activity, generation=0)


def retired(house: House) -> list[int]:
    return [record.slot for record in house.journal if isinstance(record, SeatRetired)]


# ---- shrinking


@pytest.mark.parametrize(
    ("sharding", "lost", "left"),
    [
        (HYBRID, "2", (0, 1)),
        (HYBRID, "1", (2, 3)),
        (INNER, "3", (0, 2)),
        (INNER, "0", (1, 3)),
        (THREE, "3", (0, 1, 4, 5)),
    ],
)
def test_lost_slot_takes_its_shard_group_out_and_the_others_continue(
    sharding: Sharding, lost: str, left: tuple[int, ...]
) -> None:
    house = training(sharding)
    everyone = set(house.committed().slots)
    lose(house, lost)
    form(house, sorted(everyone - {int(lost)}), sharding, live=(5, 1))
    assert house.committed().slots == left and house.committed().restore == Point(5, 1)
    assert [house.start_of(str(slot)).rank for slot in left] == list(range(len(left)))
    assert retired(house) == [int(lost)], "the others keep their seats"
    (beside,) = everyone - set(left) - {int(lost)}
    said = f"the world continues without worker {lost}: {len(left)} are left; worker {beside} waits for the shard group"
    assert said in house.notes
    assert house.seat(str(beside)).is_held and house.start_of(str(beside)).generation == 1
    house.beat(str(beside), Activity.WAITING, generation=1)
    assert house.invited() == {} and house.core.phase() == "training"


def test_group_waits_for_its_replacement_as_long_as_the_grace() -> None:
    house = training(grace_s=10.0)
    lose(house, "3")
    form(house, (0, 1, 2), live=(5, 1))
    assert house.last("s0", RoundOpened).missing == "3, at most 10 s (shrink in GRACE)"
    assert house.last("s0", RoundOpened).place == RankPosition(0, 0, 2)
    return_as_replacement(house, "3.1")
    assert house.seat("3.1").slot == 3
    form(house, (0, 1, 2, 3), live=(5, 1))
    assert house.committed().slots == (0, 1, 2, 3) and retired(house) == [3], "only its former holder's seat"


def test_two_lost_slots_of_one_group_leave_the_other() -> None:
    house = training()
    lose(house, "2", "3")
    form(house, (0, 1), live=(5, 1))
    assert house.committed().slots == (0, 1)


def test_without_a_complete_group_all_wait() -> None:
    house = training(grace_s=10.0)
    lose(house, "1", "2")
    for node in "03":
        house.join(node, live=(5, 1), sharding=HYBRID)
    house.tick(20.0)
    assert house.committed().generation == 1 and not retired(house)
    assert house.last("s0", RoundOpened).missing == (
        "1, 2; 0 of at least 2 (MIN_WORKER_NUM) are here in complete shard groups"
    )


def test_number_of_groups_stays_at_the_minimum() -> None:
    house = training(THREE, low=4, grace_s=10.0)
    lose(house, "0", "5")
    form(house, (1, 2, 3, 4), THREE, live=(5, 1))
    house.tick(20.0)
    assert house.committed().generation == 1 and not retired(house)


def test_group_that_waits_outside_does_not_replace_the_last_one() -> None:
    """It holds an older commit, and none of the other part."""
    house = training()
    lose(house, "2")
    form(house, (0, 1, 3), live=(5, 1))
    return_as_replacement(house, "2.1", Activity.SEATED)
    lose(house, "1")
    house.beat("2.1", Activity.WAITING, generation=0)
    for node in ("0", "2.1", "3"):
        house.join(node, live=(9, 2) if node == "0" else None, sharding=HYBRID)
    house.tick(20.0)
    assert house.committed().generation == 2 and retired(house) == [2]
    assert house.last("s0", RoundOpened).missing == "1; no shard group of the last generation is complete"
    return_as_replacement(house, "1.1")
    form(house, (0, 1, 2, 3), live=(9, 2))
    assert house.committed().slots == (0, 1, 2, 3)


def test_world_whose_mesh_cannot_shrink_leaves_no_part_out() -> None:
    house = House(policy(4, min_world_size=2, max_world_size=4, shrink_grace_s=0.0, node_timeout_s=60.0)).fill()
    form(house, range(4), Sharding((4,), (False,)))
    assert house.committed().sharding is None
    lose(house, "3")
    form(house, (0, 1, 2), Sharding((4,), (False,)), live=(5, 1))
    assert house.committed().generation == 1
    text = house.last("s0", EndJob).text
    assert "into 4 parts, and the 3 workers of the next generation would hold only 3 of them" in text


# ---- growing


def test_group_returns_at_a_commit_when_its_replacement_is_ready() -> None:
    house = training()
    lose(house, "2")
    form(house, (0, 1, 3), live=(5, 1))
    return_as_replacement(house, "2.1", Activity.SEATED)
    house.beat("3", Activity.WAITING, generation=1)
    assert house.seat("2.1").slot == 2 and house.invited() == {}, "it is not ready"
    house.beat("2.1", Activity.WAITING, generation=0)
    assert set(house.invited()) == {"s0", "s1", "s2.1", "s3"}
    assert house.answer("s0", RoundOpened).gently
    assert house.answer("s2.1", RoundOpened).place == RankPosition(2, 2, 4)
    for node, live in (("0", (9, 2)), ("1", (9, 2)), ("2.1", None), ("3", (5, 1))):
        house.join(node, live=live, sharding=HYBRID)
    assert house.committed().slots == (0, 1, 2, 3) and house.committed().restore == Point(9, 2)
    assert [house.start_of(node).source for node in ("0", "1", "2.1", "3")] == [0, 1, 0, 1]


def test_spare_that_arrives_later_completes_the_group() -> None:
    house = training(spare_num=1)
    lose(house, "2")
    form(house, (0, 1, 3), live=(5, 1))
    house.register("9")
    assert house.records(SlotGiven) == [SlotGiven("9", 2)]
    house.tick()
    house.beat("9", Activity.WAITING, generation=0)
    assert set(house.invited()) == {"s0", "s1", "s9", "s3"}
    form(house, (0, 1, 2, 3), live=(5, 1))
    assert house.committed().slots == (0, 1, 2, 3)


def test_spare_does_not_begin_a_group_that_it_cannot_complete() -> None:
    house = training(THREE, spare_num=1)
    lose(house, "2", "3")
    form(house, (0, 1, 4, 5), THREE, live=(5, 1))
    house.register("9")
    assert house.seat("9").is_spare
    lose(house, "5")
    assert house.seat("9").slot == 5, "but it takes a lost member's slot"


def test_unnamed_worker_completes_the_group_that_lacks_fewest() -> None:
    house = training(THREE)
    lose(house, "0", "1", "3")
    form(house, (2, 4, 5), THREE, live=(5, 1))
    assert house.committed().slots == (4, 5)
    house.register("x")
    assert house.seat("x").slot == 3


def test_member_of_a_waiting_group_that_is_lost_interrupts_nothing() -> None:
    house = training()
    lose(house, "2")
    form(house, (0, 1, 3), live=(5, 1))
    lose(house, "3")
    assert house.invited() == {} and house.core.phase() == "training" and retired(house) == [2, 3]


def test_training_is_finished_without_the_group_that_waits() -> None:
    house = training()
    lose(house, "2")
    form(house, (0, 1, 3), live=(5, 1))
    for node in "01":
        house.beat(node, Activity.DONE, step=9)
    assert house.records(TrainingFinished) == [TrainingFinished(Point(9, 2))]


# ---- the first generation, and restarts of the scheduler


def test_first_generation_begins_without_an_incomplete_group() -> None:
    settings = policy(4, min_world_size=2, max_world_size=4, start_grace_s=20.0, node_timeout_s=60.0)
    house = House(settings)
    for node in "012":
        house.register(node)
    house.tick(20.0)
    form(house, (0, 1, 2))
    assert house.committed().slots == (0, 1)


def test_first_generation_waits_for_enough_complete_groups() -> None:
    house = House(policy(6, min_world_size=4, max_world_size=6, start_grace_s=20.0, node_timeout_s=60.0))
    for node in "0124":
        house.register(node)
    house.tick(20.0)
    for node in "0124":
        house.join(node, sharding=THREE)
    house.tick(1.0)
    assert house.core.state.generation is None
    house.register("3")
    house.join("3", sharding=THREE)
    assert house.committed().slots == (0, 1, 2, 3)


def test_restarted_scheduler_still_knows_the_groups() -> None:
    house = training()
    lose(house, "2")
    form(house, (0, 1, 3), live=(5, 1))
    house.crash(after_s=1.0)
    for node in "01":
        house.beat(node)
    house.beat("3", Activity.WAITING, generation=1)
    house.tick(1.0)
    assert house.core.phase() == "training" and house.invited() == {}
    return_as_replacement(house, "2.1")
    assert set(house.invited()) == {"s0", "s1", "s2.1", "s3"}


def test_journal_of_an_earlier_release_is_read() -> None:
    now = training().committed()
    packed = SCHEMA.pack(now)
    assert SCHEMA.unpack(packed) == now and now.sharding == HYBRID
    before = GenerationCommitted(*(getattr(now, name) for name in now.__struct_fields__[:-1]))
    assert SCHEMA.unpack(_without_last_field(SCHEMA.pack(before))) == before


def _without_last_field(packed: bytes) -> bytes:
    assert packed[:1] == bytes([0x90 | 9]) and packed[-1:] == b"\xc0", "a short array whose last field is nil"
    return bytes([0x90 | 8]) + packed[1:-1]


# ---- the restore point


def test_part_without_a_member_is_never_left_out() -> None:
    found = choose_restore_point(in_mesh(HYBRID, 20, 20), committed(), (0, 2))
    assert found.point is None
    assert "sharded over 2 x 2 ranks into 2 parts, and the 2 workers" in found.lost and "Fix: start" in found.lost
    initial = choose_restore_point(in_mesh(HYBRID, None), None, (3,))
    assert initial.point is None and initial.lost, "nor before the first step"


@pytest.mark.parametrize(("sharding", "slots"), [(HYBRID, (2, 3)), (INNER, (1, 3))])
def test_keys_are_those_of_the_slots(sharding: Sharding, slots: tuple[int, int]) -> None:
    found = choose_restore_point(in_mesh(sharding, 20, 20), committed(), slots)
    assert (found.point, found.lost) == (Point(20, 1), "")


def test_sizes_of_a_smaller_world() -> None:
    assert HYBRID.resized(2).sizes == (1, 2) and INNER.resized(2).sizes == (2, 1)
    assert THREE.resized(4) == Sharding((2, 2), (True, False), 0) and THREE.resized(1).sizes == (1, 2)
    assert Sharding((4,), (False,)).resized(2).sizes == (4,)
    assert [INNER.group_of(slot) for slot in range(4)] == [0, 1, 0, 1] and INNER.group_size == 2


def test_member_outside_is_not_started_again() -> None:
    house = training()
    lose(house, "2")
    form(house, (0, 1, 3), live=(5, 1))
    started = [one for one in house.sent["s3"] if isinstance(one, GenerationStarted)]
    assert [one.generation for one in started] == [1]
