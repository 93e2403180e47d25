"""Torch's own analyser reads the files, and finds the rank that never came into a collective or is in another one."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.ops import flight_recorder
from runtime.store.collective_ring import Contents, Launched, RingGroup

WORLD = RingGroup("0", "default_pg", (0, 1, 2))
PAIR = RingGroup("3", "pairs", (0, 2))


def launched(
    number: int, op: str = "all_reduce", *, group: RingGroup = WORLD, size: int = 8, over: bool = True
) -> Launched:
    out = size * (len(group.ranks) if op == "all_gather" else 1)
    return Launched(
        number, number + 1, op, group, (size,), "float32", (out,), "float32", 10**18, 10**18 + 5 if over else None
    )


def write(folder: Path, *ranks: list[Launched]) -> Path:
    for rank, ones in enumerate(ranks):
        flight_recorder.keep(folder, Contents(rank, len(ranks), tuple(ones), (WORLD,)))
    return folder


def analysed(folder: Path) -> str:
    """What ``torchfrtrace`` says; in a process of its own, since it sets torch's logging."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-v"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_rank_that_is_missing_is_found(tmp_path: Path) -> None:
    before = [launched(0, "broadcast"), launched(1, "all_gather"), launched(2, "barrier")]
    waits = [*before, launched(3, over=False)]
    said = analysed(write(tmp_path / "fr", waits, before, waits))
    assert "Not all ranks joining collective, sequence number: 4" in said
    assert "missing ranks: {1}" in said and "collective: gloo:all_reduce" in said
    for file in (tmp_path / "fr").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ones", "text"),
    [
        ([launched(0), launched(1, "broadcast", over=False)], "does not match found collective type: 'broadcast'"),
        ([launched(0), launched(1, size=9, over=False)], "does not match found input sizes: '[[9]]'"),
    ],
)
def test_the_rank_that_does_something_else_is_found(tmp_path: Path, ones: list[Launched], text: str) -> None:
    waits = [launched(0), launched(1, over=False)]
    said = analysed(write(tmp_path / "fr", waits, ones, waits))
    assert "Collective sequence number: 2 has errors" in said and "Culprit rank 1" in said and text in said


def test_a_subgroup_has_its_own_ranks(tmp_path: Path) -> None:
    found = flight_recorder.dump_of(Contents(0, 3, (launched(0, group=PAIR),), (WORLD, PAIR)))
    assert found["pg_config"]["3"] == {"name": "3", "desc": "pairs", "ranks": "[0, 2]"}
    assert found["entries"][0]["process_group"] == ("3", "pairs")
