"""A follower's advice to the user once the job has ended."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from samebits import config
from samebits.account.event_log import line_of
from samebits.account.events import EventKind, JobEvent
from samebits.core.end_kinds import EndKind
from samebits.core.watch.audits import AuditResult, Follows, Known, Roles, sentence, why_it_ends
from samebits.errors import UnequalError
from samebits.launcher import job_spec
from samebits.launcher.end_summary import _fix, say
from samebits.launcher.follower_decisions import Following, FollowResult
from samebits.launcher.job_outcome import JobOutcome
from samebits.launcher.job_spec import JobSpec
from samebits.launcher.progress_line import Screen
from samebits.store.text_log import EventLog

FULL = "worker 1 (pid 7) ended with status 71: the state of step 9 could not be saved in /full: make room; twice"
THREADS = "worker 1 (pid 7) ended with status 69: threads is 2 here and 1 there. Start it with the same values"


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        (
            JobOutcome.unfinished(EndKind.SCRIPT_FAILED, "worker 1 failed at train.py:3: ValueError: x"),
            "correct the scri",
        ),
        (JobOutcome.unfinished(EndKind.SCRIPT_FAILED, FULL), "do what that message says, then "),
        (JobOutcome(EndKind.INTERRUPTED, THREADS, 69), "do what that message says, then "),
        (JobOutcome(EndKind.INTERRUPTED, "every worker was killed", EndKind.INTERRUPTED.exit_code), "samebits recover"),
    ],
)
def test_runtime_error_is_not_blamed_on_the_script(tmp_path: Path, verdict: JobOutcome, told: str) -> None:
    settings = config.read({"ENABLE_RECOVERY": "1", "LOG_DIR": str(tmp_path)}, role_required=False)[0]
    following = cast(Following, cast(Any, SimpleNamespace(view=SimpleNamespace(generation=1))))
    fix = _fix(verdict, following, settings).removeprefix(f"{Path(sys.executable).parent}/")
    assert fix.startswith(told) and fix.endswith("continues from there")


LOST = "worker 1: train.py:24: state.best changed after state.commit(). Fix: change it before state.commit()"


@pytest.mark.parametrize(
    "verdict",
    [
        JobOutcome.unfinished(EndKind.SCRIPT_FAILED, LOST, 95),
        JobOutcome(EndKind.INTERRUPTED, f"{LOST}; ended with 64", 64),
    ],
)
def test_error_that_every_retry_repeats_is_a_failure_with_one_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: JobOutcome
) -> None:
    settings = config.read({"ENABLE_RECOVERY": "1", "LOG_DIR": str(tmp_path)}, role_required=False)[0]
    view = SimpleNamespace(step=0, ended=object(), generation=0)
    following = cast(Following, cast(Any, SimpleNamespace(view=view, first_death=lambda cause: "")))
    say(FollowResult(verdict), following, settings, Screen(io.StringIO()))
    assert capsys.readouterr().err == f"samebits: the job failed: {verdict.cause}\n"


@pytest.mark.parametrize(
    ("cause", "told"), [("rank 1's moments differ", "correct the script, then "), ("wrong twice. Fix: export 0/40", "")]
)
def test_cause_with_its_own_fix_gets_no_other(tmp_path: Path, cause: str, told: str) -> None:
    settings = config.read({"ENABLE_RECOVERY": "1", "LOG_DIR": str(tmp_path)}, role_required=False)[0]
    following = cast(Following, cast(Any, SimpleNamespace(view=SimpleNamespace(generation=1))))
    fix = _fix(JobOutcome.unfinished(EndKind.UNEQUAL, cause), following, settings)
    assert fix.startswith(told) and bool(fix) == bool(told)


@pytest.mark.parametrize("kind", [EndKind.INTERRUPTED, EndKind.SCRIPT_FAILED])
def test_audit_that_ends_the_job_has_one_fix(tmp_path: Path, kind: EndKind) -> None:
    settings = config.read({"ENABLE_RECOVERY": "1", "LOG_DIR": str(tmp_path)}, role_required=False)[0]
    following = cast(Following, cast(Any, SimpleNamespace(view=SimpleNamespace(generation=1))))
    who = Roles(0, 1, 2)
    text = why_it_ends(40, sentence(who, AuditResult.AUDITED, "weight", Follows.STOP), who, Known(30, 20))
    verdict = JobOutcome.unfinished(kind, f"worker 0 (pid 7) ended with status {UnequalError.exit_code}: {text}")
    assert verdict.cause.count("Fix: ") == 1 and _fix(verdict, following, settings) == ""


def test_script_that_rejected_its_arguments_is_shown_with_all_of_them(tmp_path: Path) -> None:
    settings = config.read({"ENABLE_RECOVERY": "1", "LOG_DIR": str(tmp_path)}, role_required=False)[0]
    following = cast(Following, cast(Any, SimpleNamespace(view=SimpleNamespace(generation=0))))
    words = ("-n", "2", "train.py", "--lrr", "3")
    job_spec.keep(tmp_path, JobSpec(tmp_path, "python", "train.py", words[3:], {}, words=words))
    cause = "workers 0, 1 ended with status 2: train.py: error: unrecognized arguments: --lrr 3"
    fix = _fix(JobOutcome.unfinished(EndKind.SCRIPT_FAILED, cause), following, settings)
    assert fix.startswith("correct the script's arguments: ") and fix.endswith("samebits run -n 2 train.py --lrr 3")


def test_lost_restore_points_have_their_own_code_and_fix(tmp_path: Path) -> None:
    settings = config.read({"ENABLE_RECOVERY": "1", "LOG_DIR": str(tmp_path)}, role_required=False)[0]
    following = cast(Following, cast(Any, SimpleNamespace(view=SimpleNamespace(generation=1))))
    verdict = JobOutcome.unfinished(EndKind.POINTS_LOST, "no restore point is left. Fix: bring the checkpoints back")
    assert verdict.exit_code == 94 and _fix(verdict, following, settings) == ""


@pytest.mark.parametrize("heard", [70, 80])
def test_stopped_job_gives_the_latest_step_on_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], heard: int
) -> None:
    """The last push may be a second old, and so may the history if its scheduler was killed."""
    asked = {"ENABLE_RECOVERY": "1", "RECOVERY_PATH": str(tmp_path), "LOG_DIR": str(tmp_path)}
    settings = config.read(asked, role_required=False)[0]
    with contextlib.closing(EventLog(tmp_path, lambda lines: "", print)) as kept:
        kept.append([line_of(JobEvent(EventKind.LEFT, 9.0, 1, 1, 75, "0", "left on purpose"))])
    view = SimpleNamespace(step=heard, ended=object(), generation=1)
    following = cast(Following, cast(Any, SimpleNamespace(view=view, first_death=lambda cause: "")))
    say(
        FollowResult(JobOutcome.unfinished(EndKind.STOPPED, "stopped by Ctrl-C")),
        following,
        settings,
        Screen(io.StringIO()),
    )
    said = capsys.readouterr().err
    assert f"the job was stopped at step {max(heard, 75)}: stopped" in said and f"{max(heard, 75)} steps in" in said
