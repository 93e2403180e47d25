"""The cost of a run includes processes that have ended, and a busy machine ends no test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_times import COMPUTES, COMPUTING_ROOMS, WALL_PER_CPU

ORPHAN = """
import os, select, subprocess, sys
from tests import cpu_times

floor = cpu_times.Floor()
before = floor.sentence()
ended, ends = os.pipe()
burns = "import time\\nwhile time.process_time() < 1.5: pass"
subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, burns], pass_fds=[ends], check=True)
os.close(ends)
select.select([ended], [], [])  # the orphan has ended: no process holds the other end
floor.reap()
print(before, floor.sentence(), sep="\\n")
"""

LIMIT_S = 0.3
LIMITED = f"""
import subprocess, sys, threading, time
import pytest
from tests import cpu_times
cpu_times.WALL_PER_CPU = 1000  # however busy this machine is, the computation has its CPU-seconds first

def test_a_job_on_a_busy_machine():
    time.sleep(5 * {LIMIT_S})

def test_a_process_without_end():
    subprocess.run([sys.executable, "-c", "while True: pass"])

@pytest.mark.computes
def test_a_computation_on_a_busy_machine():
    time.sleep(5 * {LIMIT_S})  # as if others had the cores

@pytest.mark.computes
def test_a_computation_without_end():
    cpu_times.WALL_PER_CPU = {WALL_PER_CPU}  # for the next test
    while True: pass

@pytest.mark.computes
def test_a_wait_without_end():
    threading.Event().wait()

def test_a_process_that_does_not_answer():
    threading.Event().wait()
"""


def test_usage_of_an_orphan_of_an_orphan_is_counted(repository: Path) -> None:
    command = [sys.executable, "-c", ORPHAN]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120, check=True)
    before, after = (int(line.split()[0]) for line in done.stdout.splitlines())
    assert after - before >= 1
    assert re.fullmatch(r"\d+ CPU-seconds: \d+ s is the floor of a run on \d+ idle cores", done.stdout.splitlines()[1])


def test_test_is_limited_by_its_cpu_usage_and_by_a_generous_clock(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "test_limited.py").write_text(LIMITED)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(repository / "pyproject.toml")]
    command += ["--timeout", str(LIMIT_S), "-p", "no:cacheprovider", "-q", str(tmp_path)]
    wide = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=repository, env=wide, capture_output=True, text=True, timeout=120, check=False)
    ended = dict(re.findall(r"^FAILED .*::(\w+) - Failed: (.*)$", done.stdout, re.MULTILINE))
    assert ended == {
        "test_a_process_without_end": f"the test and its processes used more than {LIMIT_S} CPU-seconds",
        "test_a_computation_without_end": f"the test used more than {LIMIT_S} CPU-seconds",
        "test_a_wait_without_end": f"Timeout (>{LIMIT_S * WALL_PER_CPU}s) from pytest-timeout.",
        "test_a_process_that_does_not_answer": f"Timeout (>{LIMIT_S * WALL_PER_CPU}s) from pytest-timeout.",
    }
    assert done.stdout.rstrip().splitlines()[-1].startswith("4 failed, 2 passed"), done.stdout


def test_every_test_of_these_folders_computes(repository: Path, request: pytest.FixtureRequest) -> None:
    """Check the tests of this run that are in these folders."""
    rooms = [repository / "tests" / room for room in COMPUTING_ROOMS]
    assert all(room.is_dir() for room in rooms)
    tests = [item for item in request.session.items if set(rooms) & set(item.path.parents)]
    assert [item.nodeid for item in tests if item.get_closest_marker(COMPUTES) is None] == []
