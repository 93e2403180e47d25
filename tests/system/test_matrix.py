"""A covering set of the kill matrix; ``python -m tests.system --matrix`` runs all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system import matrix
from tests.system.job import Job
from tests.system.kill_points import Way
from tests.system.matrix import CELLS, COVERING, TRAINED, MadeUp

# Every row, every way and every way to make up is in the others too; their pairs are what these add.
THOROUGH = {
    "a middle rank, stop, restart",  # → test_fencing
    "all but one, exit, spare",  # → all but one, kill, shrink; the last rank, exit, shrink
    "scheduler and worker, stop, shrink",  # → a spare, then a rank, stop, spare; scheduler and worker, term, restart
    "during growth, term, shrink",  # → during growth, kill, restart; test_elastic
}
LISTED = [pytest.param(name, marks=[pytest.mark.thorough] if name in THOROUGH else []) for name in COVERING]


@pytest.mark.system
@pytest.mark.parametrize("name", LISTED)
def test_it_ends_in_the_right_state(name: str, new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    cell = CELLS[name]
    matrix.run(cell, new_job(*cell.arguments, settings=cell.settings), lambda: undisturbed(*TRAINED))


def test_the_set_covers_the_matrix() -> None:
    chosen = [CELLS[name] for name in COVERING]
    assert len(set(COVERING)) == 15
    assert len(CELLS) == len(matrix.WHO) * len(Way) * len(MadeUp) - len(Way)  # a shrink has no successor
    assert {cell.who.name for cell in chosen} == set(matrix.WHO)
    assert {(cell.way, cell.made_up) for cell in chosen} == {(way, made_up) for way in Way for made_up in MadeUp}


def test_what_is_left_to_a_thorough_run_leaves_every_row_and_column() -> None:
    assert set(COVERING) > THOROUGH
    in_default = [CELLS[name] for name in COVERING if name not in THOROUGH]
    assert {cell.who.name for cell in in_default} == set(matrix.WHO)
    assert {cell.way for cell in in_default} == set(Way)
    assert {cell.made_up for cell in in_default} == set(MadeUp)
