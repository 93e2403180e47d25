"""The memory benchmark: what counts as a rank's memory, when it is sampled, and the figures above plain DDP's."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from benchmarks import memory
from benchmarks.memory import NAMES, Held, above_plain, held_bytes, measure, people, report, wanted_bytes
from benchmarks.report import problems
from benchmarks.steady_state import COPYING, KIB, MLP, OURS, PLAIN

MIB = KIB**2
SHARES = """
import mmap, os, sys
shared = mmap.mmap(-1, 64 * 1024 * 1024)
shared.write(b"1" * len(shared))
ends, begins = os.pipe()
if os.fork() == 0:
    shared.seek(0)
    assert shared.read().count(b"1") == len(shared)
    os.write(begins, b"1")
else:
    os.read(ends, 1)
    print("shared", flush=True)
sys.stdin.read()
"""


def test_memory_that_two_processes_of_a_rank_share_counts_once() -> None:
    rank = subprocess.Popen([sys.executable, "-c", SHARES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.stdin is not None and rank.stdout is not None
    try:
        assert rank.stdout.readline() == b"shared\n"
        assert 64 * MIB <= held_bytes(rank.pid) < 128 * MIB
    finally:
        rank.stdin.close()
        rank.stdout.close()
        rank.wait()
    assert held_bytes(rank.pid) == 0


def test_peak_is_the_highest_sample_during_training_and_rest_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, asked = threading.Event(), list[tuple[str, int]]()

    class Job:
        pids = (7, 8)

        def __init__(self, name: str, workload: str, start: object) -> None:
            pass

        def wait_until_ready(self) -> None:
            pass

        def run(self, kind: str, steps: int) -> None:
            asked.append((kind, steps))
            assert sampled.wait(60)

        def close(self) -> None:
            asked.append(("close", 0))

    def held(pid: int) -> int:
        is_training = not sampled.is_set()
        if pid == 8:
            sampled.set()
        return pid * (10 if is_training else 1)

    monkeypatch.setattr(memory, "Contestant", Job)
    monkeypatch.setattr(memory, "held_bytes", held)
    monkeypatch.setattr(memory, "SAMPLED_S", 0.001)
    monkeypatch.setattr(memory, "QUIET_S", 0.0)
    assert measure(OURS, MLP, 2, 24) == Held([70, 80], [7, 8])
    assert asked == [("train", 24), ("close", 0)]


STATE = MLP.state_bytes
MEASURED = {
    PLAIN: Held([100 * MIB, 102 * MIB], [100 * MIB, 100 * MIB]),
    OURS: Held([101 * MIB + 3 * STATE] * 2, [100 * MIB + 2 * STATE] * 2),
    COPYING: Held([101 * MIB + 4 * STATE] * 2, [100 * MIB + 3 * STATE] * 2),
}


def test_report_has_the_memory_above_plain_ddp_in_bytes_and_states() -> None:
    assert list(MEASURED) == list(NAMES)
    assert above_plain(MEASURED[OURS], MEASURED[PLAIN]) == (3 * STATE, 2 * STATE)
    document = report(MLP, MEASURED).document()
    assert problems(document) == []
    assert document["floor"] == {"state_bytes": STATE}
    assert document["peers"]["plain_ddp"] == {"peak_bytes": 101 * MIB, "held_bytes": 100 * MIB}
    ratios = document["ratios"]
    assert (ratios["peak_vs_state"], ratios["above_plain_vs_state"]) == (3, 2)
    assert (ratios["copying_peak_vs_state"], ratios["copying_above_plain_vs_state"]) == (4, 3)
    assert document["ours"]["above_plain_bytes"] == pytest.approx(2 * STATE, rel=1e-3)
    assert wanted_bytes(MLP) == pytest.approx(1.2 * STATE + 32 * MIB)


def test_table_shows_multiples_of_the_state() -> None:
    text = people(MLP, 2, MEASURED)
    (ours,) = [line for line in text.splitlines() if line.startswith(f"{OURS} ")]
    assert ours.split()[-4:] == ["9", "(3.00)", "6", "(2.00)"]
    assert f"wanted: {wanted_bytes(MLP) / MIB:.1f} MiB above plain DDP's or less" in text
