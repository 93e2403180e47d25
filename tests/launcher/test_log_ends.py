"""The reason for a process's end, as read from its log, without later lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.launcher.logs import LogEnds
from samebits.launcher.processes import Death
from samebits.tracebacks import Failure

THREAD = """\
Exception in thread feeder:
Traceback (most recent call last):
  File "/job/train.py", line 70, in feed
    raise RuntimeError("a fault")
RuntimeError: a fault
2026-11-26 03:00:00 samebits worker 2 rank 2, step 9: its thread feeder failed at train.py:70: RuntimeError: a fault
"""
MAIN = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in f\n    f()\nValueError: no\n'


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (THREAD, 3, ""),
        (MAIN, 1, Failure("ValueError: no", "train.py:9")),
        (THREAD + MAIN, 1, Failure("ValueError: no", "train.py:9")),
        (MAIN + THREAD, 1, Failure("ValueError: no", "train.py:9")),
        (THREAD + "cannot open /data: no such file\n", 3, "cannot open /data: no such file"),
        (MAIN + "samebits: the seat is another's\n", 76, "the seat is another's"),
        ("loss 0.3\n", 3, ""),
        (MAIN, 0, ""),
    ],
)
def test_last_error_in_a_log(tmp_path: Path, text: str, status: int, said: Failure | str) -> None:
    logs = LogEnds(tmp_path)
    log = tmp_path / "worker_2.log"
    log.write_text(MAIN)
    logs.begin("worker_2")  # the existing content is an earlier process's
    with log.open("a") as file:
        file.write(text)
    assert logs.cause("worker_2", Death(status=status), Path("/job")) == said
