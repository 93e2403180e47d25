"""Structs for a job's state at one moment, from its scheduler or its journal.

Everything that displays a job uses these structs: followers, ``samebits status`` and ``ps``, the page, the metrics.
``samebits.service.status`` creates them, and converts them to and from messages. The names in messages and in
``samebits status --json`` are the fields' encoded names. A field that an older scheduler does not send has a default.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from samebits.core.end_kinds import EndKind
from samebits.store.process_identity import ProcessIdentity

NODE_LISTS = ("workers", "spares", "retired")
_OF_A_SCHEDULER = ("ready", "notices", "stall")
_OF_A_JOURNAL = ("losses", "last_losses")
JOURNAL, SCHEDULER = "journal", "scheduler"


class PresenceState(Enum):
    """Whether a worker is present, as seen by its scheduler.

    The last two values are used only if no scheduler is running (``seen_view``).
    """

    ALIVE = "alive"
    LOST = "lost"
    LEFT = "left"
    GONE = "gone"
    UNKNOWN = "unknown"


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A node and its last process.

    Attributes:
        slot: the node's slot; None for a spare, and for a node that lost its slot.
        started_at: when the process started, as in :class:`ProcessIdentity`.
        figures: the worker's figures, by name.
        is_joining: no generation includes it yet.
        waits_for: what must happen before its shard group can join, such as ``slot 3 is filled``.
    """

    node: str
    slot: int | None
    incarnation: int
    presence: PresenceState = msgspec.field(name="state")
    reason: str
    host: str
    pid: int
    started_at: int
    activity: str = "unknown"
    step: int = 0
    figures: dict[str, float] = {}
    is_joining: bool = msgspec.field(name="joining", default=False)
    waits_for: tuple[str, ...] = ()

    @property
    def identity(self) -> ProcessIdentity:
        """Return the identity of the node's last process."""
        return ProcessIdentity(self.pid, self.started_at)


class Interruption(msgspec.Struct, frozen=True):
    """A stop of the job that left it unfinished.

    Attributes:
        label: the label of ``kind``.
        status: the job's exit status if the script set it, else 0.
    """

    label: str = msgspec.field(name="kind")
    step: int
    cause: str
    status: int = 0

    def __post_init__(self) -> None:
        if self.label.upper() not in EndKind.__members__:
            raise ValueError(f"{self.label[:40]!r} is no kind of end")

    @property
    def kind(self) -> EndKind:
        """Return the kind of end."""
        return EndKind[self.label.upper()]

    @property
    def words(self) -> str:
        """Return the predicate for a sentence about the job, such as ``was stopped``."""
        return self.kind.words_with(self.status)

    @property
    def has_fix(self) -> bool:
        """Return whether the cause says what to correct before the job is resumed."""
        return "Fix: " in self.cause


class StandstillView(msgspec.Struct, frozen=True):
    """The nodes to inspect in a standstill. ``silent`` are those that cause it and send no reports."""

    step: int
    culprits: tuple[str, ...]
    silent: tuple[str, ...]
    waiting: tuple[str, ...]


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job at one moment.

    Attributes:
        source: JOURNAL or SCHEDULER.
        restore_step: the step at which this generation began.
        committed_step: the step of the newest point on every member's disk.
        world_size: the current size; in an elastic world, it may differ from ``wanted_size`` (WORKER_NUM).
        joining: how many workers no generation includes yet.
        ready: how many workers have entered the open round; None without an open round, and from a journal.
        seat_free_in_s: how long a process that asked for its seat must still wait; None if no process waits.
        standstill: which worker holds up the others, if there is no progress; ``stall`` has the nodes.
        ailments: a sentence for each fault of a worker's host or device.
        stragglers: a sentence for each worker that is slower than the others.
        notices: the latest warnings, each with its number in this term.
        ended: how this scheduler start ended the job.
        losses, last_losses: how many processes were lost so far, and the reasons for the last losses; only from a
            journal.
        workers: the nodes that have slots. This and the other lists are empty in a pushed snapshot of a large job.
        retired: the nodes that lost their slots to others.
        address: the scheduler's address, if SCHED_HOST names several hosts.
    """

    source: str
    job: str
    name: str
    term: int
    generation: int
    restore_step: int | None
    committed_step: int | None = None
    training_finished: bool
    job_finished: bool
    interruptions: tuple[Interruption, ...]
    phase: str
    world_size: int
    wanted_size: int
    min_world_size: int
    max_world_size: int
    alive: int
    joining: int = 0
    spares_alive: int = 0
    ready: int | None = None
    recovery: bool
    step: int
    seat_free_in_s: float | None = None
    first_cause: str
    standstill: str = ""
    ailments: tuple[str, ...] = ()
    stragglers: tuple[str, ...] = ()
    notices: tuple[tuple[int, str], ...] = ()
    stall: StandstillView | None = None
    ended: Interruption | None
    losses: int = 0
    last_losses: tuple[str, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    spares: tuple[WorkerView, ...] = ()
    retired: tuple[WorkerView, ...] = ()
    address: str = ""

    def __str__(self) -> str:
        return f"job {self.job}" + (f" ({self.name})" if self.name else "")

    def plain(self) -> dict[str, Any]:
        """Return the fields that the source provides, as values for JSON."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        unknown = _OF_A_SCHEDULER if self.from_journal else _OF_A_JOURNAL
        for name in unknown if self.address else (*unknown, "address"):
            del content[name]
        for node in (*content["spares"], *content["retired"]):
            del node["joining"], node["waits_for"]
        return content

    def with_nodes_of(self, earlier: JobView) -> JobView:
        """Return this state with the nodes of an earlier one.

        A pushed snapshot of a large job contains no nodes.
        """
        return msgspec.structs.replace(self, workers=earlier.workers, spares=earlier.spares, retired=earlier.retired)

    @property
    def from_journal(self) -> bool:
        """Return whether no scheduler answered, so that seats are known but processes are not."""
        return self.source == JOURNAL

    @property
    def nodes(self) -> tuple[WorkerView, ...]:
        """Return every node that was ever admitted."""
        return self.workers + self.spares + self.retired

    @property
    def held_back(self) -> int:
        """Return how many of the joining workers wait because their shard group is incomplete."""
        return sum(one.presence is PresenceState.ALIVE and bool(one.waits_for) for one in self.workers)

    @property
    def has_one_size(self) -> bool:
        """Return whether the number of workers is fixed."""
        return self.min_world_size == self.max_world_size

    @property
    def has_room(self) -> bool:
        """Return whether the world can grow: not every slot has a living worker, and the size is not fixed."""
        living = sum(one.presence is PresenceState.ALIVE for one in self.workers)
        return not self.has_one_size and living < self.max_world_size

    def node(self, name: str | None) -> WorkerView | None:
        """Return the entry of one node, or None."""
        return next((one for one in self.nodes if one.node == name), None)

    def is_spare(self, node: str | None) -> bool:
        """Return whether the node is a spare, according to its entry or, if it has none, its number."""
        known = self.node(node)
        return known in self.spares if known is not None else names_spare(node, self.max_world_size)


def names_spare(node: str | None, max_world_size: int) -> bool:
    """Return whether a node with this ID is a spare, according to its number."""
    return node is not None and node.isdecimal() and int(node) >= max_world_size > 0
