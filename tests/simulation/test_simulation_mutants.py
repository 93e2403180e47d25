"""Every deliberately broken build is caught by a fitting checker within a stated number of seeds."""

from __future__ import annotations

import re

import pytest

from tests.simulation.checkers import ALL
from tests.simulation.checkers.l3_progress import Progress
from tests.simulation.checkers.l5_end import TheEnd
from tests.simulation.checkers.s09_restore_point import RestorePoint
from tests.simulation.mutants import MUTANTS, Mutant, stored_seeds
from tests.simulation.trace import Violation
from tests.simulation.world import World


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: re.sub(r"[^a-z]+", "-", mutant.name))
def test_broken_build_is_caught_where_the_unchanged_one_passes(mutant: Mutant) -> None:
    caught = mutant.kill()
    assert caught is not None, f"{mutant.name}: {mutant.within_seeds} seeds passed"
    seed, violation = caught
    print(f"{mutant.name}: seed {seed}, {violation}")
    assert violation.name in mutant.caught_by
    try:
        World(seed, changes=mutant.changes).run()
    except Violation as also:
        pytest.fail(f"{mutant.name}: seed {seed} fails without the mutant too ({also}); with it: {violation}")


def test_every_invariant_has_mutants() -> None:
    """A checker that no mutant triggers proves nothing."""
    assert len(MUTANTS) >= 25
    named = set().union(*(mutant.caught_by for mutant in MUTANTS))
    assert {checker.name for checker in ALL} <= named


def test_stored_seed_that_misses_is_reported_and_another_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = (one for one in MUTANTS if one.name == "no cool-down")
    first = mutant.hunt(0, mutant.within_seeds)
    assert first is not None
    misses = first[0] + 1
    while mutant.hunt(misses, 1) is not None:
        misses += 1
    monkeypatch.setattr("tests.simulation.mutants.mutant.stored_seeds", lambda: {mutant.name: misses})
    with pytest.warns(UserWarning, match=f"its stored seed {misses} kills it no more.*--mutants"):
        caught = mutant.kill()
    assert caught is not None and caught[0] == first[0]


def test_seeds_are_stored_only_for_existing_mutants() -> None:
    """A mutant without one is searched for until the table is rewritten."""
    assert set(stored_seeds()) <= {mutant.name for mutant in MUTANTS}


def test_every_invariant_has_a_checker() -> None:
    expected = {f"S{number}" for number in range(1, 27)} | {f"L{number}" for number in range(1, 7)}
    assert {checker.name for checker in ALL} == expected
    assert len({checker.__module__ for checker in ALL}) == len(ALL), "one file each"


def test_part_without_a_member_is_noticed_by_itself() -> None:
    """S14 is left out, because it catches this mutant first."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "a part of the state has no member")
    caught = mutant.hunt(start=0, seeds=50, checkers=(RestorePoint,))
    assert caught is not None and "no member holds the parts" in str(caught[1])


def test_stalled_restore_point_is_noticed_by_itself() -> None:
    """S19 is left out, because it catches this mutant first."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "checkpoints: nothing is kept")
    caught = mutant.hunt(start=0, seeds=60, checkers=(Progress, TheEnd))
    assert caught is not None
    assert caught[1].name == "L3"
