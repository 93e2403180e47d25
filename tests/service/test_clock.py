"""The clock that a journal's seconds come from: one boot's, as this process sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samebits.service import clock

UNSHIFTED = "monotonic           0         0\nboottime            0         0\n"


def offsets(folder: Path, text: str) -> Path:
    (folder / "timens_offsets").write_text(text)
    return folder


def test_clock_id_is_equal_in_processes_that_see_the_same_clock(tmp_path: Path) -> None:
    assert clock.boot_id() == clock.boot_id()
    plain = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert clock.boot_id(offsets(tmp_path, UNSHIFTED)) == plain
    assert clock.boot_id(tmp_path / "older kernel") == plain


def test_shifted_clock_has_another_id(tmp_path: Path) -> None:
    shifted = UNSHIFTED.replace("boottime            0", "boottime       864000")
    assert clock.boot_id(offsets(tmp_path, shifted)) == f"{clock.boot_id(tmp_path / 'none')}+864000.0"
    only_other = UNSHIFTED.replace("monotonic           0", "monotonic      864000")
    assert clock.boot_id(offsets(tmp_path, only_other)) == clock.boot_id(tmp_path / "none")


def test_process_with_a_shifted_clock_reports_another_id() -> None:
    program = "from samebits.service import clock; print(clock.boot_id())"
    unshared = ["unshare", "--time", "--boottime", "1000", "--fork", sys.executable, "-c", program]
    done = subprocess.run(unshared, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"time namespaces are needed: {done.stderr.strip()}")
    assert done.stdout.strip() == f"{clock.boot_id()}+1000.0"
