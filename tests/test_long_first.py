"""Long tests come first and are spread out; every test is listed once, identically in each process."""

from __future__ import annotations

import pytest

from tests.long_first import HEAD, dealt, long_tests, name_of, table_from

NAMES = [f"test_{number}" for number in range(11)]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 11, 20])
@pytest.mark.parametrize("seconds", [{}, {"test_7": 9.0, "test_2": 20.0, "test_9": 5.0, "test_gone": 70.0}])
def test_every_test_is_listed_once(processes: int, seconds: dict[str, float]) -> None:
    assert sorted(dealt(NAMES, seconds, processes)) == list(range(11))


def test_each_process_starts_with_its_share_of_the_long_ones_and_continues_in_order() -> None:
    order = dealt(NAMES, {"test_7": 9.0, "test_2": 20.0, "test_9": 5.0}, 2)
    assert order == [2, 9, 0, 1, 3, 7, 4, 5, 6, 8, 10]  # xdist hands out 5 and 6 of 11


def test_more_long_ones_than_a_share_holds_are_not_lost() -> None:
    order = dealt(NAMES, {name: 1.0 + number for number, name in enumerate(NAMES)}, 3)
    assert sorted(order) == list(range(11)) and order[0] == 10


def test_name_does_not_depend_on_the_place_of_its_file() -> None:
    assert name_of("tests/a/test_b.py::test_c[x::y]") == "test_c[x::y]"


def test_table_can_be_read() -> None:
    assert all(seconds > 0 for seconds in long_tests().values())


def test_table_is_made_from_measurements() -> None:
    measured = (
        " 70.10   12.30 tests/a/test_b.py::test_c[x y]\n  0.10    9.30 t/test_d.py::test_e\n  1.00   44.60 t.py::f\n"
    )
    assert table_from(measured) == f"{HEAD} 45 f\n 12 test_c[x y]\n"
