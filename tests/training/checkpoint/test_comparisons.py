"""When ranks are compared: at the first commit of a generation, then at multiples or as often as is cheap."""

from __future__ import annotations

import itertools

from samebits.training.checkpoint.save_schedule import OFTENEST, SELDOMEST, Comparisons, Measured, comparisons_by


def at(rhythm: Comparisons, begins: int, until: int) -> list[int]:
    rhythm.begins(begins, leads=True)
    return [step for step in range(begins + 1, until + 1) if rhythm.is_at(step)]


def test_first_commit_of_a_generation_and_every_multiple() -> None:
    assert at(Comparisons(50), 0, 151) == [1, 50, 100, 150]
    assert at(Comparisons(50), 73, 151) == [74, 100, 150]
    assert at(Comparisons(50), 49, 100) == [50, 100]
    assert at(Comparisons(1), 3, 6) == [4, 5, 6]


def test_skipped_step_is_made_up_for_and_a_repeated_one_is_not() -> None:
    rhythm = Comparisons(10)
    rhythm.begins(0, leads=True)
    assert [step for step in (1, 7, 12, 12, 19, 20) if rhythm.is_at(step)] == [1, 12, 20]


def test_0_is_never() -> None:
    assert at(Comparisons(0), 0, 200) == []


class Ranks:
    """Two ranks that measure different costs, and one clock."""

    def __init__(self, cost_s: float) -> None:
        self.now = 0.0
        self.said: tuple[int, int] = (0, 0)
        self.leader = Measured(self._says, clock=lambda: self.now)
        self.other = Measured(lambda _: self.said, clock=lambda: self.now)
        self.cost_s = cost_s

    def _says(self, numbers: tuple[int, int]) -> tuple[int, int]:
        self.said = numbers
        return numbers

    def steps(self, until: int) -> list[int]:
        self.leader.begins(0, leads=True)
        self.other.begins(0, leads=False)
        found = []
        for step in range(1, until + 1):
            self.now += 0.1
            mine, theirs = self.leader.is_at(step), self.other.is_at(step)
            assert mine == theirs, "on every rank at the same steps"
            if mine:
                found.append(step)
                self.leader.took(self.cost_s)
                self.other.took(100 * self.cost_s)
        return found


def test_auto_costs_one_percent_as_measured_by_rank_0() -> None:
    found = Ranks(cost_s=0.05).steps(400)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert gaps[0] == OFTENEST, "before it is known"
    assert set(gaps[1:]) <= {50, 51}, "0.05 s are a hundredth of 50 steps of 0.1 s"


def test_auto_has_bounds() -> None:
    assert max(Ranks(cost_s=1e-9).steps(100)) == 91
    assert Ranks(cost_s=1e9).steps(2 * SELDOMEST)[-1] == 1 + OFTENEST + SELDOMEST


def test_setting_selects_the_schedule() -> None:
    assert type(comparisons_by("auto", lambda numbers: numbers)) is Measured
    assert type(comparisons_by(50, lambda numbers: numbers)) is Comparisons
