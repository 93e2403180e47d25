"""Every disk call of every scenario, failed and killed, and the broken builds that this catches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash_points.mutants import MUTANTS
from tests.crash_points.points import FAULTS, Nursery, Runner
from tests.crash_points.scenarios import SCENARIOS


@pytest.fixture(scope="module")
def nursery(repository: Path) -> Iterator[Nursery]:
    with Nursery(repository) as nursery:
        yield nursery


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_old_or_new_state_is_read_back(nursery: Nursery, tmp_path: Path, scenario: str, fault: str) -> None:
    found = list(Runner(nursery, tmp_path / "point", scenario).violations(fault))
    assert found == [], "\n".join(map(str, found))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_refusal_by_the_kernel_changes_nothing(nursery: Nursery, tmp_path: Path, scenario: str) -> None:
    found = list(Runner(nursery, tmp_path / "point", scenario).refusals())
    assert found == [], "\n".join(map(str, found))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_build_is_caught(nursery: Nursery, tmp_path: Path, mutant: str) -> None:
    broken = MUTANTS[mutant]
    runner = Runner(nursery, tmp_path / "point", broken.scenario, mutant)
    assert next(runner.violations(broken.fault), None) is not None, "nothing is wrong after any of its faults"


def test_calls_are_those_of_a_durable_store(nursery: Nursery, tmp_path: Path) -> None:
    """A layer that sees no calls would find no faults, so each kind of call must occur."""
    seen = {call.split()[0] for name in SCENARIOS for call, _ in Runner(nursery, tmp_path / "point", name).points()}
    assert seen == {"open", "write", "fsync", "ftruncate", "mkdir", "rename", "link", "unlink", "rmdir"}
