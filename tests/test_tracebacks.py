"""Parsing tracebacks: the error, and the deepest line that is the script's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samebits.tracebacks import Failure, failure_in, place_in_dump

HERE = Path("/home/me/work")
TORCH = "/home/me/work/.venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"


def traceback(*frames: tuple[str, int], error: str, head: str = "Traceback") -> str:
    lines = [f'  File "{file}", line {line}, in train\n    something(with_words)\n' for file, line in frames]
    return f"{head} (most recent call last):\n{''.join(lines)}{error}\n"


PLAIN = traceback(("/home/me/work/train.py", 88), error="ValueError: the loss is nan")
IN_TORCH = traceback(
    ("/home/me/work/train.py", 12),
    ("/home/me/work/models/net.py", 7),
    ("/usr/lib/python3.11/contextlib.py", 81),
    (TORCH, 701),
    ("<frozen importlib._bootstrap>", 241),
    error="RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
)
IN_DATALOADER = traceback(
    ("/home/me/work/train.py", 12),
    (TORCH, 1480),
    error="ValueError: Caught ValueError in DataLoader worker process 0.",
) + traceback(
    (TORCH, 358), ("/home/me/work/data/sets.py", 23), error="ValueError: no such sample", head="Original Traceback"
)
COLLATE = traceback(
    ("/home/me/work/train.py", 12), (TORCH, 1480), error="RuntimeError: Caught RuntimeError in DataLoader worker 0."
) + traceback((TORCH, 358), error="RuntimeError: stack expects each tensor to be equal size", head="Original Traceback")
NAN = Failure("ValueError: the loss is nan", "train.py:88")
CHAINED = (
    traceback(("/home/me/work/a.py", 1), error="KeyError: 'RANK'")
    + "\nDuring handling of the above exception, another exception occurred:\n\n"
    + traceback(("/home/me/work/b.py", 2), error="RuntimeError: no rank")
)
IN_THREAD = "Exception in thread feeder:\n" + CHAINED
IGNORED = "Exception ignored in: <function Net.__del__ at 0x7f>\n" + PLAIN
SYNTAX = "  File \"/home/me/work/train.py\", line 3\n    def f(\n         ^\nSyntaxError: '(' was never closed\n"
IMPORTED_SYNTAX = (
    'Traceback (most recent call last):\n  File "/home/me/work/train.py", line 1, in <module>\n    import sets\n'
    '  File "/home/me/work/sets.py", line 5\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, NAN),
        (
            IN_TORCH,
            Failure("RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", "models/net.py:7"),
        ),
        (IN_DATALOADER, Failure("ValueError: no such sample", "data/sets.py:23")),
        (COLLATE, Failure("RuntimeError: stack expects each tensor to be equal size", "train.py:12")),
        (CHAINED, Failure("RuntimeError: no rank", "b.py:2")),
        (IN_THREAD + IGNORED, None),
        (PLAIN + IN_THREAD + IGNORED, NAN),
        (IN_THREAD + PLAIN, NAN),
        (SYNTAX, Failure("SyntaxError: '(' was never closed", "train.py:3")),
        (IMPORTED_SYNTAX, Failure("SyntaxError: invalid syntax", "sets.py:5")),
        (traceback(("/else/x.py", 4), error="KeyboardInterrupt"), Failure("KeyboardInterrupt", "/else/x.py:4")),
        (traceback((TORCH, 4), error="mine.NoMessage"), Failure("mine.NoMessage")),
        (
            traceback(("/home/me/work/t.py", 4), error="RuntimeError: Error(s) in loading Net:\n\tMissing key(s): 'a'"),
            Failure("RuntimeError: Error(s) in loading Net: Missing key(s): 'a'", "t.py:4"),
        ),
        (CHAINED + "epoch 1 step 3 loss 0.1\n" + PLAIN + "leaked semaphore\n", NAN),
        (PLAIN.replace("    something", "epoch 1 step 20 loss 0.3\n    something"), NAN),
        ("Train Epoch: 3 [0/60000] Loss: 2.29\n", None),
        ('Current thread 0x1 (most recent call first):\n  File "/home/me/work/train.py", line 3 in f\nAborted\n', None),
        ("", None),
    ],
)  # fmt: skip
def test_error_and_the_scripts_own_deepest_line(text: str, expected: Failure | None) -> None:
    assert failure_in(text, HERE) == expected


def test_failure_in_words() -> None:
    assert str(Failure("ValueError: no", "train.py:88")) == "failed at train.py:88: ValueError: no"
    assert str(Failure("ValueError: no")) == "failed: ValueError: no"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import json\n\njson.loads('{')\n", "failed at train.py:3: json.decoder.JSONDecodeError: Expecting property"),
        ("import torhc\n", "failed at train.py:1: ModuleNotFoundError: No module named 'torhc'"),
        ("x = 1\ndef f(:\n    pass\n", "failed at train.py:2: SyntaxError: invalid syntax"),
        ("if True:\nx = 1\n", "failed at train.py:2: IndentationError: expected an indented block"),
        ("def f(n):\n    return f(n + 1)\n\n\nf(0)\n", "failed at train.py:2: RecursionError: maximum recursion"),
    ],
)
def test_output_of_this_python_is_parsed(tmp_path: Path, script: str, expected: str) -> None:
    (tmp_path / "train.py").write_text(script)
    ended = subprocess.run([sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=60)
    assert str(failure_in(ended.stderr, tmp_path)).startswith(expected), ended.stderr


def test_main_threads_position_is_read_from_faulthandlers_output() -> None:
    dump = (
        "Thread 0x00007f87795bf6c0 (most recent call first):\n"
        '  File "/job/other.py", line 3 in aside\n'
        "\n"
        "Current thread 0x00007f87b57d7b80 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
        '  File "/job/sub/train.py", line 46 in evaluate\n'
        '  File "/job/train.py", line 82 in train\n'
    )
    assert place_in_dump(dump, Path("/job")) == "sub/train.py:46 in evaluate"
    assert place_in_dump(dump, Path("/elsewhere")) == "/job/sub/train.py:46 in evaluate"
    assert place_in_dump("", Path("/job")) == place_in_dump("nonsense", Path("/job")) == ""
