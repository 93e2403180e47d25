"""What the scheduler writes down before it speaks; frozen values, no behaviour.

Replaying any prefix of these records gives the state the scheduler had when the last of them was written. Times are
seconds of the scheduler host's boot clock and mean something only together with that host's ``boot_id``.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.core.messages import EndKind, Pairs, Process, RoundId
from runtime.core.point import Cut, Point
from runtime.core.schema import Schema


@dataclass(frozen=True, slots=True)
class JobCreated:
    """The first record of every journal."""

    job: str
    name: str
    settings: Pairs


@dataclass(frozen=True, slots=True)
class TermStarted:
    """A scheduler start; nothing heard before ``at`` can have been heard after it."""

    term: int
    boot_id: str
    at: float


@dataclass(frozen=True, slots=True)
class SeatGranted:
    """``node`` holds ``slot`` with this incarnation; supersedes what the node held before."""

    node: str
    slot: int
    incarnation: int
    session: str
    process: Process


@dataclass(frozen=True, slots=True)
class SeatResumed:
    """The same incarnation was heard again, in a new term or after it was lost."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SeatLost:
    """The lease of this incarnation ended; its cool-down runs from ``since``."""

    node: str
    incarnation: int
    since: float
    reason: str


@dataclass(frozen=True, slots=True)
class SeatLeft:
    """The node left on purpose: it has no cool-down."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SeatQuiet:
    """Proven: nothing was accepted from the node after this moment. Written by compaction only."""

    node: str
    boot_id: str
    since: float


@dataclass(frozen=True, slots=True)
class SeatRetired:
    """The node's slot was taken away for good and may go to another node."""

    node: str
    slot: int


@dataclass(frozen=True, slots=True)
class SpareAdmitted:
    """``node`` is ready to take a lost node's slot and holds none; supersedes what the node held before."""

    node: str
    incarnation: int
    session: str
    process: Process


@dataclass(frozen=True, slots=True)
class SlotGiven:
    """The spare ``node`` takes ``slot``; its incarnation stays."""

    node: str
    slot: int


@dataclass(frozen=True, slots=True)
class ReplacementShown:
    """``node``, just admitted, has proved that the job's launcher started it; numbers up to its own are spent."""

    node: str


@dataclass(frozen=True, slots=True)
class GenerationCommitted:
    """One committed membership: ``members`` are (node, incarnation) and ``slots`` their slots, both by rank."""

    generation: int
    round: RoundId
    members: tuple[tuple[str, int], ...]
    restore: Point | None
    line: tuple[Cut, ...]
    numerics: Pairs
    slots: tuple[int, ...]  # rising


@dataclass(frozen=True, slots=True)
class JobRebuilt:
    """The journal was lost; a majority of the last generation's members said what it held. Supersedes all before it.

    One record, so that it is there whole or not at all.
    """

    job: str
    name: str
    settings: Pairs
    term: int
    boot_id: str
    at: float
    seats: tuple[SeatGranted, ...]
    generation: GenerationCommitted
    final: Point | None


@dataclass(frozen=True, slots=True)
class TrainingFinished:
    """Every member's last commit, ``point``, is durable, and all have reported the same digest of it."""

    point: Point


@dataclass(frozen=True, slots=True)
class PointCommitted:
    """Every member of the generation holds ``point`` on disk, the same one."""

    point: Point


@dataclass(frozen=True, slots=True)
class JobInterrupted:
    """The job ended unfinished and can be taken up again."""

    kind: EndKind
    step: int
    cause: str
    generation: int = 0  # the last that was committed


@dataclass(frozen=True, slots=True)
class JobFinished:
    """Nothing is left to do; the next start on this path begins a new job."""


Record = (
    JobCreated
    | TermStarted
    | SeatGranted
    | SeatResumed
    | SeatLost
    | SeatLeft
    | SeatQuiet
    | SeatRetired
    | SpareAdmitted
    | SlotGiven
    | ReplacementShown
    | PointCommitted
    | GenerationCommitted
    | TrainingFinished
    | JobInterrupted
    | JobFinished
    | JobRebuilt
)

SCHEMA = Schema(
    {
        1: JobCreated,
        2: TermStarted,
        3: SeatGranted,
        4: SeatResumed,
        5: SeatLost,
        6: SeatLeft,
        7: SeatRetired,
        8: GenerationCommitted,
        9: TrainingFinished,
        10: JobInterrupted,
        11: JobFinished,
        12: SeatQuiet,
        13: JobRebuilt,
        14: SpareAdmitted,
        15: SlotGiven,
        16: PointCommitted,
        17: ReplacementShown,
    }
)
