"""A covering set of the kill matrix; ``python -m tests.system --matrix`` runs all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system import matrix
from tests.system.job import Job
from tests.system.kill_points import Way
from tests.system.matrix import CELLS, COVERING, TRAINED, MadeUp


@pytest.mark.system
@pytest.mark.parametrize("name", COVERING)
def test_it_ends_in_the_right_state(name: str, new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    cell = CELLS[name]
    matrix.run(cell, new_job(*cell.arguments, settings=cell.settings), lambda: undisturbed(*TRAINED))


def test_the_set_covers_the_matrix() -> None:
    chosen = [CELLS[name] for name in COVERING]
    assert len(set(COVERING)) == 15
    assert len(CELLS) == len(matrix.WHO) * len(Way) * len(MadeUp) - len(Way)  # a shrink has no successor
    assert {cell.who.name for cell in chosen} == set(matrix.WHO)
    assert {(cell.way, cell.made_up) for cell in chosen} == {(way, made_up) for way in Way for made_up in MadeUp}
