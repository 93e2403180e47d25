"""Available memory: the machine's, or less if the container has less."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.store.checkpoint.memory_buffer import available_bytes

MIB = 1024 * 1024


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    8192 kB\nBuffers: 1 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job/rank\n")
    return tmp_path / "proc"


def group(folder: Path, limit: str, used: int, file_pages: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {file_pages}\nactive_file 0\n")


def test_without_cgroups_it_is_the_machines(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 8 * MIB
    group(tmp_path / "groups" / "job" / "rank", "max", 5 * MIB)
    assert available_bytes(proc, tmp_path / "groups") == 8 * MIB


def test_tightest_cgroup_counts_without_its_cached_files(proc: Path, tmp_path: Path) -> None:
    group(tmp_path / "groups" / "job" / "rank", str(7 * MIB), 5 * MIB, file_pages=3 * MIB)
    assert available_bytes(proc, tmp_path / "groups") == 5 * MIB
    group(tmp_path / "groups" / "job", str(6 * MIB), 5 * MIB)
    assert available_bytes(proc, tmp_path / "groups") == 1 * MIB


def test_unknown_without_any_source(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None


def test_this_machine_gives_a_value() -> None:
    available = available_bytes()
    assert available is None or available > 0
