"""``python train.py`` without any setting: a world of one, killed and resumed, ends with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import PATIENCE, environment_of_tests

SCRIPT = Path(__file__).with_name("alone_script.py")

pytestmark = pytest.mark.system


def started(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, SCRIPT, *words],
        cwd=folder,
        env=environment_of_tests(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )


def test_script_alone_trains_to_its_end_and_says_how_to_use_more_workers(tmp_path: Path) -> None:
    done = started(tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.partition(" [")[0] for line in done.stdout.splitlines()] == ["from step 0", "final 20"]
    assert done.stderr.count("training with one worker, in this process; `") == 1
    assert re.search(r"samebits run \S*alone_script\.py` trains with more", done.stderr)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt_of_rank", "recovery"]


@pytest.mark.thorough
def test_killed_script_resumes_from_its_newest_point_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed = started(tmp_path / "undisturbed")
    killed = started(tmp_path / "killed", "--die", "13")
    assert killed.returncode == -9, killed.stderr
    again = started(tmp_path / "killed")
    assert again.returncode == 0, again.stderr
    first, last = again.stdout.splitlines()
    assert first == "from step 10"
    assert last == undisturbed.stdout.splitlines()[-1]
