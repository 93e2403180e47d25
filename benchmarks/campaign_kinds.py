"""The fault kinds of ``benchmarks.campaign``: the union of the published lists, each with its source and injection.

lm-resiliency 0.2.0 names 21 failure types (``fault_injection/config.py``, ``FailureType``), NVRx 0.4.1 twelve faults
(``inprocess/tools/inject_fault.py``), torchft kills a replica every 15 s. The rest are the drill's own. A kind is
injected by the drill's own injectors (:class:`samebits.commands.drill.plan.DrillFault`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from samebits.commands.drill.plan import DrillFault

__all__ = ["KINDS", "QUICK", "Kind", "named"]

LM, NVRX, TORCHFT, OURS = "lm-resiliency", "NVRx", "torchft", "SameBits"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault.

    Attributes:
        sources: the published lists that have it, each with the list's own name for it.
        fault: how the drill injects it; None: it needs a device that this machine lacks.
        times: how often in one job.
        by_signal: the signal that injects it into a peer's worker.
        by_order: the order to a peer's worker that injects it.
        damages: the damage to a peer's stored checkpoint before all its workers are killed.
        lacking: jobs in which the fault cannot occur.
    """

    name: str
    sources: tuple[str, ...]
    fault: DrillFault | None = None
    times: int = 1
    by_signal: signal.Signals | None = None
    by_order: str = ""
    damages: str = ""
    lacking: tuple[str, ...] = ()

    @property
    def is_for_peers(self) -> bool:
        """Return whether the fault can be injected into a peer's job from outside."""
        return bool(self.by_signal or self.by_order or self.damages)


def _kinds() -> tuple[Kind, ...]:
    fault = DrillFault
    return (
        Kind("kill", (f"{LM}: process_termination", f"{NVRX}: SIGKILL"), fault.KILL, by_signal=signal.SIGKILL),
        Kind("kills in turn", (f"{TORCHFT}: a kill every 15 s",), fault.KILL, 3, by_signal=signal.SIGKILL),
        Kind("segfault", (f"{NVRX}: SEGFAULT",), fault.SEGFAULT, by_signal=signal.SIGSEGV),
        Kind("abort", (f"{NVRX}: OS_ABORT",), fault.ABORT, by_signal=signal.SIGABRT),
        Kind("SIGTERM", (f"{NVRX}: SIGTERM",), fault.TERMINATE, by_signal=signal.SIGTERM),
        Kind("SIGINT", (f"{NVRX}: SIGINT",), fault.INTERRUPT, by_signal=signal.SIGINT),
        Kind("SIGSTOP", (f"{NVRX}: SIGSTOP",), fault.STOP, by_signal=signal.SIGSTOP),
        Kind(
            "exception",
            (f"{LM}: exception", f"{NVRX}: WORKLOAD_EXC", f"{NVRX}: SIGNAL_EXC"),
            fault.EXCEPTION,
            by_order="raise",
        ),
        Kind("async exception", (f"{NVRX}: ASYNC_EXC",), fault.ASYNC_EXCEPTION, by_order="pending"),
        Kind("hang", (f"{LM}: hang",), fault.HANG, by_order="hang"),
        Kind("held GIL", (f"{NVRX}: LOCK_GIL",), fault.HELD_GIL, by_order="hold"),
        Kind("pause", (f"{LM}: delay",), fault.PAUSE),
        Kind("slow rank", (f"{LM}: timeout",), fault.SLOW_RANK),
        Kind("out of memory", (f"{LM}: resource_exhaustion",), fault.OOM, by_order="eat"),
        Kind("host lost", (f"{LM}: resource_unavailable",), fault.HOST),
        Kind("partition", (f"{LM}: network_partition", f"{LM}: message_drop"), fault.PARTITION),
        Kind("disk full", (f"{OURS}: disk-full",), fault.DISK_FULL),
        Kind("disk error", (f"{LM}: io_error",), fault.DISK_ERROR),
        Kind("checkpoint corrupted", (f"{LM}: checkpoint_corruption",), fault.BITFLIP, damages="flip"),
        Kind("checkpoint truncated", (f"{LM}: checkpoint_truncation",), fault.TRUNCATED, damages="truncate"),
        Kind("checkpoint missing", (f"{LM}: checkpoint_missing",), fault.MISSING, damages="remove"),
        Kind("tensor corruption", (f"{LM}: tensor_corruption",), fault.BITFLIP_MEMORY, by_order="flip"),
        Kind("stale state", (f"{LM}: stale_state",), fault.STALE_MEMORY, by_order="stale"),
        Kind("payload corruption", (f"{LM}: payload_corruption",), fault.BITFLIP_GRADIENT, by_order="gradient"),
        Kind("config drift", (f"{LM}: config_drift",), fault.DRIFT, by_order="drift"),
        Kind("collective dropped", (f"{LM}: drop",), fault.UNREDUCED, by_order="unreduced", lacking=("mesh",)),
        Kind(
            "collective added",
            (f"{LM}: collective_desync", f"{LM}: duplicate", f"{LM}: reorder"),
            fault.DESYNC,
            by_order="collective",
        ),
        Kind("scheduler killed", (f"{OURS}: scheduler",), fault.SCHEDULER),
        Kind("all workers killed", (f"{OURS}: all",), fault.ALL),
        Kind("everything killed", (f"{OURS}: everything",), fault.EVERYTHING),
        Kind("clock jump", (f"{OURS}: clock-jump",), fault.CLOCK_JUMP),
        Kind("GPU error", (f"{NVRX}: GPU_ERROR",)),
        Kind("GPU sleep", (f"{NVRX}: GPU_SLEEP",)),
    )


KINDS = _kinds()
QUICK = ("kill", "exception", "scheduler killed", "checkpoint corrupted", "tensor corruption")


def named(names: Sequence[str]) -> list[Kind]:
    """Return the kinds with these names, in the table's order."""
    return [kind for kind in KINDS if kind.name in names]
