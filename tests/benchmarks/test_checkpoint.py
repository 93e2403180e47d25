"""Figures of the checkpoint benchmark, its check of available space, and one small complete run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.checkpoint import (
    DISK_STATES,
    SHARED_MEMORY_STATES,
    SIZES,
    SPARE_BYTES,
    free_bytes,
    is_in_memory,
    order,
    too_small,
)
from benchmarks.checkpoint_report import (
    CORES,
    DISK,
    GIB,
    LOADING,
    MEMCPY,
    MEMORY,
    OURS,
    PEERS,
    SAVING,
    Samples,
    people,
    report,
    size_in_bytes,
)
from benchmarks.processes import REPOSITORY
from benchmarks.report import problems


def some_samples() -> Samples:
    """Three rounds on a machine that slows down; SameBits always takes 1.2, 1.5, 2 and 1.1 times the floor."""
    samples = Samples()
    for slowness in (1.0, 3.0, 10.0):
        for number, way in enumerate(SAVING, start=1):
            seconds = {"blocked_s": number * slowness, "durable_s": number * slowness}
            samples.saves[way].append({**seconds, "writer_cpu_s": 0.0, "cpu_s": 0.25})
        samples.saves[OURS][-1] = {
            "blocked_s": 1.2 * slowness,
            "durable_s": 2 * 1.5 * slowness,
            "writer_cpu_s": 0.5,
            "cpu_s": 0.75,
        }
        for way in LOADING:
            samples.loads[way].append({"load_s": 2 * slowness if way == OURS else slowness})
        samples.memory[MEMCPY].append({"load_s": slowness})
        samples.memory[MEMORY].append({"load_s": 1.1 * slowness})
        for (_, cores), found in samples.training.items():
            lost = 0.9 if cores == "spare" else 0.6
            found.append({"during_per_s": lost / slowness, "undisturbed_per_s": 1 / slowness})
    return samples


def test_ratio_compares_within_a_round() -> None:
    document = report({"64MB": some_samples(), "2GB": some_samples()}).document()
    assert problems(document) == []
    for size in ("64MB", "2GB"):
        ratios = document["ratios"][size]
        shown = {name: ratios[name] for name in ("blocked", "durable", "load", "memory", "steps_spare", "steps_shared")}
        assert shown == pytest.approx(
            {"blocked": 1.2, "durable": 1.5, "load": 2, "memory": 1.1, "steps_spare": 0.9, "steps_shared": 0.6}
        )
        assert ratios["peers"]["torch_save"]["blocked"] == pytest.approx(3)
        assert ratios["floor"] == pytest.approx({"steps_spare": 0.9, "steps_shared": 0.6})
    assert document["ours"]["2GB"]["writer_cpu_s_per_gib"] == 0.25
    assert document["ours"]["64MB"]["cpu_s_per_gib"] == 12
    assert document["floor"]["64MB"] == {"state_bytes": 64 * 1024**2, "memcpy_s": 3, "write_fsync_s": 6}


def test_peer_that_is_not_installed_is_missing() -> None:
    samples = some_samples()
    samples.saves["safetensors"] = samples.loads["safetensors"] = []
    document = report({"64MB": samples}).document()
    assert document["peers"]["safetensors"] == "missing"
    assert "safetensors" not in document["ratios"]["64MB"]["peers"]
    (line,) = [line for line in people({"64MB": samples}).splitlines() if line.startswith("safetensors")]
    assert line.split()[-1] == "missing"


def test_steps_during_an_instant_save_are_unknown() -> None:
    samples = some_samples()
    samples.training[OURS, "spare"] = [{"during_per_s": None, "undisturbed_per_s": 100.0}]
    document = report({"64MB": samples}).document()
    assert document["ratios"]["64MB"]["steps_spare"] is None


def test_table_shows_every_way() -> None:
    shown = people({"64MB": some_samples()})
    assert "1.20" in shown
    assert len([line for line in shown.splitlines() if line.startswith("SameBits")]) == 2


@pytest.mark.parametrize("ways", [SAVING, LOADING])
def test_each_contestant_takes_every_place(ways: tuple[str, ...]) -> None:
    rounds = [order(ways, number) for number in range(len(ways))]
    for place in range(len(ways)):
        assert Counter(one[place] for one in rounds) == Counter(ways)


@pytest.mark.parametrize(("text", "expected"), [("64MB", 64 * 1024**2), ("2GB", 2 * 1024**3), ("1MB", 1024**2)])
def test_sizes_are_powers_of_1024(text: str, expected: int) -> None:
    assert size_in_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "64", "0MB", "MB", "-1MB", "1.5GB", "64mb", "64 MB"])
def test_other_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number and MB or GB"):
        size_in_bytes(text)


def test_place_that_is_too_small_is_named() -> None:
    state_bytes = max(map(size_in_bytes, SIZES))
    free = {"disk": DISK_STATES * state_bytes + SPARE_BYTES, "memory": 2**50, "/dev/shm": 2**50}
    assert too_small(state_bytes, free) == []
    (one,) = too_small(state_bytes, {**free, "disk": free["disk"] - 1})
    assert one.startswith("disk: ")
    (one,) = too_small(state_bytes, {**free, "/dev/shm": GIB})
    assert one == f"/dev/shm: 1.0 GiB are free, {2 * SHARED_MEMORY_STATES + 0.25:.1f} GiB are needed"


def test_free_space_is_known(tmp_path: Path) -> None:
    assert all(size_bytes > 0 for size_bytes in free_bytes(tmp_path).values())


def test_folder_in_memory_is_recognised() -> None:
    assert is_in_memory(Path("/dev/shm"))
    assert is_in_memory(Path("/dev/shm/below/it"))
    assert not is_in_memory(Path("/proc"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.checkpoint", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)


def test_folder_in_memory_is_refused() -> None:
    shown = run("--directory", "/dev/shm")
    assert shown.returncode == 2
    assert "/dev/shm lies in memory" in shown.stderr


@pytest.mark.system
def test_small_run_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    if is_in_memory(tmp_path):
        pytest.skip(f"{tmp_path} lies in memory: set TMPDIR to a folder on a disk")
    shown = run("--size", "1MB", "--rounds", "1", "--directory", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout.splitlines()[-1])
    assert problems(document) == []
    assert document["floor"]["1MB"]["write_fsync_s"] > 0
    assert document["peers"].keys() == set(PEERS)
    ratios = document["ratios"]["1MB"]
    assert all(ratios[name] is not None for name in ("blocked", "durable", "load", "memory"))
    assert {f"steps_{cores}" for cores in CORES} <= ratios.keys()
    assert DISK in SAVING
    assert list(tmp_path.iterdir()) == []
