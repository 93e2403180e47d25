"""Journal records: frozen values that the scheduler writes before it sends anything.

Replaying the first n records gives the scheduler's state after the n-th record. Times are in seconds of the scheduler
host's boot clock and are valid only together with that host's ``boot_id``.
"""

from __future__ import annotations

from samebits.core.end_kinds import EndKind
from samebits.core.messages import Pairs, Process, RoundId, Sharding
from samebits.core.point import Cut, Point
from samebits.core.values import Int, Schema, Text, TextValue, Value

MAX_TERM = 2**30
"""Highest term; versions of keys begin with it. One scheduler start per second takes 34 years to reach it."""


class JobCreated(Value, frozen=True, tag=1):
    """First record of every journal."""

    job: str
    name: str
    settings: Pairs


class TermStarted(Value, frozen=True, tag=2):
    """The scheduler has started. All messages accepted in earlier terms arrived before ``at``."""

    term: Int
    boot_id: str
    at: float


class _Seat(Value, frozen=True):
    node: str
    slot: Int
    incarnation: Int
    session: str
    process: Process


class SeatGranted(_Seat, frozen=True, tag=3):
    """``node`` holds ``slot`` with this incarnation. Replaces whatever the node held before."""


class RebuiltSeat(_Seat, frozen=True):
    """A :class:`SeatGranted` without a tag, for use inside :class:`JobRebuilt`."""


class SeatResumed(Value, frozen=True, tag=4):
    """The same incarnation has sent a message again, in a new term or after its loss."""

    node: str
    incarnation: Int


class SeatLost(TextValue, frozen=True, tag=5):
    """The lease of this incarnation has ended. Its cool-down starts at ``since``."""

    node: str
    incarnation: Int
    since: float
    reason: Text
    status: Int = 0  # not 0: the script exited with this status


class CauseFound(TextValue, frozen=True, tag=18):
    """The loss of a member that ended its generation. If several were lost at once, each has a record.

    A later record about the same member, with more details, replaces the earlier one.
    """

    generation: Int
    rank: Int
    node: str
    process: Process
    step: Int  # last completed step that it reported
    at: float
    text: Text


class SeatLeft(Value, frozen=True, tag=6):
    """The node has left on purpose, so it has no cool-down. After training: its script has reached its end."""

    node: str
    incarnation: Int


class SeatQuiet(Value, frozen=True, tag=12):
    """The cool-down of the node starts at ``since``, when its last message was accepted.

    Written only when the journal is compacted.
    """

    node: str
    boot_id: str
    since: float


class SeatRetired(Value, frozen=True, tag=7):
    """The node has lost its slot for good, and another node may take it."""

    node: str
    slot: Int


class SpareAdmitted(Value, frozen=True, tag=14):
    """``node`` is a spare, so it has no slot. Replaces whatever the node held before."""

    node: str
    incarnation: Int
    session: str
    process: Process


class SlotGiven(Value, frozen=True, tag=15):
    """The spare ``node`` takes ``slot``. Its incarnation does not change."""

    node: str
    slot: Int


class ReplacementShown(Value, frozen=True, tag=17):
    """``node`` has proved that the job's launcher started it. Numbers up to its own cannot be used again."""

    node: str


class _Generation(Value, frozen=True):
    generation: Int
    round: RoundId
    members: tuple[tuple[str, Int], ...]
    restore: Point | None
    line: tuple[Cut, ...]
    numerics: Pairs
    slots: tuple[Int, ...]  # ascending
    sharding: Sharding | None = None  # the whole mesh, if the world shrinks by its shard groups


class GenerationCommitted(_Generation, frozen=True, tag=8):
    """A new generation: ``members`` are (node, incarnation) and ``slots`` their slots, both by rank."""


class RebuiltGeneration(_Generation, frozen=True):
    """A :class:`GenerationCommitted` without a tag, for use inside :class:`JobRebuilt`."""


class JobRebuilt(Value, frozen=True, tag=13):
    """A majority of the last generation's members has restored the content of a lost journal.

    Replaces all earlier records. It is a single record so that the rebuild is atomic.
    """

    job: str
    name: str
    settings: Pairs
    term: Int
    boot_id: str
    at: float
    seats: tuple[RebuiltSeat, ...]
    generation: RebuiltGeneration
    final: Point | None


class TrainingFinished(Value, frozen=True, tag=9):
    """Every member has a durable copy of its last commit, ``point``, and all digests are equal."""

    point: Point


class PointCommitted(Value, frozen=True, tag=16):
    """Every member of the generation has the same ``point`` on disk."""

    point: Point


class RolledBack(TextValue, frozen=True, tag=19):
    """The ranks of ``generation`` differed, so the next generation starts at ``to`` or earlier.

    ``to`` is the last point at which all digests were equal. ``suspects`` are the (node, incarnation) pairs that take
    their state from other ranks.
    """

    generation: Int
    to: Point
    suspects: tuple[tuple[str, Int], ...]
    step: Int  # the first at which a difference was seen
    text: Text

    @property
    def reason(self) -> str:
        """Return a short reason for the next round."""
        nodes = ", ".join(node for node, _ in self.suspects[:8]) + (" and others" if len(self.suspects) > 8 else "")
        who = f"worker {nodes}" if nodes else "the ranks"
        return f"all ranks roll back to step {self.to.step}: {who} differed after step {self.step}"


class JobInterrupted(TextValue, frozen=True, tag=10):
    """The job has ended unfinished and can be resumed."""

    kind: EndKind
    step: Int
    cause: Text
    generation: Int = 0  # the last committed one
    status: Int = 0  # not 0: exit status of the script that did not reach its end


class StopPlanned(TextValue, frozen=True, tag=20):
    """An operator has asked the job to stop after a commit that every rank makes.

    A later record replaces the earlier one. A new generation must agree again, because it counts its own commits.
    """

    by: Text
    commits: Int = 0  # the commit of the last generation, counted from 1, after which all members stop; 0: not agreed


class JobFinished(Value, frozen=True, tag=11):
    """The job is complete. The next start with this path begins a new job."""


Record = (
    JobCreated
    | TermStarted
    | SeatGranted
    | SeatResumed
    | SeatLost
    | CauseFound
    | SeatLeft
    | SeatQuiet
    | SeatRetired
    | SpareAdmitted
    | SlotGiven
    | ReplacementShown
    | PointCommitted
    | RolledBack
    | GenerationCommitted
    | TrainingFinished
    | JobInterrupted
    | StopPlanned
    | JobFinished
    | JobRebuilt
)

SCHEMA: Schema[Record] = Schema(Record)
