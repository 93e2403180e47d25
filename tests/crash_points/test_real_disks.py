"""The scenarios on really full and read-only disks, if the kernel allows such mounts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_NAMESPACES = (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"])


def private_mounts(disk: Path) -> tuple[list[str] | None, str]:
    """Return a command prefix for private mounts, or None with the reason."""
    said = ""
    for command in _NAMESPACES:
        try:
            probe = subprocess.run(
                [*command, "mount", "-t", "tmpfs", "probe", str(disk)], capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            return None, str(error)
        if probe.returncode == 0:
            return command, ""
        said = probe.stderr.strip()
    return None, said


def test_full_and_read_only_disks_leave_the_old_or_the_new_state(tmp_path: Path, repository: Path) -> None:
    namespace, said = private_mounts(tmp_path)
    if namespace is None:
        pytest.skip(f"no mounts of our own here ({said}); test_crash_points has the refusals that need none")
    done = subprocess.run(
        [*namespace, sys.executable, "-m", "tests.crash_points.real_disks", str(tmp_path)],
        cwd=repository, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["violation"] for line in told if "violation" in line] == []
    endings = told[-1]["endings"]
    assert endings.keys() >= {"blocks left: ENOSPC", "blocks left: succeeded", "inodes left: ENOSPC"}, endings
    assert endings.keys() >= {"inodes left: succeeded", "read-only: EROFS"}, endings
    assert list(tmp_path.iterdir()) == [], "the mounts were visible outside"
