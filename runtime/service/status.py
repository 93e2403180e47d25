"""A snapshot of the job as JSON text: what followers, ``samebits status`` and the status page show."""

from __future__ import annotations

import json
from typing import Any

from runtime.core.scheduler import SchedulerCore
from runtime.core.state import Seat

LISTED_WORKERS = 64  # a snapshot that is pushed names each worker only up to this many


def snapshot(core: SchedulerCore, *, whole: bool) -> str:
    """JSON of the job: phase, step, workers, first cause. ``whole`` lists the workers however many they are."""
    state, policy = core.state, core.policy
    seats = [state.seats[node] for _, node in sorted(state.by_slot.items())]
    workers = [_worker(core, seat) for seat in seats]
    steps = [worker["step"] for worker in workers]
    content: dict[str, Any] = {
        "job": state.job,
        "name": state.name,
        "term": state.term,
        "generation": state.generation_number,
        "phase": core.phase(),
        "world_size": policy.world_size,
        "recovery": policy.recovery,
        "alive": sum(worker["state"] == "alive" for worker in workers),
        "step": max(steps, default=0),
        "restore_step": state.generation.restore.step if state.generation and state.generation.restore else None,
        "training_finished": state.final is not None,
        "job_finished": state.finished,
        "first_cause": core.first_cause,
    }
    if whole or len(workers) <= LISTED_WORKERS:
        content["workers"] = workers
    return json.dumps(content, ensure_ascii=False)


def _worker(core: SchedulerCore, seat: Seat) -> dict[str, Any]:
    presence = core.presence(seat.node)
    return {
        "node": seat.node,
        "slot": seat.slot,
        "incarnation": seat.incarnation,
        "state": "left" if seat.left else "lost" if seat.lost else "alive",
        "reason": seat.reason,
        "host": seat.process.host,
        "pid": seat.process.pid,
        "started_at": seat.process.started_at,
        "activity": presence.activity.name.lower() if presence else "unknown",
        "step": presence.step if presence else 0,
    }
