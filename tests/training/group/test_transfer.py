"""A restore point over a real group: in many pieces, to several ranks at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import free_port

WAIT_S = 120.0


@pytest.mark.parametrize(
    ("way", "world_size", "expected"),
    [
        ("whole", 3, "whole"),
        ("shared", 3, "whole"),
        ("damaged", 2, "refused: a point received from another rank: piece 20 is not what was"),
    ],
)
def test_every_receiver_gets_it_unchanged_or_reports_it(
    repository: Path, way: str, world_size: int, expected: str
) -> None:
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.group.transfer_ranks", str(rank), str(world_size), port, way],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=WAIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(out.startswith(expected) for out, _ in said[1:]), said
    assert [rank.returncode for rank in ranks] == [0] * world_size, said
