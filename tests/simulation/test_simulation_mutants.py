"""Every deliberately broken core is caught, by the checker its fault belongs to, within a stated number of seeds."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.runs import run_seeds


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_broken_core_is_caught(mutant: Mutant) -> None:
    caught = mutant.hunt(start=0, seeds=mutant.within_seeds)
    assert caught is not None, f"{mutant.name}: {mutant.within_seeds} seeds passed"
    seed, violation = caught
    print(f"{mutant.name}: seed {seed}, {violation}")
    assert violation.name in mutant.caught_by


def test_the_whole_core_passes_where_the_broken_ones_fall() -> None:
    assert run_seeds(0, 50).failures == []
