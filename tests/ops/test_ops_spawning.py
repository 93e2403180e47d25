"""The shell text that recover.sh evaluates: read back by a real shell, whatever the job was started with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from runtime.ops.kept_start import KeptStart
from runtime.ops.recover import shell_text
from runtime.ops.recovering import Recovery

AWKWARD = "a 'b' \"c\" $HOME `id` $(id) \\ * \n!é"


def test_a_shell_reads_back_what_was_kept(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "folder"'
    folder.mkdir()
    kept = KeptStart(
        folder, "/v/python", AWKWARD, ("", AWKWARD, "--x=1"), {"DATA_PATH": AWKWARD, "OMP_NUM_THREADS": "1"}
    )
    text = shell_text(kept, Recovery(start=("scheduler", "worker_3")), {"DATA_PATH": "other", "MS_WORKER_NUM": "9"})
    show = (
        "import json, os, sys; print(json.dumps([os.getcwd(), os.environ.get('DATA_PATH'), "
        "os.environ.get('MS_WORKER_NUM'), sys.argv[1:]]))"
    )
    script = 'eval "$1"; exec "$2" -c "$3" "$interpreter" "$script" "${args[@]}" "${gone[@]}"'
    done = subprocess.run(
        ["bash", "-euc", script, "test", text, sys.executable, show],
        env={"MS_WORKER_NUM": "9", "DATA_PATH": "other", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    cwd, data_path, worker_num, words = json.loads(done.stdout)
    assert (cwd, data_path, worker_num) == (str(folder), AWKWARD, None)
    assert words == ["/v/python", AWKWARD, "", AWKWARD, "--x=1", "scheduler", "worker_3"]


def test_nothing_to_start_is_an_empty_list_and_nothing_to_follow_ends_the_script(tmp_path: Path) -> None:
    kept = KeptStart(tmp_path, "python", "train.py", (), {})
    script = 'eval "$1"; echo "${#gone[@]} ${#args[@]}"'
    for recovery, expected in ((Recovery(), "0 0\n"), (Recovery(over=True), "")):
        text = shell_text(kept, recovery, {})
        words = ["bash", "-euc", script, "test", text]
        assert subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout == expected
