"""What the scheduler writes down before it speaks; frozen values, no behaviour.

Replaying any prefix of these records gives the state the scheduler had when the last of them was written. Times are
seconds of the scheduler host's boot clock and mean something only together with that host's ``boot_id``.
"""

from __future__ import annotations

from samebits.core.ends import EndKind
from samebits.core.messages import Pairs, Process, RoundId
from samebits.core.point import Cut, Point
from samebits.core.values import Int, Schema, Text, Told, Value

MAX_TERM = 2**30
"""The highest term there can be: the versions of keys begin with it. A scheduler start a second takes 34 years."""


class JobCreated(Value, frozen=True, tag=1):
    """The first record of every journal."""

    job: str
    name: str
    settings: Pairs


class TermStarted(Value, frozen=True, tag=2):
    """A scheduler start; nothing heard before ``at`` can have been heard after it."""

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
    """``node`` holds ``slot`` with this incarnation; supersedes what the node held before."""


class RebuiltSeat(_Seat, frozen=True):
    """The same as a part of :class:`JobRebuilt`, where it is written without a tag."""


class SeatResumed(Value, frozen=True, tag=4):
    """The same incarnation was heard again, in a new term or after it was lost."""

    node: str
    incarnation: Int


class SeatLost(Told, frozen=True, tag=5):
    """The lease of this incarnation ended; its cool-down runs from ``since``."""

    node: str
    incarnation: Int
    since: float
    reason: Text
    status: Int = 0  # not 0: its script ended itself with this exit status


class CauseFound(Told, frozen=True, tag=18):
    """The loss of this member is what has ended its generation; where several were lost at once, each is one.

    Said again of the same member where more became known of it: then that is what counts.
    """

    generation: Int
    rank: Int
    node: str
    process: Process
    step: Int  # that it had completed, as far as it had said
    at: float
    text: Text


class SeatLeft(Value, frozen=True, tag=6):
    """The node left on purpose: it has no cool-down. Once training is finished: its script reached its end."""

    node: str
    incarnation: Int


class SeatQuiet(Value, frozen=True, tag=12):
    """Proven: nothing was accepted from the node after this moment. Written by compaction only."""

    node: str
    boot_id: str
    since: float


class SeatRetired(Value, frozen=True, tag=7):
    """The node's slot was taken away for good and may go to another node."""

    node: str
    slot: Int


class SpareAdmitted(Value, frozen=True, tag=14):
    """``node`` is ready to take a lost node's slot and holds none; supersedes what the node held before."""

    node: str
    incarnation: Int
    session: str
    process: Process


class SlotGiven(Value, frozen=True, tag=15):
    """The spare ``node`` takes ``slot``; its incarnation stays."""

    node: str
    slot: Int


class ReplacementShown(Value, frozen=True, tag=17):
    """``node``, just admitted, has proved that the job's launcher started it; numbers up to its own are spent."""

    node: str


class _Generation(Value, frozen=True):
    generation: Int
    round: RoundId
    members: tuple[tuple[str, Int], ...]
    restore: Point | None
    line: tuple[Cut, ...]
    numerics: Pairs
    slots: tuple[Int, ...]  # rising


class GenerationCommitted(_Generation, frozen=True, tag=8):
    """One committed membership: ``members`` are (node, incarnation) and ``slots`` their slots, both by rank."""


class RebuiltGeneration(_Generation, frozen=True):
    """The same as a part of :class:`JobRebuilt`, where it is written without a tag."""


class JobRebuilt(Value, frozen=True, tag=13):
    """The journal was lost; a majority of the last generation's members said what it held. Supersedes all before it.

    One record, so that it is there whole or not at all.
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
    """Every member's last commit, ``point``, is durable, and all have reported the same digest of it."""

    point: Point


class PointCommitted(Value, frozen=True, tag=16):
    """Every member of the generation holds ``point`` on disk, the same one."""

    point: Point


class RolledBack(Told, frozen=True, tag=19):
    """Members of ``generation`` held another state than the others: the next one starts at ``to`` or before it.

    All had reported the same digest there. ``suspects`` are (node, incarnation): what they hold is taken from others.
    """

    generation: Int
    to: Point
    suspects: tuple[tuple[str, Int], ...]
    step: Int  # the first at which they were seen to differ
    text: Text

    @property
    def reason(self) -> str:
        """Return why the next round opens, in short."""
        nodes = ", ".join(node for node, _ in self.suspects[:8]) + (" and others" if len(self.suspects) > 8 else "")
        who = f"worker {nodes}" if nodes else "the ranks"
        return f"all ranks go back to step {self.to.step}: {who} differed after step {self.step}"


class JobInterrupted(Told, frozen=True, tag=10):
    """The job ended unfinished and can be taken up again."""

    kind: EndKind
    step: Int
    cause: Text
    generation: Int = 0  # the last that was committed
    status: Int = 0  # not 0: the exit status of the script that did not reach its end


class JobFinished(Value, frozen=True, tag=11):
    """Nothing is left to do; the next start on this path begins a new job."""


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
    | JobFinished
    | JobRebuilt
)

SCHEMA: Schema[Record] = Schema(Record)
