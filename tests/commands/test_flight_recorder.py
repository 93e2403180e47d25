"""Torch's own analyser reads our files and finds the rank missing from a collective or in another one."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.commands import stack
from samebits.store.collective_ring import RECORDS, Launched, LaunchLine, RecordedCollectives, RingGroup

WORLD = RingGroup("0", "default_pg", (0, 1, 2))
PAIR = RingGroup("3", "pairs", (0, 2))


def launched(
    number: int,
    op: str = "all_reduce",
    *,
    sequence: int = 0,
    group: RingGroup = WORLD,
    size: int = 8,
    over: bool = True,
) -> Launched:
    out = size * (len(group.ranks) if op == "all_gather" else 1)
    return Launched(
        *(number, sequence or number + 1, op, group, (size,), "float32", (out,), "float32", 10**18),
        10**18 + 5 if over else None,
    )


def between(number: int, op: str, peer: int, sequence: int, *, size: int = 8, over: bool = True) -> Launched:
    return Launched(
        *(number, sequence, op, WORLD, (size,), "float32", (size,), "float32", 10**18),
        *(10**18 + 5 if over else None, peer, LaunchLine("/job/pipeline.py", 31, "exchange")),
    )


def write(folder: Path, *ranks: list[Launched]) -> Path:
    for rank, ones in enumerate(ranks):
        stack.keep(folder, RecordedCollectives(rank, len(ranks), tuple(ones), (WORLD,)))
    return folder


def analysed(folder: Path) -> str:
    """Return the output of ``torchfrtrace``, run as a process because it changes torch's logging."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-v"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_missing_rank_is_found(tmp_path: Path) -> None:
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
def test_rank_in_another_collective_is_found(tmp_path: Path, ones: list[Launched], text: str) -> None:
    waits = [launched(0), launched(1, over=False)]
    said = analysed(write(tmp_path / "fr", waits, ones, waits))
    assert "Collective sequence number: 2 has errors" in said and "Culprit rank 1" in said and text in said


def test_subgroup_has_its_own_ranks(tmp_path: Path) -> None:
    found = stack.dump_of(RecordedCollectives(0, 3, (launched(0, group=PAIR),), (WORLD, PAIR)))
    assert found["pg_config"]["3"] == {"name": "3", "desc": "pairs", "ranks": "[0, 2]"}
    assert found["entries"][0]["process_group"] == ("3", "pairs")


@pytest.mark.parametrize("missing", ["", pytest.param("sender", marks=pytest.mark.thorough)])
def test_send_without_its_receive_is_found_with_the_line(tmp_path: Path, missing: str) -> None:
    """Rank 0 sends to 1 and 2, rank 1 to 2 and back. No collective is taken for a send with the same number."""
    zero = [launched(0), between(1, "send", 1, 1), between(2, "send", 2, 1), launched(1), between(4, "recv", 1, 1)]
    zero.append(between(9, "send", 1, 2, over=False))
    one = [launched(0), between(1, "recv", 0, 1), between(2, "send", 2, 1), launched(1), between(4, "send", 0, 1)]
    two = [launched(0), between(1, "recv", 1, 1), between(2, "recv", 0, 1), launched(1)]
    if missing:
        two.append(between(5, "recv", 1, 2, over=False))
    said = analysed(write(tmp_path / "fr", zero, one, two))
    assert said.count("Not all ranks joining") == (2 if missing else 1), said
    assert "sequence number: 2" in said and "group info: 0:0->1:default_pg: rank 0 to 1" in said
    assert "collective: gloo:send 0->1" in said and "missing ranks: {1}" in said
    assert "exchange at /job/pipeline.py:31" in said
    assert ("collective: gloo:recv 1<-0" in said and "group info: 0:1->2" in said) == bool(missing)


@pytest.mark.thorough
def test_send_and_receive_of_different_sizes_are_found(tmp_path: Path) -> None:
    zero, one = [between(0, "send", 1, 1, over=False)], [between(0, "recv", 0, 1, size=9, over=False)]
    assert "has errors" in (said := analysed(write(tmp_path / "fr", zero, one, []))) and "Culprit rank 1" in said


def test_records_that_other_ranks_may_have_overwritten_are_left_out(tmp_path: Path) -> None:
    """One rank sends ten times as often as the others, so its ring reaches back less far."""
    steps, sends = 1000, 4
    ranks: list[list[Launched]] = []
    for rank, (op, peer) in enumerate((("send", 1), ("recv", 0))):
        ones: list[Launched] = []
        for step in range(steps):
            ones.append(launched(len(ones), sequence=step + 1))
            ones += [between(len(ones) + at, op, peer, step * sends + at + 1) for at in range(sends)]
            if rank == 0:
                ones += [between(len(ones) + at, "send", 2, step * sends + at + 1) for at in range(sends)]
        ranks.append(ones[-RECORDS:])
    third = [
        one
        for step in range(steps)
        for one in (
            launched(step * 5, sequence=step + 1),
            *(between(step * 5 + 1 + at, "recv", 0, step * sends + at + 1) for at in range(sends)),
        )
    ]
    said = analysed(write(tmp_path / "fr", *ranks, third[-RECORDS:]))
    assert "Not all ranks" not in said and "has errors" not in said and "Culprit" not in said, said[:2000]
    only_pairs = [between(number, "send", 1, number + 1) for number in range(3)]
    for first, count in ((0, 3), (1, 0)):
        whole = RecordedCollectives(0, 3, tuple(only_pairs[first:]), (WORLD,))
        assert len(stack.dump_of(whole)["entries"]) == count
    from_anybody = Launched(*(0, 0, "recv", WORLD, (8,), "float32", (8,), "float32", 10**18, None))
    assert stack.dump_of(RecordedCollectives(0, 3, (from_anybody,), (WORLD,)))["entries"] == []
