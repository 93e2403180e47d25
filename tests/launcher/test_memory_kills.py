"""Out-of-memory kills, from kernel files laid out as in cgroup v2 and v1, and once for real."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.launcher.processes import CGROUPS, SETTLED_S, MemoryKills
from tests.launcher.shell_job import ROOT, ShellJob

GROUP = "kubepods/pod1"


class Kernel:
    """A /proc and a /sys/fs/cgroup with one group, which process 7 is in."""

    def __init__(self, folder: Path, version: int, limit: str) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        group = self.cgroups / GROUP if version == 2 else self.cgroups / "memory" / GROUP
        group.mkdir(parents=True)
        (self.proc / "7").mkdir(parents=True)
        unified = f"0::/{GROUP}\n" if version == 2 else "0::/\n"
        (self.proc / "7" / "cgroup").write_text(f"5:devices:/\n4:cpu,memory:/{GROUP}\n{unified}")
        self._kills = group / ("memory.events" if version == 2 else "memory.oom_control")
        (group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(f"{limit}\n")
        self.count(0)

    def count(self, kills: int) -> None:
        self._kills.write_text(f"oom 9\noom_kill {kills}\noom_group_kill 0\n")


@pytest.mark.parametrize("version", [1, 2])
def test_counted_kill_is_reported_once(tmp_path: Path, version: int) -> None:
    kernel = Kernel(tmp_path, version, str(3 << 29))
    kills = MemoryKills(kernel.proc, kernel.cgroups)
    kills.watch("worker_0", 7)
    assert kills.cause("worker_0") == "", "another user's kill -9"
    kernel.count(1)
    assert kills.cause("worker_0") == "out of memory (the kernel's limit for its control group, 1.50 GiB)"
    assert kills.cause("worker_0") == "", "one kill has one victim"


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_named_without_a_limit_of_its_own(tmp_path: Path, limit: str) -> None:
    kernel = Kernel(tmp_path, 2, limit)
    kills = MemoryKills(kernel.proc, kernel.cgroups)
    kills.watch("worker_0", 7)
    kernel.count(1)
    assert kills.cause("worker_0") == "out of memory (the kernel's choice: its control group has no limit of its own)"


def test_earlier_kill_explains_no_later_death(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2, "1000000")
    kills = MemoryKills(kernel.proc, kernel.cgroups)
    kills.watch("worker_0", 7)
    kernel.count(1)  # a DataLoader's worker
    kills.look(1000.0)
    kills.look(1000.0 + SETTLED_S)
    assert kills.cause("worker_0") == ""


def test_kill_is_counted_before_its_victim_is_gone(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2, "1000000")
    kills = MemoryKills(kernel.proc, kernel.cgroups)
    kills.watch("worker_0", 7)
    kernel.count(1)
    kills.look(1000.0)
    kills.look(1000.1)
    assert kills.cause("worker_0") != "", "its memory was still being freed"


def test_nothing_is_guessed_without_kernel_files(tmp_path: Path) -> None:
    kills = MemoryKills(tmp_path, tmp_path)
    kills.watch("worker_0", 7)
    assert kills.cause("worker_0") == kills.cause("never_seen") == ""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """Return a control group with a limit of 1 GiB below this process's own, or skip the test."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    folder = CGROUPS / "memory" / paths["memory"][1:] if "memory" in paths else CGROUPS / paths.get("", "/")[1:]
    group = next(folder / f"samebits-{os.getpid()}-{number}" for number in itertools.count())
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if "memory" in paths else "memory.max")).write_text(str(1 << 30))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    yield group
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    group.rmdir()


def test_worker_killed_for_its_memory_is_reported_as_such(job: ShellJob, limited_group: Path) -> None:
    script = job.folder / "train.py"
    script.write_text(
        "import os, sys, time\nheld = bytearray(2 << 30) if os.environ['NODE_ID'] == '1' else None\ntime.sleep(600)\n"
    )
    line = f"echo $$ > '{limited_group}/cgroup.procs' && exec bash '{ROOT}/scripts/run.sh' train.py"
    shell = job.shell("bash", "-c", line, **{**job.settings, "WORKER_NUM": "2"})
    said = shell.wait_for(r"samebits: worker 1 \(pid \d+\) was killed by signal 9 .*\n")[0]
    assert "(SIGKILL): out of memory (the kernel's limit for its control group, 1.00 GiB)" in said
    shell.process.send_signal(2)
    assert shell.end() == 78, shell.text
