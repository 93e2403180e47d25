"""Test values: views of a job, workers, and processes that exist only by name."""

from __future__ import annotations

from typing import Any

from samebits.account.job_view import SCHEDULER, Interruption, JobView, PresenceState, WorkerView
from samebits.core.end_kinds import EndKind
from samebits.store.process_identity import ProcessIdentity

HOST = "here"
JOB = "1a2b3c4d-0000-4000-8000-000000000000"


def process(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, pid * 10)


def worker(
    node: int | str,
    presence: PresenceState = PresenceState.ALIVE,
    pid: int = 0,
    host: str = HOST,
    *,
    slot: int | None = -1,
    joining: bool = False,
) -> WorkerView:
    """Return a worker.

    ``slot``: the node's number unless another is given; None: a spare, or retired.
    """
    return WorkerView(
        node=str(node),
        slot=int(node) if slot == -1 else slot,
        incarnation=1,
        presence=presence,
        reason="silent for 5 s (NODE_TIMEOUT)" if presence is PresenceState.LOST else "",
        host=host,
        pid=(pid or 100 + int(node)),
        started_at=10 * (pid or 100 + int(node)),
        activity="training",
        step=7,
        is_joining=joining,
    )


def interruption(cause: str, step: int = 7, kind: EndKind = EndKind.INTERRUPTED) -> Interruption:
    return Interruption(kind.label, step, cause)


def view(**changes: Any) -> JobView:
    values: dict[str, Any] = {
        "source": SCHEDULER,
        "job": JOB,
        "name": "train.py",
        "term": 1,
        "generation": 1,
        "phase": "training",
        "world_size": 3,
        "recovery": True,
        "alive": 3,
        "step": 7,
        "restore_step": None,
        "training_finished": False,
        "job_finished": False,
        "first_cause": "",
        "workers": tuple(worker(node) for node in range(3)),
        "interruptions": (),
        "ended": None,
        "wanted_size": 3,
        "min_world_size": 3,
        "max_world_size": 3,
    }
    return JobView(**{**values, **changes})
