"""The faults of ``benchmarks.detection``, and what a scheduler must say of each: who, what, in which line.

Only the list lives here, and the judgement of a line of its log. The one idea: a fault counts as named only where the
sentence holds the culprit, what holds it, and, where there is one, the line of the script; all else is wrong.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).parent / "workers" / "detection.py"
VICTIM = 1
NOTICED = re.compile(r"^.*?samebits scheduler: (no step for .*|worker \d+ \(.*?\) (?:is lost|ends): .*)$", re.MULTILINE)
"""The first such line of a scheduler's log is what it makes of a fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail.

    Attributes:
        says: what the scheduler's sentence must match.
        sent: a signal from outside; 0: the worker is told to do it itself.
        line: whether the sentence names the line of the script.
        asks: whether the line is had by asking the process (``samebits stack``, a follower), because it cannot speak.
        ends_job: whether half of the ranks failing so may end the job, before another one is there.
    """

    name: str
    says: str
    sent: int = 0
    line: bool = False
    asks: bool = False
    ends_job: bool = False


_LOST = rf"worker {VICTIM} \(pid \d+ on [^)]*\) is lost: "
_ENDS = rf"worker {VICTIM} \(pid \d+ on [^)]*\) ends: "
_STILL = rf"no step for \d+ s: worker {VICTIM} "
_SILENT = _LOST + r"silent for \S+ s \(NODE_TIMEOUT\): it "

FAULTS = (
    Fault(
        "kill", _LOST + r"(its connection closed and its process is gone|its process ended \(seen by)", signal.SIGKILL
    ),
    Fault("exception", _ENDS + r"failed at \S*LINE: RuntimeError: a fault", line=True, ends_job=True),
    Fault("stop", _SILENT + r"is stopped \(SIGSTOP\). Fix: kill -CONT \d+", signal.SIGSTOP),
    Fault("sleep", _STILL + r"is in \S*LINE \(time.sleep\), worker 0 waits for it in \w+ #\d+", line=True),
    Fault("deadlock", _STILL + r"is in \S*LINE \(lock.acquire\), worker 0 waits for it in \w+ #\d+", line=True),
    Fault("gil", _SILENT + "runs no Python: something in it holds Python's lock", asks=True),
    Fault("loader", _STILL + r"is in \S*LINE \(time.sleep\) and waits for data, worker 0 waits", line=True),
    Fault("returns", _STILL + r"has returned from the training function, worker 0 waits for it in \w+ #\d+"),
    Fault("partition", _SILENT + "runs, but none of its messages arrives: the network between it and the scheduler"),
)


def line_of(fault: str) -> str:
    """``detection.py:51``, by the comment that ends the line in which a worker fails so."""
    ends = f"# fault: {fault}"
    (number,) = [at for at, line in enumerate(WORKER.read_text().splitlines(), 1) if line.endswith(ends)]
    return f"{WORKER.name}:{number}"


def first_notice(log: str) -> str:
    """What the log of a scheduler says first of a fault; empty where nothing yet."""
    found = NOTICED.search(log)
    return found[1] if found is not None else ""


def is_right(fault: Fault, said: str, asked: str = "") -> bool:
    """Whether the sentence names culprit and kind, and whoever should name the line does.

    Args:
        asked: where the process is by its own stacks, where it was asked.
    """
    pattern = fault.says.replace("LINE", re.escape(line_of(fault.name))) if fault.line else fault.says
    is_named = re.search(pattern, said) is not None
    return is_named and (not fault.asks or asked.startswith(f"{line_of(fault.name)} "))
