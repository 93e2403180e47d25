"""The choice of a restore point (docs/contributors/architecture.md) and of its senders."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.core.messages import (
    Copy,
    Holdings,
    KeptCommit,
    LiveStep,
    Loan,
    OrphanedPage,
    Page,
    PageLoan,
    RoundId,
    Sharding,
)
from samebits.core.point import Point
from samebits.core.records import Cut, GenerationCommitted
from samebits.core.restore import (
    Borrowed,
    Restore,
    choose_restore_point,
    differing,
    drop_doubtful_points,
    lost_progress,
    lost_steps,
    must_look,
)
from samebits.core.state import KEPT_CUTS, is_on_line, next_line
from samebits.core.values import replace


def committed(generation: int = 1, restore: Point | None = None, line: tuple[Cut, ...] = ()) -> GenerationCommitted:
    return GenerationCommitted(generation, RoundId(1, generation), (("0", 1),), restore, line, (), (0,))


def holding(*held: list[tuple[int, int]], own_parts: tuple[int, ...] = ()) -> dict[int, Holdings]:
    """Return what the ranks bring: their (step, generation) points."""
    return {
        rank: Holdings(tuple(Point(*point) for point in points), rank in own_parts, (("threads", "4"),))
        for rank, points in enumerate(held)
    }


def chosen(*held: list[tuple[int, int]], own_parts: tuple[int, ...] = ()) -> Restore:
    return choose_restore_point(holding(*held, own_parts=own_parts), committed())


# ---- lost steps


@pytest.mark.parametrize(
    ("found", "committed", "is_lost"),
    [
        (None, Point(60, 1), True),
        (Point(0, 1), Point(60, 1), True),  # only the initial state
        (None, None, False),  # no point was ever on every disk
        (None, Point(0, 1), False),
        (Point(0, 1), Point(0, 1), False),
        (Point(40, 1), Point(60, 1), False),  # an older point survived
        (Point(60, 1), Point(60, 1), False),
        (Point(65, 2), Point(60, 1), False),  # a copy in memory is newer
    ],
)
def test_steps_once_on_every_disk_are_not_retrained_silently(
    found: Point | None, committed: Point | None, is_lost: bool
) -> None:
    assert bool(lost_progress(found, committed, holding([], []))) == is_lost
    is_older = found is not None and committed is not None and found.step < committed.step
    assert bool(lost_steps(found, committed)) == is_older


def test_loss_message_names_step_places_and_price() -> None:
    joined = holding([], [], [])
    joined = {rank: replace(one, folder="/a" if rank < 2 else "s3://b/c") for rank, one in joined.items()}
    text = lost_progress(None, Point(60, 2), joined)
    assert "restore point of step 60 of generation 2" in text
    assert "the memory of 3 workers" in text and "shared memory" in text and "each other, and /a and s3://b/c." in text
    assert "would give up 60 steps. Fix: " in text
    older = lost_steps(Point(40, 1), Point(60, 2))
    assert "step 60" in older and "back to step 40 and repeats 20 steps. Fix: " in older


# ---- the choice


def test_points_are_ordered_by_step_and_then_generation() -> None:
    assert sorted([Point(5, 2), Point(3, 9), Point(5, 1)]) == [Point(3, 9), Point(5, 1), Point(5, 2)]
    assert str(Point(5, 2)) == "step 5 of generation 2"


def test_no_rank_holds_a_point() -> None:
    restore = chosen([], [], [])
    assert (restore.point, restore.text) == (
        None,
        "no restore point yet: every rank starts from rank 0's initial state",
    )
    assert [restore.source_of(rank) for rank in range(3)] == [0, 1, 2]
    assert [restore.served_by(rank) for rank in range(3)] == [(), (), ()]


def test_nothing_is_said_of_restore_points_if_no_member_keeps_state_here() -> None:
    agents = {rank: Holdings((), own_parts=False, numerics=()) for rank in range(3)}
    restore = choose_restore_point(agents, None)
    assert (restore.point, restore.text, restore.lost) == (None, "", "")


def test_all_hold_the_greatest() -> None:
    restore = chosen([(10, 1), (20, 1)], [(20, 1), (10, 1)])
    assert restore.point == Point(20, 1)
    assert restore.text == "restore point: step 20 of generation 1, from every rank's own checkpoint"
    assert restore.served_by(0) == restore.served_by(1) == ()


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_one_holder_is_enough(holder: int) -> None:
    """An older point is never chosen because one member holds none."""
    held: list[list[tuple[int, int]]] = [[(10, 1)], [(10, 1)], [(10, 1)]]
    held[holder] = [(20, 1)]
    restore = chosen(*held)
    others = tuple(rank for rank in range(3) if rank != holder)
    assert restore.point == Point(20, 1)
    assert restore.holders == {holder}
    assert all(restore.source_of(rank) == holder for rank in range(3))
    assert restore.served_by(holder) == others
    assert restore.text == (
        f"restore point: step 20 of generation 1, held by rank {holder}; sent to ranks {others[0]} and {others[1]}"
    )


def test_sending_is_shared() -> None:
    restore = chosen([(20, 1)], [], [(20, 1)], [], [], [])
    assert {rank: restore.source_of(rank) for rank in range(6)} == {0: 0, 1: 0, 2: 2, 3: 2, 4: 0, 5: 2}
    assert (restore.served_by(0), restore.served_by(2), restore.served_by(1)) == ((1, 4), (3, 5), ())


def test_many_ranks_are_counted() -> None:
    restore = chosen(*[[(20, 1)]] * 10, *[[]] * 9)
    assert restore.text.endswith(
        "held by ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more; sent to ranks 10, 11, 12, 13, 14, 15, 16, 17 and 1 more"
    )


def test_own_parts_of_a_single_rank_make_all_step_back() -> None:
    restore = chosen([(10, 1), (20, 1)], [(10, 1)], own_parts=(0, 1))
    assert restore.point == Point(10, 1)
    assert restore.text == (
        "restore point: step 10 of generation 1, from every rank's own checkpoint "
        "(step 20 is not held by all, and a rank's RNG state is in its own points alone; "
        "rng='per_step' avoids this)"
    )


def test_rank_without_own_parts_does_not_hold_back_the_others() -> None:
    restore = chosen([(10, 1), (20, 1)], [(10, 1)], own_parts=(0,))
    assert restore.point == Point(20, 1)
    assert restore.source_of(1) == 0


def test_without_a_common_point_the_greatest_is_chosen_and_the_loss_reported() -> None:
    restore = chosen([(10, 1), (20, 1)], [], own_parts=(0, 1))
    assert restore.point == Point(20, 1)
    assert restore.text == (
        "restore point: step 20 of generation 1, held by rank 0; sent to rank 1 "
        "(the RNG state of rank 1 is lost: it is derived from seed, rank and step)"
    )


def test_no_random_numbers_are_lost_before_the_first_step() -> None:
    restore = chosen([(0, 1)], [], own_parts=(0, 1))
    assert restore.text == "restore point: step 0 of generation 1, held by rank 0; sent to rank 1"


def test_later_generation_wins_at_the_same_step() -> None:
    kept = committed(3, Point(10, 1), (Cut(1, 10),))
    restore = choose_restore_point(holding([(10, 1)], [(10, 3)]), kept)
    assert restore.point == Point(10, 3)


# ---- memory


def remembering(*lives: tuple[int, int] | None, own_parts: tuple[int, ...] = ()) -> dict[int, Holdings]:
    """Return what ranks bring that have not examined their disks."""
    return {
        rank: Holdings((), rank in own_parts, (), live=None if live is None else Point(*live), looked=False)
        for rank, live in enumerate(lives)
    }


def test_last_commit_in_one_memory_is_enough() -> None:
    joined = remembering((137, 1), (137, 1), None)
    assert not must_look(joined, committed())
    restore = choose_restore_point(joined, committed())
    assert restore.point == Point(137, 1)
    assert [restore.source_of(rank) for rank in range(3)] == [0, 1, 0]
    assert restore.text == ("restore point: step 137 of generation 1, in the memory of ranks 0 and 1; sent to rank 2")


def test_rank_a_step_behind_gets_the_step_from_one_ahead() -> None:
    restore = choose_restore_point(remembering((137, 1), (138, 1), (137, 1)), committed())
    assert (restore.point, restore.served_by(1), restore.served_by(0)) == (Point(138, 1), (0, 2), ())


def test_point_that_all_remember_is_not_sent() -> None:
    restore = choose_restore_point(remembering((137, 1), (137, 1)), committed())
    assert restore.text == "restore point: step 137 of generation 1, in every rank's memory"
    assert restore.served_by(0) == restore.served_by(1) == ()


def test_memory_is_preferred_to_disk() -> None:
    joined = remembering((100, 1), None) | {2: Holdings((Point(100, 1),), False, ())}
    restore = choose_restore_point(joined, committed())
    assert restore.served_by(0) == (1, 2)
    assert restore.text.endswith("in the memory of rank 0; sent to ranks 1 and 2")


@pytest.mark.parametrize(
    ("lives", "reason"),
    [
        ((None, None), "no member remembers anything"),
        (((50, 1), None), "it is of a generation that was overtaken"),
    ],
)
def test_disks_are_examined_if_memories_may_not_hold_the_newest(
    lives: tuple[tuple[int, int] | None, ...], reason: str
) -> None:
    later = committed(2, Point(90, 1), (Cut(1, 90),))
    assert must_look(remembering(*lives), later), reason


def test_starting_point_of_a_generation_counts_as_its_progress() -> None:
    assert not must_look(remembering((90, 1), None), committed(2, Point(90, 1), (Cut(1, 90),)))


def test_later_of_two_commits_after_one_step_is_chosen() -> None:
    """At the end of an epoch, a rank with one more commit has another epoch and data position."""
    joined = {
        rank: Holdings((), False, (), live=Point(100, 1), looked=False, commits=commits)
        for rank, commits in enumerate((100, 101, 100))
    }
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.served_by(1), restore.served_by(0)) == (Point(100, 1), (0, 2), ())


@pytest.mark.parametrize(("own_parts", "source"), [(False, 0), (True, 1)])
def test_disk_has_the_first_commit_of_a_step_and_memory_the_last(own_parts: bool, source: int) -> None:
    joined = {
        0: Holdings((), own_parts, (), live=Point(100, 1), commits=101),
        1: Holdings((Point(100, 1),), own_parts, ()),
    }
    assert choose_restore_point(joined, committed()).source_of(1) == source


def test_nothing_is_looked_for_before_the_first_generation() -> None:
    assert not must_look(remembering(None, None), None)


def test_newcomer_with_own_parts_examines_its_disk() -> None:
    assert must_look(remembering((137, 1), None, own_parts=(0, 1)), committed())
    assert not must_look(remembering((137, 1), (137, 1), own_parts=(0, 1)), committed())
    assert not must_look(remembering((137, 1), None), committed())


# ---- lines


def test_no_point_is_on_a_line_before_the_first_generation() -> None:
    assert not is_on_line(Point(5, 1), None)
    assert choose_restore_point(holding([(5, 1)]), None).point is None


def test_steps_after_the_cut_are_abandoned() -> None:
    """Generation 2 starts from step 10 of generation 1, whose later steps are never resumed."""
    second = committed(2, Point(10, 1), next_line(committed(1), Point(10, 1)))
    assert second.line == (Cut(1, 10),)
    on_line = [Point(5, 1), Point(10, 1), Point(12, 2), Point(99, 2)]
    abandoned = [Point(11, 1), Point(20, 1), Point(5, 3)]
    assert all(is_on_line(point, second) for point in on_line)
    assert not any(is_on_line(point, second) for point in abandoned)
    assert choose_restore_point(holding([(20, 1)], [(10, 1), (12, 2)]), second).point == Point(12, 2)


def test_rollback_into_an_older_generation_cuts_deeper() -> None:
    second = committed(2, Point(20, 1), next_line(committed(1), Point(20, 1)))
    third = committed(3, Point(15, 1), next_line(second, Point(15, 1)))
    assert third.line == (Cut(1, 15),)
    assert not is_on_line(Point(16, 1), third)
    assert not is_on_line(Point(21, 2), third), "generation 2 is abandoned entirely"


def test_long_line_keeps_every_cut() -> None:
    second = committed(2, Point(20, 1), next_line(committed(1), Point(20, 1)))
    third = committed(3, Point(30, 2), next_line(second, Point(30, 2)))
    fourth = committed(4, Point(40, 3), next_line(third, Point(40, 3)))
    assert fourth.line == (Cut(1, 20), Cut(2, 30), Cut(3, 40))
    fifth = committed(5, Point(25, 2), next_line(fourth, Point(25, 2)))
    assert fifth.line == (Cut(1, 20), Cut(2, 25))


def test_start_from_scratch_abandons_everything() -> None:
    second = committed(2, Point(20, 1), next_line(committed(1), Point(20, 1)))
    assert next_line(second, None) == ()
    assert not is_on_line(Point(5, 1), committed(3, None, ()))


def test_line_is_bounded() -> None:
    last = committed(1)
    for generation in range(2, KEPT_CUTS + 20):
        point = Point(generation, generation - 1)
        last = committed(generation, point, next_line(last, point))
    assert len(last.line) == KEPT_CUTS
    assert last.line[-1] == Cut(last.generation - 1, last.generation)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12), st.data())
def test_line_equals_a_walk_back_through_the_generations(history: list[tuple[int, int]], data: st.DataObject) -> None:
    """Every generation starts from a point on the line before it; membership agrees with the walk."""
    generations = [committed(1)]
    for step, back in history:
        last = generations[-1]
        generation = max(1, last.generation - back)
        point = Point(step, generation)
        restore = point if is_on_line(point, last) else None
        generations.append(committed(last.generation + 1, restore, next_line(last, restore)))
    asked = Point(data.draw(st.integers(0, 31)), data.draw(st.integers(1, len(generations))))
    generation, last_step, expected = len(generations), 10**9, False
    while generation > 0:
        if generation == asked.generation:
            expected = asked.step <= last_step
            break
        start = generations[generation - 1].restore
        if start is None:
            break
        generation, last_step = start.generation, start.step
    assert is_on_line(asked, generations[-1]) is expected


# ---- the message about values


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ((("a", "1"),), (("a", "1"),), ""),
        ((("a", "1"),), (("a", "2"),), "a is 1 here and 2 there"),
        ((), (("a", "2"),), "a is unset here and 2 there"),
        ((("b", "x"), ("a", "1")), (("a", "2"),), "b is x here and unset there; a is 1 here and 2 there"),
    ],
)
def test_difference_shows_both_values(
    mine: tuple[tuple[str, str], ...], theirs: tuple[tuple[str, str], ...], text: str
) -> None:
    assert differing(mine, theirs) == text


# ---- copies kept by buddies


def keeping(joined: dict[int, Holdings], rank: int, *copies: tuple[int, tuple[int, int]]) -> dict[int, Holdings]:
    """Return a rank that keeps (slot, (step, generation)) of others."""
    kept = tuple(Copy(slot, Point(*point)) for slot, point in copies)
    return joined | {rank: replace(joined[rank], copies=kept)}


def test_copy_returns_a_lost_ranks_own_parts() -> None:
    joined = keeping(holding([], [(10, 1), (20, 1)], own_parts=(0, 1)), 1, (0, (20, 1)), (0, (10, 1)))
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.holders) == (Point(20, 1), {1})
    assert (restore.source_of(0), restore.served_by(1), restore.lent_by(1)) == (1, (), (Loan(0, 0),))
    assert restore.text == ("restore point: step 20 of generation 1, held by rank 1, from copies of rank 0 on rank 1")


def test_newest_point_common_to_copies_and_own_points() -> None:
    joined = keeping(holding([], [(10, 1), (20, 1)], own_parts=(0, 1)), 1, (0, (10, 1)))
    restore = choose_restore_point(joined, committed())
    assert restore.point == Point(10, 1)
    assert "step 20 is not held by all" in restore.text


def test_ranks_own_point_precedes_its_copy() -> None:
    joined = keeping(holding([(20, 1)], [(20, 1)], own_parts=(0, 1)), 1, (0, (20, 1)))
    restore = choose_restore_point(joined, committed())
    assert (restore.source_of(0), restore.lent_by(1)) == (0, ())
    assert restore.text.endswith("from every rank's own checkpoint")


def test_copy_comes_with_its_own_parts_even_if_a_memory_has_the_point() -> None:
    joined = holding([], [], own_parts=(0, 1)) | {1: Holdings((), True, (), live=Point(20, 1), commits=20)}
    restore = choose_restore_point(keeping(joined, 1, (0, (20, 1))), committed())
    assert (restore.source_of(0), restore.lent_by(1), restore.served_by(1)) == (1, (Loan(0, 0),), ())
    assert restore.text == (
        "restore point: step 20 of generation 1, in the memory of rank 1, from copies of rank 0 on rank 1"
    )


def test_rank_without_own_parts_is_served_by_holders_if_there_are_any() -> None:
    joined = keeping(holding([], [(20, 1)], []), 2, (0, (20, 1)))
    restore = choose_restore_point(joined, committed())
    assert (restore.source_of(0), restore.source_of(2), restore.lent_by(2)) == (1, 1, ())


def test_all_borrow_if_only_keepers_have_the_newest_point() -> None:
    joined = keeping(holding([(10, 1)], [(10, 1)], [(10, 1)]), 1, (0, (20, 1)), (5, (20, 1)))
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.holders) == (Point(20, 1), frozenset())
    assert [restore.source_of(rank) for rank in range(3)] == [1, 1, 1]
    assert restore.lent_by(1) == (Loan(0, 0), Loan(1, 0), Loan(2, 5)), "its own, then any, shared evenly"
    assert [restore.served_by(rank) for rank in range(3)] == [(), (), ()]
    assert restore.text == "restore point: step 20 of generation 1, from copies of ranks 0, 1 and 2 on rank 1"


def test_own_parts_missing_from_every_copy_are_reported_lost() -> None:
    joined = keeping(holding([], [], own_parts=(0, 1)), 1, (0, (20, 1)))
    restore = choose_restore_point(joined, committed())
    assert restore.lent_by(1) == (Loan(0, 0), Loan(1, 0))
    assert restore.text.endswith("(the RNG state of rank 1 is lost: it is derived from seed, rank and step)")


def test_copies_are_by_slot_not_by_rank() -> None:
    joined = keeping(holding([], [(20, 1)], own_parts=(0, 1)), 1, (0, (20, 1)), (3, (20, 1)))
    assert choose_restore_point(joined, committed(), (3, 7)).lent_by(1) == (Loan(0, 3),)


def test_copy_of_an_abandoned_line_is_ignored() -> None:
    second = committed(2, Point(10, 1), next_line(committed(1), Point(10, 1)))
    joined = keeping(holding([(10, 1)], [(10, 1)]), 1, (0, (20, 1)))
    assert choose_restore_point(joined, second).point == Point(10, 1)


POINTS = st.sampled_from([Point(10, 1), Point(20, 1), Point(30, 1)])


@given(st.data())
def test_every_source_holds_what_it_sends(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    points = st.lists(POINTS, max_size=3, unique=True).map(tuple)
    copies = st.lists(st.builds(Copy, st.integers(0, size), POINTS), max_size=4, unique=True).map(tuple)
    joined = {
        rank: Holdings(
            data.draw(points),
            data.draw(st.booleans()),
            (),
            live=data.draw(st.none() | POINTS),
            commits=data.draw(st.integers(0, 2)),
            copies=data.draw(copies),
        )
        for rank in range(size)
    }
    restore = choose_restore_point(joined, committed())
    held = {rank: {*one.points, one.live} for rank, one in joined.items()}
    lent = {loan.rank: (keeper, loan.slot) for keeper in joined for loan in restore.lent_by(keeper)}
    for rank, member in joined.items():
        source = restore.source_of(rank)
        if restore.point is None:
            assert not any(one.points or one.live or one.copies for one in joined.values())
        elif rank in lent:
            assert source == lent[rank][0]
            assert Copy(lent[rank][1], restore.point) in joined[source].copies
            assert restore.point not in held[rank]
        else:
            assert restore.point in held[source]
            assert source == rank or rank in restore.served_by(source)
        has_copy = any(Copy(rank, restore.point) in one.copies for one in joined.values() if restore.point)
        if member.own_parts and restore.point not in held[rank] and has_copy:
            assert lent[rank][1] == rank


# ---- pages of generators


def page(last: int, collectives: int = 3, *, generation: int = 1, draws_late: bool = False) -> Page:
    """Return the page of a rank that committed this step and was killed in the next."""
    commits = tuple(KeptCommit(Point(step, 1), step) for step in (last - 1, last))
    return Page(commits, generation, last + 1, collectives, draws_late)


def survivors(step: int, *steps: LiveStep | None, brought: Page | None) -> dict[int, Holdings]:
    """Return a newcomer at rank 0 with this page, and others that remember the commit of ``step``."""
    lives = {
        rank: Holdings((), True, (), live=Point(step, 1), looked=False, commits=step, live_step=one)
        for rank, one in enumerate(steps, start=1)
    }
    return {0: Holdings((), True, (), looked=False, page=brought)} | lives


@pytest.mark.parametrize(
    ("brought", "what"),
    [
        (page(20), "it was killed after the commit"),
        (page(21), "it was one commit ahead"),
        (page(19), "it was killed in the step that the others have committed"),
        (page(21, draws_late=True), "a commit is what it is, whatever is drawn before it"),
    ],
)
def test_page_that_covers_the_commit_in_memory_loses_no_step(brought: Page, what: str) -> None:
    joined = survivors(20, LiveStep(3, False), LiveStep(3, False), None, brought=brought)
    assert not must_look(joined, committed()), what
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.by_page, restore.source_of(0)) == (Point(20, 1), {0}, 1), what
    assert restore.text == (
        "restore point: step 20 of generation 1, in the memory of ranks 1, 2 and 3; sent to rank 0"
        "; the generators of rank 0 are restored from pages in memory"
    )


@pytest.mark.parametrize(
    ("brought", "step", "reason"),
    [
        (page(19, 2), LiveStep(3, False), "has neither this commit nor the same number of collectives"),
        (page(19, 4), LiveStep(3, False), "has neither this commit nor the same number of collectives"),
        (page(18), LiveStep(3, False), "has neither this commit"),
        (page(22), LiveStep(3, False), "has neither this commit"),
        (page(19, generation=2), LiveStep(3, False), "has neither this commit"),
        (page(19), None, "has neither this commit"),
        (
            page(19),
            LiveStep(3, True),
            "lacks the commit in its page, and its peers drew",
        ),
        (page(19, draws_late=True), LiveStep(3, False), "draws random numbers between a step's last collective"),
        (None, LiveStep(3, False), None),
    ],
)
def test_page_that_does_not_cover_it_falls_back_to_a_saved_point_and_says_why(
    brought: Page | None, step: LiveStep | None, reason: str | None
) -> None:
    joined = survivors(20, step, step, brought=brought)
    assert must_look(joined, committed())
    looked = {rank: replace(one, looked=True, points=(Point(10, 1),)) for rank, one in joined.items()}
    restore = choose_restore_point(looked, committed())
    assert (restore.point, restore.by_page) == (Point(10, 1), frozenset())
    if reason is None:
        assert "page" not in restore.text
    else:
        assert f"; rank 0 {reason}" in restore.text


def test_one_peer_with_another_count_of_collectives_forces_the_fallback() -> None:
    assert must_look(survivors(20, LiveStep(3, False), LiveStep(2, False), brought=page(19)), committed())
    assert must_look(survivors(20, LiveStep(3, False), LiveStep(3, True), brought=page(19)), committed())


def test_survivor_a_step_behind_continues_with_its_own_pages_generators() -> None:
    joined = survivors(20, LiveStep(3, False), brought=page(20))
    joined[2] = Holdings((), True, (), live=Point(19, 1), looked=False, commits=19, page=page(19))
    assert not must_look(joined, committed())
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.by_page, restore.served_by(1)) == (Point(20, 1), {0, 2}, (0, 2))


def test_page_is_not_used_if_only_disks_have_the_point() -> None:
    joined = {
        0: Holdings((), True, (), page=page(20)),
        1: Holdings((Point(20, 1),), True, ()),
    }
    restore = choose_restore_point(joined, committed())
    assert restore.by_page == frozenset()
    assert "the RNG state of rank 0 is lost" in restore.text


def test_rank_without_points_but_with_a_page_gets_no_derived_numbers() -> None:
    joined = survivors(20, LiveStep(3, False), brought=page(20))
    joined[2] = Holdings((), True, ())
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.by_page) == (Point(20, 1), {0})
    assert "(the RNG state of rank 2 is lost" in restore.text


def test_page_on_the_dead_ranks_host_is_lent_by_a_rank_there() -> None:
    joined = survivors(20, LiveStep(3, False), LiveStep(3, False), brought=None)
    joined[2] = replace(joined[2], orphaned_pages=(OrphanedPage(5, page(20)), OrphanedPage(0, page(19))))
    joined[1] = replace(joined[1], orphaned_pages=(OrphanedPage(0, page(17)),))  # of a host where it ran long ago
    assert not must_look(joined, committed())
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.by_page) == (Point(20, 1), {0})
    assert restore.page_loans == (PageLoan(2, 0, 0),)


def test_rank_with_a_page_that_covers_the_commit_borrows_none() -> None:
    joined = survivors(20, LiveStep(3, False), LiveStep(3, False), brought=page(20))
    joined[2] = replace(joined[2], orphaned_pages=(OrphanedPage(0, page(20)),))
    assert choose_restore_point(joined, committed()).page_loans == ()
    joined[0] = replace(joined[0], page=page(12))
    assert choose_restore_point(joined, committed()).page_loans == (PageLoan(2, 0, 0),)


def test_pages_belong_to_slots_not_ranks() -> None:
    joined = survivors(20, LiveStep(3, False), LiveStep(3, False), brought=None)
    joined[1] = replace(joined[1], orphaned_pages=(OrphanedPage(0, page(20)),))
    assert must_look(joined, committed(), [7, 8, 9])
    joined[1] = replace(joined[1], orphaned_pages=(OrphanedPage(7, page(20)),))
    assert not must_look(joined, committed(), [7, 8, 9])
    assert choose_restore_point(joined, committed(), [7, 8, 9]).page_loans == (PageLoan(1, 0, 7),)


def test_orphaned_page_that_does_not_cover_the_commit_falls_back_to_a_saved_point() -> None:
    joined = survivors(20, LiveStep(3, False), LiveStep(3, False), brought=None)
    joined[1] = replace(joined[1], orphaned_pages=(OrphanedPage(0, page(17)),))
    assert must_look(joined, committed())
    looked = {rank: replace(one, looked=True, points=(Point(10, 1),)) for rank, one in joined.items()}
    restore = choose_restore_point(looked, committed())
    assert (restore.point, restore.page_loans) == (Point(10, 1), ())
    assert "; rank 0 finds no page of its generators in its host's memory" in restore.text


# ---- replica keys

HYBRID = Sharding((2, 2), (True, False))  # ranks 0 and 2 hold one shard, 1 and 3 the other
SHARDED = Sharding((4,), (False,))
REPLICATED = Sharding((4,), (True,))
STAGES = Sharding((2, 2, 1), (False, True, False))  # two pipeline stages, each with a replica: ranks 0 and 1, 2 and 3


@pytest.mark.parametrize(
    ("sharding", "keys"),
    [
        (REPLICATED, [(), (), (), ()]),
        (SHARDED, [(0,), (1,), (2,), (3,)]),
        (HYBRID, [(0,), (1,), (0,), (1,)]),
        (Sharding((2, 2), (False, True)), [(0,), (0,), (1,), (1,)]),
        (Sharding((2, 2), (False, False)), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (Sharding((2, 1, 2), (True, False, False)), [(0, 0), (0, 1), (0, 0), (0, 1)]),
        (STAGES, [(0, 0), (0, 0), (1, 0), (1, 0)]),
    ],
)
def test_the_replica_key_is_the_coordinate_without_what_replicates(
    sharding: Sharding, keys: list[tuple[int, ...]]
) -> None:
    assert [sharding.key_of(rank) for rank in range(4)] == keys


def in_mesh(
    sharding: Sharding | None, *lives: int | None, disks: dict[int, list[int]] | None = None
) -> dict[int, Holdings]:
    """What ranks bring that remember the commits of these steps, and hold points of these steps on their disks."""
    return {
        rank: Holdings(
            tuple(Point(step, 1) for step in (disks or {}).get(rank, ())),
            False,
            (),
            live=None if live is None else Point(live, 1),
            commits=live or 0,
            sharding=sharding,
        )
        for rank, live in enumerate(lives)
    }


@pytest.mark.parametrize(
    ("sharding", "lives", "disks", "step", "sources"),
    [
        (HYBRID, (20, 20, 20, None), {}, 20, {3: 1}),  # one rank lost: its shard is in its replica's memory
        (HYBRID, (20, 21, 20, None), {0: [10], 1: [10], 2: [10]}, 10, {3: 1}),  # step 21 lacks a shard, step 20 too
        (HYBRID, (21, 21, 20, None), {}, 21, {2: 0, 3: 1}),  # a replica behind takes the commit of the one ahead
        (HYBRID, (20, 20, None, None), {}, 20, {2: 0, 3: 1}),  # a whole replica lost
        (HYBRID, (20, None, None, 20), {}, 20, {1: 3, 2: 0}),  # two ranks of different shards
        (HYBRID, (20, None, 20, None), {1: [10], 0: [10]}, 10, {2: 0, 3: 1}),  # both of one shard: the disk
        (HYBRID, (None, None, None, None), {0: [10, 20], 1: [10, 20], 2: [10], 3: [10]}, 20, {2: 0, 3: 1}),
        (HYBRID, (None, None, None, None), {0: [10, 20], 1: [10], 2: [20], 3: []}, 10, {2: 0, 3: 1}),
        (SHARDED, (20, 20, 20, None), {rank: [10] for rank in range(4)}, 10, {}),  # each rank goes to its own disk
        (SHARDED, (20, 20, 20, None), {3: [20]}, 20, {}),  # the lost rank had saved that commit
        (SHARDED, (20, 20, 20, None), {0: [0], 1: [0]}, 0, {2: 0, 3: 1}),  # saved before anything was sharded
        (STAGES, (20, 20, None, 20), {}, 20, {2: 3}),  # a stage comes from its replica, not from the other stage
        (STAGES, (20, 20, None, None), {0: [10], 3: [10]}, 10, {1: 0, 2: 3}),
        (REPLICATED, (20, 21, None, None), {}, 21, {0: 1, 2: 1, 3: 1}),
        (None, (20, 21, None, None), {}, 21, {0: 1, 2: 1, 3: 1}),
    ],
)
def test_the_point_is_the_newest_that_every_key_has_a_holder_of(
    sharding: Sharding | None,
    lives: tuple[int | None, ...],
    disks: dict[int, list[int]],
    step: int,
    sources: dict[int, int],
) -> None:
    restore = choose_restore_point(in_mesh(sharding, *lives, disks=disks), committed())
    assert (restore.point, restore.lost) == (Point(step, 1), "")
    assert dict(restore.sources) == sources


def test_a_part_that_nobody_holds_ends_the_job_with_its_ranks() -> None:
    restore = choose_restore_point(in_mesh(HYBRID, 20, None, 20, None, disks={0: [10], 2: [10]}), committed())
    assert restore.point is None
    assert "the part of ranks 1 and 3 at step 20" in restore.lost and "Fix: bring the checkpoints" in restore.lost


def test_a_copy_holds_its_ranks_key() -> None:
    joined = in_mesh(SHARDED, None, 20, 20, 20)
    joined[2] = replace(joined[2], copies=(Copy(0, Point(20, 1)), Copy(3, Point(20, 1))))
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.lent_by(2)) == (Point(20, 1), (Loan(0, 0),))
    hybrid = in_mesh(HYBRID, None, 20, None, 20)
    hybrid[1] = replace(hybrid[1], copies=(Copy(0, Point(20, 1)), Copy(3, Point(20, 1))))
    restore = choose_restore_point(hybrid, committed())
    assert (restore.point, restore.lent_by(1)) == (Point(20, 1), (Loan(0, 0), Loan(2, 0)))


def test_a_generator_without_a_page_holds_the_ranks_back_also_where_the_shards_are_there() -> None:
    joined = in_mesh(HYBRID, 20, 20, 20, None, disks={rank: [10] for rank in range(4)})
    joined = {rank: replace(one, own_parts=True) for rank, one in joined.items()}
    assert choose_restore_point(joined, committed()).point == Point(10, 1)
    steps = LiveStep(3, False)
    joined = {rank: replace(one, live_step=steps if rank < 3 else None) for rank, one in joined.items()}
    joined[3] = replace(joined[3], page=page(20))
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.by_page, dict(restore.sources)) == (Point(20, 1), {3}, {3: 1})


@pytest.mark.parametrize(
    ("sharding", "lives", "looks"),
    [
        (HYBRID, (20, 20, 20, None), False),
        (HYBRID, (20, None, 20, None), True),
        (HYBRID, (21, 21, 20, None), False),
        (HYBRID, (20, 21, 20, None), True),
        (SHARDED, (20, 20, 20, None), True),
        (SHARDED, (20, 20, 20, 20), False),
        (None, (20, None, None, None), False),
    ],
)
def test_disks_are_asked_if_the_memories_lack_a_key(
    sharding: Sharding | None, lives: tuple[int | None, ...], looks: bool
) -> None:
    joined = {rank: replace(one, looked=False) for rank, one in in_mesh(sharding, *lives).items()}
    assert must_look(joined, committed()) == looks


def test_a_memory_behind_its_key_s_copy_takes_the_copy() -> None:
    """A commit that others have overtaken within its step is not the one that is meant."""
    joined = in_mesh(Sharding((2,), (False,)), 20, 20)
    joined[0] = replace(joined[0], commits=21, copies=(Copy(1, Point(20, 1)),))
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.lent_by(0)) == (Point(20, 1), (Loan(1, 1),))


def kept(*points: tuple[int, int] | tuple[int, int, int]) -> tuple[KeptCommit, ...]:
    """Copies in shared memory: step, generation, and the number of commits if that is not the step."""
    return tuple(KeptCommit(Point(*one[:2]), one[2] if len(one) == 3 else one[0]) for one in points)


@pytest.mark.parametrize(
    ("sharding", "lives", "copies", "disks", "step", "sources", "said"),
    [
        # killed before its optimizer stepped: the dead process's copy, and the survivors' memories
        (SHARDED, (20, 20, 20, None), {3: kept((20, 1))}, {}, 20, {}, "in the shared-memory copy of rank 3$"),
        # killed in its step: some have committed it, and go back to their own copies
        (
            *(SHARDED, (21, 20, None, None), {0: kept((21, 1), (20, 1)), 2: kept((20, 1)), 3: kept((20, 1))}, {}),
            *(20, {}, "in the memory of rank 1, in the shared-memory copy of ranks 0, 2 and 3"),
        ),
        # every second commit is copied
        (
            SHARDED,
            (21, 21, 21, None),
            {rank: kept((20, 1)) for rank in range(4)},
            {},
            20,
            {},
            "copy of ranks 0, 1, 2 and 3",
        ),
        # of another host than the replacement's: its disk
        (SHARDED, (20, 20, 20, None), {0: kept((20, 1))}, {rank: [10] for rank in range(4)}, 10, {}, "own checkpoint"),
        # a copy before a disk that has the point too
        (SHARDED, (20, 20, 20, None), {3: kept((20, 1))}, {3: [20]}, 20, {}, "in the shared-memory copy of rank 3$"),
        # a copy of an abandoned line
        (SHARDED, (20, 20, 20, None), {3: kept((20, 7))}, {rank: [10] for rank in range(4)}, 10, {}, "own checkpoint"),
        # a copy of an earlier commit after the same step, and one that the survivors have not made
        (SHARDED, (20, 20, 20, None), {3: kept((20, 1, 19))}, {rank: [9] for rank in range(4)}, 9, {}, "checkpoint"),
        (SHARDED, (20, 20, 20, None), {3: kept((20, 1, 21))}, {rank: [9] for rank in range(4)}, 9, {}, "checkpoint"),
        # a replica's memory before the rank's own copy
        (
            HYBRID,
            (20, 20, 20, None),
            {3: kept((20, 1))},
            {},
            20,
            {3: 1},
            "in the memory of ranks 0, 1 and 2; sent to rank 3",
        ),
        # the kill between the steps of two shards: one has stepped, the other has not
        (HYBRID, (20, None, 20, None), {1: kept((20, 1))}, {}, 20, {3: 1}, "in the shared-memory copy of rank 1; sent"),
        # a holder of another key is none
        (HYBRID, (20, None, 20, None), {2: kept((20, 1))}, {0: [5], 1: [5]}, 5, {2: 0, 3: 1}, "held by ranks 0 and 1"),
        # everything was killed
        (
            SHARDED,
            (None,) * 4,
            {rank: kept((20, 1)) for rank in range(4)},
            {0: [25]},
            20,
            {},
            "copy of ranks 0, 1, 2 and 3",
        ),
    ],
)
def test_copies_in_shared_memory_hold_their_ranks_key(
    sharding: Sharding,
    lives: tuple[int | None, ...],
    copies: dict[int, tuple[KeptCommit, ...]],
    disks: dict[int, list[int]],
    step: int,
    sources: dict[int, int],
    said: str,
) -> None:
    joined = in_mesh(sharding, *lives, disks=disks)
    joined = {rank: replace(one, kept=copies.get(rank, ())) for rank, one in joined.items()}
    restore = choose_restore_point(joined, committed())
    assert (restore.point, restore.lost) == (Point(step, 1), "")
    assert dict(restore.sources) == sources
    assert re.search(said, restore.text.partition(" (")[0]), restore.text


def test_a_rank_takes_its_own_copy_before_its_buddys() -> None:
    joined = in_mesh(SHARDED, 20, 20, 20, None)
    joined[0] = replace(joined[0], copies=(Copy(3, Point(20, 1)),))
    assert choose_restore_point(joined, committed()).borrowed == {3: Borrowed(0, 3)}
    joined[3] = replace(joined[3], kept=kept((20, 1)))
    assert choose_restore_point(joined, committed()).borrowed == {}


def test_a_copy_has_the_generators_that_a_replica_lacks() -> None:
    joined = {rank: replace(one, own_parts=True) for rank, one in in_mesh(HYBRID, 20, 20, 20, None).items()}
    joined[3] = replace(joined[3], kept=kept((20, 1)))
    restore = choose_restore_point(joined, committed())
    assert (restore.point, dict(restore.sources), restore.by_page) == (Point(20, 1), {}, frozenset())


def test_disks_are_not_asked_if_copies_hold_the_last_commit_of_every_key() -> None:
    joined = {rank: replace(one, looked=False) for rank, one in in_mesh(SHARDED, 20, 20, 20, None).items()}
    assert must_look(joined, committed())
    for copies, looks in ((kept((20, 1)), False), (kept((19, 1)), True), (kept((20, 1, 19)), True)):
        joined[3] = replace(joined[3], kept=copies)
        assert must_look(joined, committed()) == looks


def test_copies_after_the_last_common_point_are_doubtful() -> None:
    joined = in_mesh(SHARDED, 20, 20, 20, None)
    joined[3] = replace(joined[3], kept=kept((20, 1), (10, 1)))
    assert drop_doubtful_points(joined, Point(10, 1))[3].kept == kept((10, 1))


@given(data=st.data())
def test_every_rank_gets_its_part_from_a_holder_of_its_key(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sharding = Sharding(tuple(sizes), tuple(data.draw(st.booleans()) for _ in sizes))
    size = math.prod(sizes)
    steps = st.integers(0, 3)
    joined = {
        rank: Holdings(
            tuple(Point(step, 1) for step in data.draw(st.sets(steps))),
            data.draw(st.booleans()),
            (),
            live=data.draw(st.none() | steps.map(lambda step: Point(step, 1))),
            commits=data.draw(st.integers(0, 2)),
            copies=tuple(
                Copy(slot, Point(step, 1)) for slot, step in data.draw(st.sets(st.tuples(st.integers(0, size), steps)))
            ),
            sharding=sharding,
            kept=tuple(
                KeptCommit(Point(step, 1), commits)
                for step, commits in data.draw(st.sets(st.tuples(steps, st.integers(0, 2)), max_size=2))
            ),
        )
        for rank in range(size)
    }
    restore = choose_restore_point(joined, committed())
    if restore.point is None:
        return
    keys = [sharding.key_of(rank) for rank in range(size)]
    for rank in range(size):
        borrowed = restore.borrowed.get(rank)
        if borrowed is not None:
            assert Copy(borrowed.slot, restore.point) in joined[borrowed.keeper].copies
            assert sharding.key_of(borrowed.slot) == keys[rank]
            continue
        source = joined[restore.source_of(rank)]
        assert restore.point in {*source.points, source.live, *(one.point for one in source.kept)}
        is_whole = restore.point.step == 0 and restore.point in source.points
        assert keys[restore.source_of(rank)] == keys[rank] or is_whole
