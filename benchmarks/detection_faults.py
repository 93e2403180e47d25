"""The faults of ``benchmarks.detection``, and what the scheduler's message on each must contain.

A fault counts as named only if the sentence has the culprit, the cause and, where applicable, the line of the script.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).parent / "workers" / "detection.py"
VICTIM = 1
NOTICED = re.compile(r"^.*?samebits scheduler: (no step for .*|worker \d+ \(.*?\) (?:is lost|ends): .*)$", re.MULTILINE)
"""The first matching line of a scheduler's log is its verdict on a fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail.

    Attributes:
        says: pattern for the scheduler's sentence.
        sent: a signal from outside; 0: the worker fails on command.
        line: whether the sentence names the line of the script.
        asks: whether the line comes from asking the process (``samebits stack``, a follower), because the process
                    cannot report it.
        ends_job: whether the job may end before a replacement arrives if half of its ranks fail in this way.
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
    Fault("partition", _SILENT + "runs, but its messages do not arrive: the network between it and the scheduler"),
)


def line_of(fault: str) -> str:
    """Return ``detection.py:51`` for the line marked by the comment of this fault."""
    ends = f"# fault: {fault}"
    (number,) = [at for at, line in enumerate(WORKER.read_text().splitlines(), 1) if line.endswith(ends)]
    return f"{WORKER.name}:{number}"


def first_notice(log: str) -> str:
    """Return the first line of a scheduler's log about a fault, or an empty string."""
    found = NOTICED.search(log)
    return found[1] if found is not None else ""


def is_right(fault: Fault, said: str, asked: str = "") -> bool:
    """Return whether the sentence names culprit and cause, and whether the line is named where it should be.

    Args:
        asked: the process's own stack, if it was asked.
    """
    pattern = fault.says.replace("LINE", re.escape(line_of(fault.name))) if fault.line else fault.says
    is_named = re.search(pattern, said) is not None
    return is_named and (not fault.asks or asked.startswith(f"{line_of(fault.name)} "))
