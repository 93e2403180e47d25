"""A follower's last words: how the job ended, what went first, what it cost, and what to type next.

Only the sentences live here; how it ended is ``verdict``'s. The one idea: what finished is said where everything else
was, what did not is said on standard error, with a fix that can be pasted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samebits.commands import spelled
from samebits.config import Settings
from samebits.ops import kept_start
from samebits.ops.deaths import OWN_ADVICE, correction, missing
from samebits.ops.following import Following, Result
from samebits.ops.history_show import summary_of_folder
from samebits.ops.job_view import EndKind
from samebits.ops.progress import JsonScreen, Screen
from samebits.ops.verdict import EXIT_CODES, Verdict

_ENDED = {
    EndKind.FAILED: "failed",
    EndKind.STOPPED: "was stopped",
    EndKind.SCRIPT_FAILED: "was ended by its script",
    EndKind.UNTRAINED: "was not trained",
    EndKind.UNEQUAL: "was ended, for its ranks differ",
    EndKind.POINTS_LOST: "was refused",
}


def say(result: Result, following: Following, settings: Settings, screen: Screen) -> None:
    """Say how the job ended."""
    screen.close()
    if result.call_again:
        return
    verdict, view = result.verdict, following.view
    # Steps, recoveries and where the time went, where a history is kept; who left has told its last step there.
    step, cost = 0 if view is None or settings.plain else view.step, list[str]()
    if settings.enable_recovery and (view is not None or verdict.kind is None):
        step, cost = summary_of_folder(settings.recovery_path, step, has_steps=not settings.plain)
    if verdict.kind is None:
        for text in (f"job finished at step {step}" if step else "job finished", *cost):
            screen.say(text)
    else:
        _say_unfinished(verdict, following, settings, step, cost)
    if isinstance(screen, JsonScreen):
        kind = "finished" if verdict.kind is None else verdict.kind.value
        screen.end(kind, verdict.exit_code, step, verdict.cause)


def _say_unfinished(verdict: Verdict, following: Following, settings: Settings, step: int, cost: Sequence[str]) -> None:
    errors, view = Screen(sys.stderr), following.view
    assert verdict.kind is not None, "it is not finished"
    if view is not None and view.ended is None:  # training may have gone on after the scheduler was heard
        at = f" (the last step heard of: {step})" if step else ""
    else:
        at = f" at step {step}" if step else ""
    errors.say(f"the job {_ENDED.get(verdict.kind, 'was interrupted')}{at}: {verdict.cause}")
    first = following.first_death(verdict.cause)
    if first and verdict.kind not in (EndKind.STOPPED, EndKind.SCRIPT_FAILED, EndKind.UNTRAINED):
        errors.say(f"the first to go: {first}")
    for text in cost if view is not None and view.generation > 0 else ():
        errors.say(text)
    fix = _fix(verdict, following, settings)
    if fix:
        errors.say(f"Fix: {fix}")


def _fix(verdict: Verdict, following: Following, settings: Settings) -> str:
    """What to type next; empty where the cause says it, or there is nothing to go on from."""
    view = following.view
    has_begun = view is not None and view.generation > 0
    kept = kept_start.read(settings.log_dir)
    script = kept.script if kept is not None else "train.py"
    again, recover = spelled("run", script), f"{spelled('recover')} goes on from there"
    match verdict.kind:
        case EndKind.UNEQUAL | EndKind.POINTS_LOST if "Fix: " in verdict.cause:
            return ""
        case EndKind.UNTRAINED:
            return f"{missing(verdict.cause)}, then {again}"
        case EndKind.SCRIPT_FAILED if has_begun and settings.enable_recovery:
            return f"{correction(verdict.cause)}, then {recover}"
        case EndKind.SCRIPT_FAILED:
            return f"{correction(verdict.cause)}, then {again}"
        case EndKind.UNEQUAL:
            return f"correct the script, then {spelled('run', '--fresh', script)}"
        case EndKind.FAILED:
            return ""
    if not settings.enable_recovery:
        return ""
    has_own_advice = verdict.exit_code != EXIT_CODES[EndKind.INTERRUPTED]  # one of ours, which trying again cannot help
    return f"{OWN_ADVICE}, then {recover}" if verdict.kind is EndKind.INTERRUPTED and has_own_advice else recover
