"""The ways to fail, and what a job must say of each: who, of what class, in which words and line.

Only the list lives here, and the judgement. The one idea: what is judged is what somebody reads afterwards, the causes
in the journal; they must name exactly those who failed, with class and words, and nobody else. The ten of NVRx's twelve
kinds (its ``inject_fault.py``) that need no GPU are among them, under its names.
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
        says: what the cause must begin with; LINE is the line of the script.
        sent: the signal from outside; 0: the worker is told to do it itself.
        nvrx: NVRx's name of it; empty: it has none.
        ends: whether the worker is lost by it; else it is only warned of.
        goes_on: whether the generation goes on.
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
"""Two at once, each of its own cause."""


@dataclass(frozen=True, slots=True)
class Said:
    """What is on record: of each cause the node and its text; and what was warned of."""

    causes: Sequence[tuple[str, str]]
    notes: Sequence[str]


def line_of(fault: str) -> str:
    """The number of the line that the comment at its end names so; empty where there is none."""
    ends = f"# fault: {fault}"
    return next((str(at) for at, line in enumerate(WORKER.read_text().splitlines(), 1) if line.endswith(ends)), "")


def wrong(given: Mapping[str, Fault], said: Said) -> str:
    """What is wrong with what is on record of these faults, by node; empty where nothing is."""
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
        if not texts[0].rpartition(" (")[2].startswith(f"{fault.cause};"):
            return f"{fault.name} of worker {node}: another class: {texts[0]}"
    blamed = {node for node, _ in said.causes} - {node for node, fault in given.items() if fault.ends}
    return f"worker {', '.join(sorted(blamed))} is blamed as well: {list(said.causes)}" if blamed else ""
