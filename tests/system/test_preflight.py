"""A worker on a host with an unhealthy device names it and asks for no seat; elsewhere the same job trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import PreflightError
from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("anomaly_script.py")
SICK = """#!/bin/sh
[ "$2" = "" ] || exit 1
echo "| 5     910B3 | Alarm        | 92.0 39 0 / 0             |"
echo "| 0           | 0000:C2:00.0 | 0    0  / 0  3314 / 65536 |"
"""


def test_node_with_an_unhealthy_device_is_named_and_not_admitted(new_job: Callable[..., Job], tmp_path: Path) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text(SICK)
    tool.chmod(0o700)
    job = new_job(script=SCRIPT, workers=2, settings={"HEALTH": "preflight"})
    job.start_scheduler()
    job.start_worker(0)
    job.start_worker(1, PATH=f"{tmp_path}:{job.environment()['PATH']}")
    assert job.worker(1).wait(60.0) == PreflightError.exit_code
    assert job.matches(1, "the pre-flight check of 1 failed: Ascend 5: its health is Alarm")
    job.start_worker(1)
    job.wait_finished()
    assert job.matches(0, r"pre-flight, .* s: cpu computes: .*4 of 4 products correct")
    assert job.seatings(1) == 1
