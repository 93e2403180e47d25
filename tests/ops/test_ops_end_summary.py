"""What a follower tells the user to do once the job has ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime import config
from runtime.ops.end_summary import _fix
from runtime.ops.following import Following
from runtime.ops.job_view import EndKind
from runtime.ops.verdict import EXIT_CODES, Verdict

FULL = "worker 1 (pid 7) ended with status 71: the state of step 9 could not be saved in /full: make room; twice"
THREADS = "worker 1 (pid 7) ended with status 69: threads is 2 here and 1 there. Start it with the same values"


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        (Verdict.unfinished(EndKind.SCRIPT_FAILED, "worker 1 failed at train.py:3: ValueError: x"), "correct the scri"),
        (Verdict.unfinished(EndKind.SCRIPT_FAILED, FULL), "do what that message says, then "),
        (Verdict(EndKind.INTERRUPTED, THREADS, 69), "do what that message says, then "),
        (Verdict(EndKind.INTERRUPTED, "every worker was killed", EXIT_CODES[EndKind.INTERRUPTED]), "bash "),
    ],
)
def test_an_error_of_ours_is_not_mended_in_the_script(tmp_path: Path, verdict: Verdict, told: str) -> None:
    settings = config.read({"ENABLE_RECOVERY": "1", "LOG_DIR": str(tmp_path)}, role_required=False)[0]
    following = cast(Following, cast(Any, SimpleNamespace(view=SimpleNamespace(generation=1))))
    fix = _fix(verdict, following, settings)
    assert fix.startswith(told) and fix.endswith("goes on from there")


@pytest.mark.parametrize(
    ("cause", "told"), [("rank 1's moments differ", "correct the script, then "), ("wrong twice. Fix: export 0/40", "")]
)
def test_a_cause_that_has_its_own_fix_is_given_no_other(tmp_path: Path, cause: str, told: str) -> None:
    settings = config.read({"ENABLE_RECOVERY": "1", "LOG_DIR": str(tmp_path)}, role_required=False)[0]
    following = cast(Following, cast(Any, SimpleNamespace(view=SimpleNamespace(generation=1))))
    fix = _fix(Verdict.unfinished(EndKind.UNEQUAL, cause), following, settings)
    assert fix.startswith(told) and bool(fix) == bool(told)
