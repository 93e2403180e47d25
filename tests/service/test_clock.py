"""Which clock a journal's seconds were read from: a boot's, as this process sees it."""

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


def test_it_is_one_in_all_processes_that_see_the_same_clock(tmp_path: Path) -> None:
    assert clock.boot_id() == clock.boot_id()
    plain = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert clock.boot_id(offsets(tmp_path, UNSHIFTED)) == plain
    assert clock.boot_id(tmp_path / "older kernel") == plain


def test_a_clock_that_is_shifted_is_another_one(tmp_path: Path) -> None:
    shifted = UNSHIFTED.replace("boottime            0", "boottime       864000")
    assert clock.boot_id(offsets(tmp_path, shifted)) == f"{clock.boot_id(tmp_path / 'none')}+864000.0"
    only_other = UNSHIFTED.replace("monotonic           0", "monotonic      864000")
    assert clock.boot_id(offsets(tmp_path, only_other)) == clock.boot_id(tmp_path / "none")


def test_a_process_with_a_shifted_clock_says_so() -> None:
    program = "from samebits.service import clock; print(clock.boot_id())"
    unshared = ["unshare", "--time", "--boottime", "1000", "--fork", sys.executable, "-c", program]
    done = subprocess.run(unshared, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"time namespaces are needed: {done.stderr.strip()}")
    assert done.stdout.strip() == f"{clock.boot_id()}+1000.0"
