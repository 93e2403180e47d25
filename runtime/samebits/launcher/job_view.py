"""A job's state at one moment, read from a scheduler's snapshot or from a journal.

Everything that watches a job works on this one type, whether a scheduler answered or only the journal was left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from samebits.core.ends import EndKind
from samebits.service import status
from samebits.store.process_identity import ProcessIdentity


class Presence(Enum):
    """A worker's presence, as its scheduler sees it; the last two only if no scheduler runs (``seen_view``)."""

    ALIVE = "alive"
    LOST = "lost"
    LEFT = "left"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One node and its process, or the last it had; ``slot`` is None of a spare, and where the slot was given away.

    ``is_joining``: no generation was made for it yet.
    """

    node: str
    slot: int | None
    incarnation: int
    presence: Presence
    reason: str
    host: str
    identity: ProcessIdentity
    activity: str
    step: int
    is_joining: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)  # what it measures, by name


@dataclass(frozen=True, slots=True)
class Interruption:
    """One end of the job that left it unfinished; ``status`` is not 0 if the script's own exit status is the job's."""

    kind: EndKind
    step: int
    cause: str
    status: int = 0


@dataclass(frozen=True, slots=True)
class Stall:
    """Whom to look at, by node, of a job that does not come on; ``silent`` are those culprits who say nothing."""

    step: int
    culprits: tuple[str, ...]
    silent: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its scheduler, or its journal, tells it.

    ``workers`` hold the slots; ``retired`` are nodes whose slot was given away. They and ``spares`` are empty in a
    pushed snapshot of a large job. ``world_size`` is that of now: in an elastic world not always ``wanted_size``
    (WORKER_NUM). ``ended`` is how this scheduler start ended the job. ``seat_free_in_s`` is how long a process that
    asked for its seat has to wait yet; None where none does. ``losses`` counts the processes that were lost so far, and
    ``last_losses`` says why, the last ones; only a journal tells both.
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
    wanted_size: int = 0
    min_world_size: int = 0
    max_world_size: int = 0
    joining: int = 0
    spares_alive: int = 0
    spares: tuple[WorkerView, ...] = ()
    retired: tuple[WorkerView, ...] = ()
    losses: int = 0
    last_losses: tuple[str, ...] = ()
    standstill: str = ""  # who holds the others up, where no step is made
    ailments: tuple[str, ...] = ()  # what is wrong with whose host, a sentence each
    stragglers: tuple[str, ...] = ()  # who is slower than the others, a sentence each
    ready: int | None = None  # how many workers have come to the round that forms; None if none forms
    notices: tuple[tuple[int, str], ...] = ()  # the latest warnings, each with its number in this term
    stall: Stall | None = None  # the same, as values
    address: str = ""  # of its scheduler, where SCHED_HOST names several

    def __str__(self) -> str:
        return f"job {self.job}" + (f" ({self.name})" if self.name else "")

    @classmethod
    def of(cls, content: status.Content) -> JobView:
        """Return what ``samebits.service.status`` has made."""
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
            wanted_size=content["wanted_size"],
            min_world_size=content["min_world_size"],
            max_world_size=content["max_world_size"],
            joining=content["joining"],
            spares_alive=content["spares_alive"],
            spares=tuple(_worker(spare) for spare in content.get("spares", ())),
            retired=tuple(_worker(node) for node in content.get("retired", ())),
            losses=content.get("losses", 0),
            last_losses=tuple(content.get("last_losses", ())),
            standstill=content.get("standstill", ""),
            ailments=tuple(content.get("ailments", ())),
            stragglers=tuple(content.get("stragglers", ())),
            ready=content.get("ready"),
            notices=tuple((int(number), str(text)) for number, text in content.get("notices", ())),
            stall=_stall(content.get("stall")),
            address=content.get("address", ""),
        )

    @property
    def nodes(self) -> tuple[WorkerView, ...]:
        """Every node that was ever admitted, whatever it is now."""
        return self.workers + self.spares + self.retired

    @property
    def has_one_size(self) -> bool:
        """Whether the world neither shrinks nor grows."""
        return self.min_world_size == self.max_world_size

    def node(self, name: str | None) -> WorkerView | None:
        """Return what is known about one node."""
        return next((one for one in self.nodes if one.node == name), None)

    def is_spare(self, node: str | None) -> bool:
        """Return whether the node waits to take a lost worker's place, as far as it is known or its number says."""
        known = self.node(node)
        return known in self.spares if known is not None else names_spare(node, self.max_world_size)


def names_spare(node: str | None, max_world_size: int) -> bool:
    """Return whether this node id, by its number, is that of a spare."""
    return node is not None and node.isdecimal() and int(node) >= max_world_size > 0


def stored_view(recovery_path: Path) -> JobView | None:
    """Return the journal's view of its job, or None if it has none.

    Raises:
        JournalDamagedError: the journal cannot be read.
    """
    content = status.stored_snapshot(recovery_path)
    return None if content is None else JobView.of(content)


def seen_view(recovery_path: Path) -> JobView | None:
    """Return the same for people: which of its processes still run is looked up, as far as they are this host's."""
    content = status.stored_snapshot(recovery_path)
    return None if content is None else JobView.of(status.looked_at(content))


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
        is_joining=content.get("joining", False),
        figures=content.get("figures", {}),  # none from a scheduler of the last release
    )


def _stall(content: dict[str, Any] | None) -> Stall | None:
    if content is None:  # none, or a scheduler of the last release
        return None
    culprits, silent, waiting = (tuple(content[name]) for name in ("culprits", "silent", "waiting"))
    return Stall(content["step"], culprits, silent, waiting)


def _interruption(content: dict[str, Any]) -> Interruption:
    return Interruption(EndKind[content["kind"].upper()], content["step"], content["cause"], content.get("status", 0))
