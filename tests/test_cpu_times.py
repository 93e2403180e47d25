"""What a run cost is counted over all it started, who started it and has ended since included."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ORPHAN = """
import os, select, subprocess, sys
from tests import cpu_times

floor = cpu_times.Floor()
before = floor.sentence()
ended, ends = os.pipe()
burns = "import time\\nwhile time.process_time() < 1.5: pass"
subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, burns], pass_fds=[ends], check=True)
os.close(ends)
select.select([ended], [], [])  # the orphan has ended: nobody holds the other end
floor.reap()
print(before, floor.sentence(), sep="\\n")
"""


def test_what_an_orphan_of_an_orphan_has_used_is_counted(repository: Path) -> None:
    command = [sys.executable, "-c", ORPHAN]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120, check=True)
    before, after = (int(line.split()[0]) for line in done.stdout.splitlines())
    assert after - before >= 1
    assert re.fullmatch(r"\d+ CPU-seconds: \d+ s is the floor of a run on \d+ idle cores", done.stdout.splitlines()[1])
