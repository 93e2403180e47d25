"""A failing run is reduced to the faults it needs, always the same ones."""

from __future__ import annotations

import pytest

from samebits.core.scheduler import SchedulerCore
from tests.simulation.minimise import minimised
from tests.simulation.mutants.of_core import NoCoolDown
from tests.simulation.runs import run_seed
from tests.simulation.trace import Violation
from tests.simulation.world import World


def first_failure(core_type: type[SchedulerCore]) -> tuple[int, Violation, int]:
    for seed in range(100):
        world = World(seed, core_type=core_type)
        try:
            world.run()
        except Violation as violation:
            if len(world.schedule) > 5:
                return seed, violation, len(world.schedule)
    raise AssertionError("the mutant survives")


def test_minimised_schedule_still_fails() -> None:
    seed, violation, planned = first_failure(NoCoolDown)
    small = minimised(seed, violation, core_type=NoCoolDown)
    left = planned - len(small.leave_out)
    assert left <= planned // 2
    with pytest.raises(Violation) as caught:
        small.world(core_type=NoCoolDown).run()
    assert caught.value.name == violation.name == "S3"
    small.world().run()  # and the unchanged core passes


def test_no_remaining_fault_can_be_omitted() -> None:
    seed, violation, _ = first_failure(NoCoolDown)
    small = minimised(seed, violation, core_type=NoCoolDown)
    numbers = {planned.number for planned in small.world().schedule}
    for needed in numbers - small.leave_out:
        world = World(seed, changes=small.changes, leave_out={*small.leave_out, needed}, core_type=NoCoolDown)
        try:
            world.run()
        except Violation as other:
            assert other.name != violation.name, f"planned fault {needed} is not needed"


def test_minimising_is_deterministic() -> None:
    seed, violation, _ = first_failure(NoCoolDown)
    first, second = (minimised(seed, violation, core_type=NoCoolDown) for _ in range(2))
    assert (first.leave_out, first.changes, first.runs) == (second.leave_out, second.changes, second.runs)


def test_report_has_all_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed, _, _ = first_failure(NoCoolDown)

    class Broken(World):
        def __init__(self, *arguments: object, **how: object) -> None:
            super().__init__(*arguments, **{**how, "core_type": NoCoolDown})  # type: ignore[arg-type]

    monkeypatch.setattr("tests.simulation.runs.World", Broken)
    monkeypatch.setattr("tests.simulation.minimise.World", Broken)
    (report,) = run_seed(seed, tail=20).failures
    assert report.startswith(f"seed {seed}: S3: ")
    assert "planned faults" in report
    assert "Mix(" in report
    assert "  decides  " in report
    assert report.endswith(f"again: python -m tests.simulation --seeds 1 --start {seed}")
