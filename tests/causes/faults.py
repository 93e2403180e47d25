"""The ways to fail, and what must be recorded about each: worker, class, words and line.

The journal's causes are judged, since these are what a user reads afterwards. They must name exactly the failed
workers, with class and words. The faults include the ten of NVRx's twelve kinds (its ``inject_fault.py``) that need no
GPU, under their names.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Fault:
    """One way for one worker to fail.

    Attributes:
        cause: the class.
        says: how the cause must begin; LINE is the line of the script.
        sent: the signal from outside; 0: the worker does it on command.
        nvrx: NVRx's name for it, or empty.
        ends: whether the worker is lost by it; otherwise there is only a warning.
        goes_on: whether the generation continues.
    """

    name: str
    cause: str
    says: str
    sent: int = 0
    nvrx: str = ""
    ends: bool = True
    goes_on: bool = False


_AT = r"failed at worker\.py:LINE: "
_STILL = r"no step for \d+ s: worker <NODE> "
_HELD = r"it held the others up for \d+ s in worker\.py:LINE "

FAULTS = (
    Fault("exception", "software", _AT + "RuntimeError: a fault", nvrx="WORKLOAD_EXC"),
    Fault("async-exception", "software", r"failed at worker\.py:\d+: RuntimeError", nvrx="ASYNC_EXC"),
    Fault("signal-exception", "software", _AT + "RuntimeError: a fault", signal.SIGUSR1, nvrx="SIGNAL_EXC"),
    Fault("abort", "software", r"was killed by signal 6 \(SIGABRT\)", nvrx="OS_ABORT"),
    Fault("gil", "software", r"silent for \S+ s \(NODE_TIMEOUT\): it runs no Python", nvrx="LOCK_GIL"),
    Fault("segfault", "software", r"was killed by signal 11 \(SIGSEGV\)", nvrx="SEGFAULT"),
    Fault("sigint", "node", r"failed( at worker\.py:\d+)?: KeyboardInterrupt", signal.SIGINT, nvrx="SIGINT"),
    Fault("sigkill", "node", r"was killed by signal 9 \(SIGKILL\)", signal.SIGKILL, nvrx="SIGKILL"),
    Fault("sigterm", "", r"left: it was asked to \(SIGTERM\)", signal.SIGTERM, nvrx="SIGTERM", ends=False),
    Fault("sigstop", "node", r"silent for \S+ s \(NODE_TIMEOUT\): it is stopped", signal.SIGSTOP, nvrx="SIGSTOP"),
    Fault("exit", "software", "its program ended with status 3"),
    Fault("os-exit", "software", "ended with status 3"),
    Fault("disk", "storage", _AT + r"OSError: \[Errno 28\] No space left on device"),
    Fault("memory", "node", _AT + "MemoryError"),
    Fault("nan", "data", _AT + "FloatingPointError: loss is nan"),
    Fault("data", "data", _AT + "UnicodeDecodeError: "),
    Fault("device", "device", _AT + "RuntimeError: CUDA error: uncorrectable ECC error"),
    Fault(
        "loader-killed",
        "node",
        _AT + r"RuntimeError: DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)",
    ),
    Fault(
        "thread", "", r"its thread feeder\S* failed at worker\.py:LINE: RuntimeError: a fault", ends=False, goes_on=True
    ),
    Fault("sleep", "software", _HELD + r"\(time\.sleep\) \("),
    Fault("deadlock", "software", _HELD + r"\(lock\.acquire\)"),
    Fault("loader", "storage", _HELD + r"\(time\.sleep\) and waits for data"),
    Fault("returns", "", _STILL + "has returned from the training function", ends=False),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
PAIRS = (
    ("sigkill", "sigkill"),
    ("segfault", "abort"),
    ("exception", "nan"),
    ("sigkill", "exception"),
    ("sigkill", "os-exit"),
    ("exit", "disk"),
)
"""Two at once, each with its own cause."""


@dataclass(frozen=True, slots=True)
class Said:
    """The records: the node and text of each cause, and the warnings."""

    causes: Sequence[tuple[str, str]]
    notes: Sequence[str]


def line_of(fault: str) -> str:
    """Return the number of the line marked by this comment, or an empty string."""
    ends = f"# fault: {fault}"
    return next((str(at) for at, line in enumerate(WORKER.read_text().splitlines(), 1) if line.endswith(ends)), "")


def wrong(given: Mapping[str, Fault], said: Said) -> str:
    """Return what is wrong with the records about these faults, by node, or an empty string."""
    for node, fault in given.items():
        words = fault.says.replace("LINE", line_of(fault.name) or "none").replace("<NODE>", re.escape(node))
        if not fault.ends:
            if not any(f"worker {node}" in note and re.search(words, note) for note in said.notes):
                return f"{fault.name} of worker {node} is not told: {list(said.notes)}"
            continue
        texts = [text for one, text in said.causes if one == node]
        if len(texts) != 1:
            return f"{fault.name} of worker {node}: named {len(texts)} times: {list(said.causes)}"
        if re.match(words, texts[0]) is None:
            return f"{fault.name} of worker {node}: other words: {texts[0]}"
        if not texts[0].rpartition(" (")[2].startswith(f"{fault.cause} fault;"):
            return f"{fault.name} of worker {node}: another class: {texts[0]}"
    blamed = {node for node, _ in said.causes} - {node for node, fault in given.items() if fault.ends}
    return f"worker {', '.join(sorted(blamed))} is blamed as well: {list(said.causes)}" if blamed else ""
