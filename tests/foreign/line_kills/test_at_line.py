"""A script dies when it is about to execute the line for that time, and only once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.foreign.line_kills import at_line
from tests.system.processes import REPOSITORY, environment_of_tests

SCRIPT = """\
import sys


def double(value):
    print("double", value, flush=True)
    return 2 * value


for value in range(4):
    double(value)
print("end", sys.argv[1:])
"""


def run(folder: Path, node: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, at_line.__file__, str(folder / "script.py"), str(folder), *words, "--", "-x"]
    environment = environment_of_tests() | {"NODE_ID": node}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_kill_happens_once_before_the_given_execution_of_the_line(tmp_path: Path) -> None:
    kill = "1:6:3"
    assert run(tmp_path, "0", kill).returncode == 0, "it is another node's"
    killed = run(tmp_path, "1", kill)
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout.splitlines() == ["double 0", "double 1", "double 2"]
    again = run(tmp_path, "1", kill)
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1] == "end ['-x']"
    assert '"6": 4' in at_line.counts_path(tmp_path, "1").read_text()
