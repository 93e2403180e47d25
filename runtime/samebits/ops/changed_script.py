"""A script that is edited between a job's start and a recovery: noticed, and said with what of it cannot take effect.

Reading the file and the sentence live here. The one idea: what is compared is the content, for an editor or a checkout
changes a file's time without changing it; the times are for people, who know what they did when.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from samebits.named_file import read_named_file

_MAX_BYTES = 64 << 20  # of what is a script


@dataclass(frozen=True, slots=True)
class ScriptVersion:
    """A script as it was: its content's digest, and when that was written, in seconds since 1970."""

    digest: str
    changed_at_s: float


def version_of(script: Path) -> ScriptVersion | None:
    """What is in the file now; None where it cannot be read, as whoever runs it will say."""
    try:
        content = read_named_file(script, _MAX_BYTES - 1)
        return ScriptVersion(hashlib.sha256(content).hexdigest(), script.stat().st_mtime)
    except OSError:
        return None


def change(script: str, before: ScriptVersion | None, now: ScriptVersion | None, *, others_run: bool) -> str:
    """What to say of a script that is another one now; empty where it is not, or where that is not known.

    Args:
        script: its name.
        before, now: at the job's start, and today.
        others_run: workers run that were not started anew.
    """
    if before is None or now is None or before.digest == now.digest:
        return ""
    who = "workers that run already keep the former" if others_run else "all workers start with the new one"
    return (
        f"{script} was edited since the job started: written {_time(before.changed_at_s)} then, "
        f"{_time(now.changed_at_s)} now; {who}. What is restored from a checkpoint, such as an optimizer's lr or a "
        "schedule, stays as it was, whatever the script says"
    )


def _time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
