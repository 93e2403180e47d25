"""The reason for a process's end, as read from its log, without later lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.core.causes.table import DEFAULT as TABLE
from samebits.core.causes.table import Observation, Retry
from samebits.launcher.processes import Death
from samebits.launcher.worker_logs import LogEnds
from samebits.tracebacks import Failure

THREAD = """\
Exception in thread feeder:
Traceback (most recent call last):
  File "/job/train.py", line 70, in feed
    raise RuntimeError("a fault")
RuntimeError: a fault
2026-11-26 03:00:00 samebits worker 2 rank 2, step 9: its thread feeder failed at train.py:70: RuntimeError: a fault
"""
ABORTED = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size
Fatal Python error: Aborted

Thread 0x00007f2a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Thread 0x00007f1b (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 80 in all_reduce
  File "/job/train.py", line 20 in train
"""
OTHER_SIZE = (
    "at train.py:20 in train: a collective received 8 bytes where this rank expects 4: the ranks call different "
    "collectives there, or give tensors of different sizes"
)
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


def test_crash_in_compiled_code_names_the_scripts_line(tmp_path: Path) -> None:
    (tmp_path / "worker_2.log").write_text(THREAD + ABORTED)
    logs = LogEnds(tmp_path)
    assert logs.cause("worker_2", Death(signal=6), Path("/job")) == OTHER_SIZE
    assert TABLE.of(Observation(signal=6, error=OTHER_SIZE)).retry is Retry.ONCE, "else it is tried for ever"
    (tmp_path / "worker_2.log").write_text(ABORTED[ABORTED.index("Fatal") :])
    assert logs.cause("worker_2", Death(signal=6), Path("/job")) == "at train.py:20 in train: Aborted"
