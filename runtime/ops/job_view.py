"""What is known about a job at one moment, typed: read from the snapshot of a scheduler or of a journal.

Only values and their reading live here; nothing is asked, decided or shown. The one idea: whatever watches a job sees
this one shape, whether the scheduler answered or the journal had to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from runtime.service import status
from runtime.store.process_identity import ProcessIdentity


class Presence(Enum):
    """What the scheduler holds of a worker."""

    ALIVE = "alive"
    LOST = "lost"
    LEFT = "left"


class EndKind(Enum):
    """How a job ended unfinished."""

    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    FORMATION_TIMEOUT = "formation_timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One seat and the process that holds it, or held it last."""

    node: str
    slot: int
    incarnation: int
    presence: Presence
    reason: str
    host: str
    identity: ProcessIdentity
    activity: str
    step: int


@dataclass(frozen=True, slots=True)
class Interruption:
    """One end of the job that left it unfinished."""

    kind: EndKind
    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its scheduler, or its journal, tells it.

    ``workers`` is empty in a pushed snapshot of a large job. ``ended`` is how this scheduler start ended the job.
    ``seat_free_in_s`` is how long a process that asked for its seat has to wait yet; None where none does.
    """

    from_journal: bool
    job: str
    name: str
    term: int
    generation: int
    phase: str
    world_size: int
    recovery: bool
    alive: int
    step: int
    restore_step: int | None
    training_finished: bool
    job_finished: bool
    first_cause: str
    workers: tuple[WorkerView, ...]
    interruptions: tuple[Interruption, ...]
    ended: Interruption | None
    seat_free_in_s: float | None = None

    def __str__(self) -> str:
        return f"job {self.job}" + (f" ({self.name})" if self.name else "")

    @classmethod
    def from_json(cls, text: str) -> JobView:
        """The view that ``runtime.service.status`` wrote as ``text``."""
        content = json.loads(text)
        return cls(
            from_journal=content["source"] == "journal",
            job=content["job"],
            name=content["name"],
            term=content["term"],
            generation=content["generation"],
            phase=content["phase"],
            world_size=content["world_size"],
            recovery=content["recovery"],
            alive=content["alive"],
            step=content["step"],
            restore_step=content["restore_step"],
            training_finished=content["training_finished"],
            job_finished=content["job_finished"],
            first_cause=content["first_cause"],
            workers=tuple(_worker(worker) for worker in content.get("workers", ())),
            interruptions=tuple(_interruption(entry) for entry in content["interruptions"]),
            ended=_interruption(content["ended"]) if content["ended"] else None,
            seat_free_in_s=content["seat_free_in_s"],
        )


def stored_view(recovery_path: Path) -> JobView | None:
    """What the journal says; none where there is no job.

    Raises:
        JournalDamagedError: the journal cannot be read.
    """
    text = status.stored_snapshot(recovery_path)
    return None if text is None else JobView.from_json(text)


def _worker(content: dict[str, Any]) -> WorkerView:
    return WorkerView(
        node=content["node"],
        slot=content["slot"],
        incarnation=content["incarnation"],
        presence=Presence(content["state"]),
        reason=content["reason"],
        host=content["host"],
        identity=ProcessIdentity(content["pid"], content["started_at"]),
        activity=content["activity"],
        step=content["step"],
    )


def _interruption(content: dict[str, Any]) -> Interruption:
    return Interruption(EndKind(content["kind"]), content["step"], content["cause"])
