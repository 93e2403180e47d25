"""Scripts that end in every way Python has: the status seen at ``atexit`` equals the process's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import environment_of_tests

BEGINNING = """\
import atexit, contextlib, sys, threading
from sys import exit as exit_of_sys
from samebits.training.process.exit_status import ExitStatus

def say():
    print(status.find(), flush=True)

def give(code): return code
def raise_with(code): raise SystemExit(code)
def leave_with(code): sys.exit(code)

status = ExitStatus()
status.install()
atexit.register(say)
"""
CAUGHT = "try:\n    sys.exit({})\nexcept SystemExit:\n    {}\n"
MANY_NAMES = "".join(f"name_{number} = {number}.5\n" for number in range(300))
IN_A_THREAD = "thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\nthread.join()\n"
IN_A_THREAD_0 = IN_A_THREAD.replace("3", "0") + "raise_with(3)"


def ended(folder: Path, text: str, *, as_module: bool = False) -> tuple[str, int]:
    """Return what is seen of a script that ends in this way, and the status of its process."""
    script = folder / "script.py"
    script.write_text(BEGINNING + text + "\n")
    words = ["-m", script.stem] if as_module else [str(script)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment_of_tests(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.stdout.split()[-1], done.returncode


@pytest.mark.parametrize(
    "text",
    [
        "pass",
        "if __name__ == '__main__':\n    give(3)",
        "with contextlib.nullcontext():\n    give(3)",
        "sys.exit()",
        "sys.exit(give(None))",
        "sys.exit(0)",
        "quit()",
        CAUGHT.format(3, "pass"),
        IN_A_THREAD,
        "atexit._run_exitfuncs()",
    ],
)
def test_end_with_status_0_is_recognised(tmp_path: Path, text: str) -> None:
    assert ended(tmp_path, text) == ("0", 0)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("leave_with(3)", 3),
        ("exit(3)", 3),
        ("quit(3)", 3),
        ("exit_of_sys(3)", 3),
        (MANY_NAMES + "sys.exit(203)", 203),
        ("try:\n    leave_with(3)\nfinally:\n    give(0)", 3),
        ("with contextlib.nullcontext():\n    leave_with(3)", 3),
        (CAUGHT.format(3, "raise"), 3),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--unknown'])", 2),
    ],
)
def test_exit_status_is_recognised(tmp_path: Path, text: str, status: int) -> None:
    assert ended(tmp_path, text) == (str(status), status)


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "raise SystemExit(give(3))", "raise_with(3)", IN_A_THREAD_0])
def test_unknowable_status_is_not_guessed(tmp_path: Path, text: str) -> None:
    assert ended(tmp_path, text) == ("None", 3)


@pytest.mark.parametrize("text", ["pass", "exit(3)", "leave_with(3)"])
def test_script_run_as_a_module_is_found_below_its_runner(tmp_path: Path, text: str) -> None:
    found, status = ended(tmp_path, text, as_module=True)
    assert found == str(status)


def test_script_run_by_another_program_is_found_as_well(tmp_path: Path) -> None:
    """``python -m cProfile script.py``, for example; this one passes the exit on."""
    (tmp_path / "starter.py").write_text("import runpy\nrunpy.run_path('script.py', run_name='__main__')\n")
    assert ended(tmp_path, "exit(3)") == ("3", 3)
    under = subprocess.run(
        [sys.executable, "starter.py"], cwd=tmp_path, env=environment_of_tests(), capture_output=True
    )
    assert (under.stdout.split(), under.returncode) == ([b"3"], 3)


def test_exits_own_description_is_kept(tmp_path: Path) -> None:
    assert ended(tmp_path, "assert 'Use exit' in repr(exit)") == ("0", 0)
