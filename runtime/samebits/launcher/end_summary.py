"""Print a follower's last lines: how the job ended, its first failure, what recoveries cost, and the next command.

The summary goes to standard output if the job finished. Otherwise it goes to standard error, with a command to paste.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samebits.account.history import summary_of_folder
from samebits.config import Settings
from samebits.core.end_kinds import EndKind
from samebits.launcher import job_spec
from samebits.launcher.follower_decisions import Following, FollowResult
from samebits.launcher.job_outcome import CORRECT_ARGUMENTS, OWN_ADVICE, JobOutcome, correction, missing
from samebits.launcher.progress_line import JsonScreen, Screen
from samebits.spelling import spelled


def say(result: FollowResult, following: Following, settings: Settings, screen: Screen) -> None:
    """Print how the job ended."""
    screen.close()
    if result.call_again:
        return
    verdict, view = result.verdict, following.view
    # The history has steps, recoveries and the use of time. A worker that left reported its last step there.
    step, cost = 0 if view is None or settings.plain else view.step, list[str]()
    if settings.enable_recovery and (view is not None or verdict.kind is None):
        step, cost = summary_of_folder(settings.recovery_path, step, has_steps=not settings.plain)
    if verdict.kind is None:
        for text in (f"job finished at step {step}" if step else "job finished", *cost):
            screen.say(text)
    else:
        _say_unfinished(verdict, following, settings, step, cost)
    if isinstance(screen, JsonScreen):
        kind = "finished" if verdict.kind is None else verdict.kind.label
        screen.end(kind, verdict.exit_code, step, verdict.cause)


def _say_unfinished(
    verdict: JobOutcome, following: Following, settings: Settings, step: int, cost: Sequence[str]
) -> None:
    errors, view = Screen(sys.stderr), following.view
    assert verdict.kind is not None, "it is not finished"
    if view is not None and view.ended is None:  # training may have continued after the scheduler's last message
        at = f" (last known step: {step})" if step else ""
    else:
        at = f" at step {step}" if step else ""
    errors.say(f"the job {verdict.words}{at}: {verdict.cause}")
    first = following.first_death(verdict.cause)
    if first and verdict.kind not in (EndKind.STOPPED, EndKind.SCRIPT_FAILED, EndKind.UNTRAINED):
        errors.say(f"the first process to end: {first}")
    for text in cost if view is not None and view.generation > 0 else ():
        errors.say(text)
    fix = _fix(verdict, following, settings)
    if fix:
        errors.say(f"Fix: {fix}")


def _fix(verdict: JobOutcome, following: Following, settings: Settings) -> str:
    """Return the command that the user should type next, or "" if the cause names one or nothing is recoverable."""
    view = following.view
    has_begun = view is not None and view.generation > 0
    kept = job_spec.read(settings.log_dir)
    again, fresh = (spelled("run", "train.py"),) * 2 if kept is None else (kept.command(), kept.command(fresh=True))
    recover = f"{job_spec.command_to_continue(settings.log_dir)} continues from there"
    if (correct := correction(verdict.cause)) == CORRECT_ARGUMENTS:
        return f"{correct}: {again}"
    match verdict.kind:
        case EndKind.UNEQUAL | EndKind.POINTS_LOST if "Fix: " in verdict.cause:
            return ""
        case _ if "Fix: " in verdict.cause and (verdict.is_permanent or _is_unequal(verdict)):
            return ""  # the message names the step at which another job can continue, which is not this job's last step
        case EndKind.UNTRAINED:
            return f"{missing(verdict.cause)}, then {again}"
        case EndKind.SCRIPT_FAILED if has_begun and settings.enable_recovery:
            return f"{correct}, then {recover}"
        case EndKind.SCRIPT_FAILED:
            return f"{correct}, then {again}"
        case EndKind.UNEQUAL:
            return f"correct the script, then {fresh}"
        case EndKind.FAILED:
            return ""
    if not settings.enable_recovery:
        return ""
    has_own_advice = verdict.exit_code != EndKind.INTERRUPTED.exit_code  # a SameBits error that a retry would repeat
    return f"{OWN_ADVICE}, then {recover}" if verdict.kind is EndKind.INTERRUPTED and has_own_advice else recover


def _is_unequal(verdict: JobOutcome) -> bool:
    """Return whether the job ended because the ranks' states differ or may be wrong."""
    code = EndKind.UNEQUAL.exit_code
    return verdict.exit_code == code or f"ended with status {code}:" in verdict.cause
