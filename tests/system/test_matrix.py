"""A covering set of the kill matrix; ``python -m tests.system --matrix`` runs all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system import kill_points, matrix, test_kill_list
from tests.system.job import Job
from tests.system.kill_list import CASES
from tests.system.kill_points import Way
from tests.system.matrix import CELLS, COVERING, MODELS, MadeUp

# The other cells include every row, way and replacement; these add their pairs.
THOROUGH = {
    "a middle rank, stop, restart",  # → test_fencing
    "all but one, exit, spare",  # → all but one, kill, shrink; the last rank, exit, shrink
    "scheduler and worker, stop, shrink",  # → a spare, then a rank, stop, spare; scheduler and worker, term, restart
    "during growth, term, shrink",  # → during growth, kill, restart; test_elastic
}
LISTED = [pytest.param(name, marks=[pytest.mark.thorough] if name in THOROUGH else []) for name in COVERING]


@pytest.mark.system
@pytest.mark.parametrize("name", LISTED)
def test_cell_ends_in_the_required_state(
    name: str, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    cell = CELLS[name]
    matrix.run(cell, new_job(*cell.arguments, settings=cell.settings), lambda: undisturbed(*cell.trained))


def test_set_covers_the_matrix() -> None:
    chosen = [CELLS[name] for name in COVERING]
    assert len(set(COVERING)) == 15
    assert len(CELLS) == len(matrix.WHO) * len(Way) * len(MadeUp) - len(Way)  # a shrink has no successor
    assert {cell.who.name for cell in chosen} == set(matrix.WHO)
    assert {(cell.way, cell.made_up) for cell in chosen} == {(way, made_up) for way in Way for made_up in MadeUp}


def test_list_and_matrix_reach_every_point_and_model_without_a_thorough_run() -> None:
    """The exception is a checkpoint that has its name; tests/store kills at every system call of a save."""
    cells = [CELLS[name] for name in COVERING if name not in THOROUGH]
    cases = [case for name, case in CASES.items() if name not in test_kill_list.THOROUGH]
    losses = [point for cell in cells for point in cell.who.points] + [kill for case in cases for kill in case.kills]
    table = (kill_points.__doc__ or "").split("\n=")[2]
    points = {line.split()[0] for line in table.splitlines()[1:] if line}
    assert {loss.split(":")[1] for loss in losses} == points - {"saved"}
    models = {word for args in [cell.trained for cell in cells] + [case.args for case in cases] for word in args}
    assert {"by-hand", "saved"} <= models
    assert set(MODELS) <= {cell.name for cell in cells}


def test_cells_outside_a_thorough_run_cover_every_row_and_column() -> None:
    assert set(COVERING) > THOROUGH
    in_default = [CELLS[name] for name in COVERING if name not in THOROUGH]
    assert {cell.who.name for cell in in_default} == set(matrix.WHO)
    assert {cell.way for cell in in_default} == set(Way)
    assert {cell.made_up for cell in in_default} == set(MadeUp)
