"""The storm for a few seconds, as a test; longer runs: ``python -m tests.hostile.storm``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.storm import run
from tests.system.processes import WarmStarter


@pytest.mark.parametrize("mode", ["secret", pytest.param("open", marks=pytest.mark.thorough)])
def test_job_under_attack_ends_with_the_undisturbed_bits(mode: str, tmp_path: Path, warm: WarmStarter) -> None:
    result = run(mode, 2.0, 3, tmp_path, warm, print, calm_s=1.0, rounds=1)
    for came in (result.came, result.came_to_floor, result.came_at_end):
        assert all(came[kind] > 0 for kind in came)
        assert len(came) == 8
    assert min(result.speed, result.floor, result.ratio) > 0
    assert result.ports == 2 * 3 + 1, (
        "per worker gloo's and its copies', and rank 0's later keys (docs/reference/ports-and-files.md)"
    )
