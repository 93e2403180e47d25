"""The order of the windows, and their figures."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import pytest

from benchmarks.consistency import LOADS
from benchmarks.defaults import BLOCKS
from benchmarks.processes import REPOSITORY
from benchmarks.report import problems
from benchmarks.steady_state import (
    AGAIN,
    CONTESTANTS,
    COPYING,
    OURS,
    PLAIN,
    WORKLOADS,
    Window,
    Windows,
    Workload,
    people,
    report,
)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_each_contestant_runs_once_per_round_and_equally_often_in_every_place(workload: Workload) -> None:
    rounds = workload.rounds
    assert all(sorted(order) == sorted(CONTESTANTS) for order in rounds)
    for place in range(len(CONTESTANTS)):
        assert set(Counter(order[place] for order in rounds).values()) == {len(rounds) / len(CONTESTANTS)}


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_there_are_enough_pairs(workload: Workload) -> None:
    assert workload.blocks * len(workload.rounds) >= 11


def some_windows(rates: Iterable[tuple[float, float, float]]) -> Windows:
    windows = Windows()
    for plain, ours, again in rates:
        windows.by_contestant[PLAIN].append(Window(plain, 16))
        windows.by_contestant[OURS].append(Window(ours, 18))
        windows.by_contestant[AGAIN].append(Window(again, 17))
    windows.alone.append(Window(300, 8))
    windows.held_bytes = {PLAIN: [100, 110], AGAIN: [90, 100], OURS: [120, 130], COPYING: [300, 300]}
    return windows


def test_report_compares_windows_of_one_round() -> None:
    rates = ((100, 98, 100), (50, 45, 55), (200, 200, 190), (10, 9.9, 10), (80, 80, 80))
    windows = some_windows(rates)
    assert windows.ratios(OURS) == pytest.approx([0.98, 0.9, 1.0, 0.99, 1.0])
    document = report({"mlp": windows}).document()
    assert problems(document) == []
    assert document["ours"] == {
        "steps_per_s": 80,
        "cpu_per_step_ms": 18,
        "memory_overhead_bytes": 25,
        "memory_overhead_copying_bytes": 200,
    }
    assert document["floor"]["without_communication_steps_per_s"] == 300
    ratios = document["ratios"]
    assert ratios["steps_vs_plain_ddp"] == pytest.approx(0.98)
    assert ratios["plain_ddp_vs_plain_ddp"] == pytest.approx(1.0)
    assert ratios["steps_vs_plain_ddp_of_plain_ddp"] == pytest.approx(0.98)
    assert ratios["cpu_vs_plain_ddp"] == pytest.approx(1.125)
    assert "0.980 (wanted: 0.99 or more)" in people({"mlp": windows})
    state = WORKLOADS["mlp"].state_bytes
    assert f"wanted: {1.2 * state / 2**20 + 32:.1f} MiB or less" in people({"mlp": windows})


def test_figures_of_both_workloads_are_reported_side_by_side() -> None:
    document = report({"mlp": some_windows([(100, 90, 100)]), "transformer": some_windows([(1, 0.8, 1)])}).document()
    assert problems(document) == []
    assert document["ratios"]["steps_vs_plain_ddp"] == pytest.approx(0.9)
    assert document["ratios"]["steps_vs_plain_ddp_transformer"] == pytest.approx(0.8)
    assert document["ours"]["transformer_steps_per_s"] == 0.8
    assert document["peers"]["plain_ddp"]["steps_per_s"] == 100


@pytest.mark.system
def test_workload_has_its_stated_size() -> None:
    program = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "from benchmarks.workers.steady_state import MODELS\n"
        "for name, model in MODELS.items():\n"
        "    print(name, sum(p.nbytes for p in model(lambda module: module).model.parameters()))"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    weights = {name: int(size) for name, size in map(str.split, shown.stdout.splitlines())}
    assert weights.keys() == BLOCKS.keys() == LOADS.keys() and 3e6 < weights["wide"] / 4 < 3.1e6
    copies = {"mlp": 2, "transformer": 3}
    assert {name: one.state_bytes for name, one in WORKLOADS.items()} == {
        name: count * weights[name] for name, count in copies.items()
    }
