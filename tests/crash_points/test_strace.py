"""The kernel's calls, failed and killed by strace: the shortest scenario here, all with ``--strace``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_points.strace import FAULTS, Tracer, refusal


@pytest.mark.system
@pytest.mark.parametrize("fault", FAULTS)
def test_kernel_calls_leave_the_old_or_the_new_state(repository: Path, tmp_path: Path, fault: str) -> None:
    if (why := refusal()) is not None:
        pytest.skip(f"{why}; test_crash_points fails and kills the same calls without it")
    tracer = Tracer(repository, tmp_path / "point", "file replaced")
    assert {point.name for point in tracer.points()} >= {"openat", "write", "fsync", "rename"}
    found = list(tracer.violations(fault))
    assert found == [], "\n".join(map(str, found))
