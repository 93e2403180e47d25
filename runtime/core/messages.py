"""What the scheduler and its workers say to each other; frozen values, no behaviour.

A worker's messages after admission carry its :class:`Credential`; the scheduler compares it with the seat before it
looks at anything else. Everything a worker says is a *report* that may be repeated, late or twice: the heartbeat is the
whole truth about one agent, so a lost message is fixed by the next heartbeat and no message needs an acknowledgement.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from runtime.core.point import Point
from runtime.core.schema import Schema

PROTOCOL = 3
MAX_SAVED_POINTS = 8
MAX_STOPPED_BY = 200
"""Characters of ``StopJob.by``; a scheduler takes no longer one."""
MAX_DIGESTS = 12
MAX_PARTS = 2000
MAX_PART_CHARS = 200
FINAL = -1
"""In the place of a commit's number: the state with which the training function has returned."""

Pairs = tuple[tuple[str, str], ...]


class Activity(enum.IntEnum):
    """What a seated worker is doing."""

    SEATED = 1  # between init() and elastic.run
    WAITING = 2  # in rendezvous: it wants a generation
    FORMING = 3  # told its generation; building the group and restoring
    TRAINING = 4
    DONE = 5  # the user's function returned and the last commit is durable
    FINISHED = 6  # told that training is finished


class Refusal(enum.IntEnum):
    """Why a process is not admitted."""

    ALIVE = 1  # the previous session of this node still holds its lease
    COOLING_DOWN = 2
    FULL = 3
    OTHER_JOB = 4
    OTHER_SETTINGS = 5
    PROTOCOL = 6
    NUMERICS = 7
    RECOVERY_OFF = 8  # a known node comes back where ENABLE_RECOVERY=0
    STOPPING = 9


class EndKind(enum.IntEnum):
    """How a job ends for everybody."""

    FINISHED = 1
    STOPPED = 2  # the user asked; recoverable
    INTERRUPTED = 3  # no worker is left; recoverable
    FORMATION_TIMEOUT = 4  # a round waited TOPO_TIMEOUT; recoverable
    FAILED = 5  # ENABLE_RECOVERY=0 and a process died
    SCRIPT_FAILED = 6  # no worker is left, and most were ended by an error of the script; recoverable
    UNTRAINED = 7  # every worker's program came to its end, and none has trained with the others
    UNEQUAL = 8  # the ranks did not hold the same state


class PartKind(enum.IntEnum):
    """What a part of a rank's state is; the lower come first where the first difference is named."""

    STEPS = 1  # completed steps, or averages
    SAMPLER = 2  # an ElasticSampler's position
    TRAINED = 3  # a parameter of an optimizer, or one of its moments
    UNTRAINED = 4  # a parameter that no optimizer has
    SHARED = 5  # what a state of the user's own marks as shared
    LOOSE = 6  # all else: it may differ


class RoundId(NamedTuple):
    """One attempt to form a generation; never reused, because ``term`` is durable and rises. Ordered like a point."""

    term: int
    number: int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


class Process(NamedTuple):
    """Where a session runs."""

    host: str  # its name and, behind a "#", what tells it from another host of that name
    pid: int
    started_at: int  # clock ticks after boot, so that a reused pid is told apart
    device: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host.partition('#')[0]}" if self.pid else "process unknown"


@dataclass(frozen=True, slots=True)
class Credential:
    """Who speaks: compared with the seat before anything else is read."""

    job: str
    node: str
    session: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What a member of a generation knows of its job: from it a lost journal can be made anew."""

    term: int  # the last it was told
    generation: int
    round: RoundId  # that made this generation
    slot: int
    world_size: int
    restore: Point | None  # what the generation started from
    final: Point | None  # training is finished there
    rank: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is, or would be, in a generation."""

    slot: int
    rank: int  # the slot's index among the members' slots
    world_size: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy, in its keeper's memory, of the point that the rank of ``slot`` saved."""

    slot: int
    point: Point


class Part(NamedTuple):
    """One part of a rank's state; ``value`` is text that can be shown, or, of a tensor, its hash in hex."""

    kind: PartKind
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Digest:
    """What a rank's state was at one of its commits, in a few bytes."""

    point: Point
    commits: int  # of the line, up to this one: there may be several after one step; FINAL: see there
    shared: bytes  # of what must be equal on every rank
    loose: bytes = b""  # of what may differ; b"": it was not looked at
    averages: bool = True  # a wrapper that averages gradients is in use
    parts: tuple[Part, ...] = ()  # at most MAX_PARTS, and only where they were asked for


@dataclass(frozen=True, slots=True)
class Loan:
    """Whom a keeper sends a copy to, and whose point it is."""

    rank: int
    slot: int


@dataclass(frozen=True, slots=True)
class KeptCommit:
    """A commit at which a page has the generators' states."""

    point: Point
    commits: int  # of the line, up to it


@dataclass(frozen=True, slots=True)
class Page:
    """What outlived a process, or was read by it, of its slot's generators: at its last commits, and after them."""

    commits: tuple[KeptCommit, ...]
    generation: int  # that the step after the last commit is in
    next_commit: int  # how many commits there will be with that step's
    collectives: int  # launched in that step
    draws_late: bool  # it has ever drawn between a step's last collective and its commit


@dataclass(frozen=True, slots=True)
class LiveStep:
    """What a process knows of the step that led to the commit in its memory."""

    collectives: int
    draws_late: bool  # something was drawn between the last of them and the commit


# ---- worker → scheduler -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A process asks for a seat (``incarnation`` 0) or resumes the one it holds. Idempotent by session."""

    protocol: int
    job: str  # "" where no job was ever told
    job_name: str
    node: str
    session: str
    incarnation: int
    process: Process
    settings: Pairs
    standing: Standing | None = None  # of a process that is or was a member of a generation
    proof: bytes = b""  # of a replacement: that the job's own launcher has started this session


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The whole truth about one agent. Sent every HEARTBEAT_INTERVAL and at once on every change."""

    sender: Credential
    term: int  # of the scheduler start that it believes it talks to
    activity: Activity
    generation: int  # the last one it was told; 0 before the first
    round: RoundId | None  # the last round it joined
    step: int  # completed optimizer steps


@dataclass(frozen=True, slots=True)
class Join:
    """The sender has left its old group and waits; these are the restore points it holds."""

    sender: Credential
    round: RoundId
    points: tuple[Point, ...]  # verified, on its disk
    own_parts: bool  # it has state that only its own points hold (saved RNG state)
    numerics: Pairs
    blob: bytes = b""  # its contribution to the address map of the generation that this round makes; b"": it follows
    place: Place | None = None  # what ``blob`` was made for; it is void in any other place
    live: Point | None = None  # the commit that it holds in memory, whole
    looked: bool = True  # ``points`` is what its disk holds; else it has not looked, which takes a while
    commits: int = 0  # of the line that ``live`` is on: which of several commits after one step it is
    copies: tuple[Copy, ...] = ()  # verified, that it keeps for others; as ``points``, of who has looked
    page: Page | None = None  # of its slot, where the generators' states are all that only its own points hold
    live_step: LiveStep | None = None  # that led to ``live``


@dataclass(frozen=True, slots=True)
class Publish:
    """The sender's contribution to the generation's address map, where the join did not bring it, or again."""

    sender: Credential
    generation: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class SavedPoints:
    """What the sender's disk holds, verified: its newest points, all of them each time. Said again when it returns."""

    sender: Credential
    points: tuple[Point, ...]  # at most MAX_SAVED_POINTS


@dataclass(frozen=True, slots=True)
class Digests:
    """What the sender's state was: all it remembers, each time. Said again when it returns, and while it is done."""

    sender: Credential
    digests: tuple[Digest, ...]  # at most MAX_DIGESTS


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why the sender is about to die: the cause everybody else is shown."""

    sender: Credential
    text: str
    step: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender gives up its seat. ``on_purpose``: its program has done its part, or it was told to stop."""

    sender: Credential
    on_purpose: bool
    text: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The process of another session, on the sender's host, is dead, whatever its connection says."""

    sender: Credential
    session: str


# ---- anybody → scheduler ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Asks for one :class:`Status`, or, with ``follow``, for one now and one at every change."""

    follow: bool


@dataclass(frozen=True, slots=True)
class StopJob:
    """Asks the scheduler to end the job gracefully; ``by`` is told to everybody."""

    by: str  # printable, of at most MAX_STOPPED_BY characters


# ---- scheduler → worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """The session has the seat. Sent only after the seat is durable."""

    session: str
    job: str
    term: int
    slot: int | None  # None: a spare
    incarnation: int
    world_size: int
    finished: Point | None  # training is over; this is the final point


@dataclass(frozen=True, slots=True)
class Pending:
    """The session is known; its slot is decided when the house is full."""

    session: str
    term: int
    registered: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Not admitted. ``retry_after_s`` is the time until admission is possible; 0 where waiting cannot help."""

    session: str
    refusal: Refusal
    retry_after_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """The seat belongs to a later incarnation, or to another node; the receiver must leave."""

    job: str
    session: str
    incarnation: int  # the receiver's
    text: str
    may_return: bool = False  # under a new session: nobody else has its node id, and the job has use for it


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """Leave whatever generation you are in and join this round."""

    job: str
    term: int
    incarnation: int
    round: RoundId
    text: str  # why
    missing: str  # the nodes that are not there; "" where all are
    place: Place | None = None  # the receiver's, if the round closes with those it is opened for; None: the one it has
    look: bool = False  # nobody's memory holds enough: join with what the disk holds
    gently: bool = False  # nobody is lost, the world only grows: leave at the next commit
    committed: Point | None = None  # every member held it; with ``look``: what is older need not be looked at


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """The generation is durable; this is the receiver's place in it."""

    job: str
    term: int
    incarnation: int
    generation: int
    round: RoundId
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restore: Point | None  # None: nothing was ever committed; start from rank 0's initial state
    source: int  # the rank whose copy of the point the receiver loads; its own rank where it holds it
    serves: tuple[int, ...]  # the ranks the receiver sends its copy to
    text: str
    slot: int
    lends: tuple[Loan, ...] = ()  # the copies the receiver sends; to its own rank: it loads that copy itself
    buddy: int | None = None  # the rank that keeps copies of the receiver's newest points
    is_apart: bool = False  # on another host
    keeps: tuple[int, ...] = ()  # the slots whose copies the receiver keeps
    watches: int | None = None  # the rank on the receiver's host whose death it reports
    by_page: bool = False  # the receiver's generators are as its page has them


@dataclass(frozen=True, slots=True)
class AddressMap:
    """All members' contributions, in rank order; sent when the last one is in."""

    job: str
    term: int
    generation: int
    blobs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CommittedPoint:
    """Every member of the generation holds this point on disk: older ones may be deleted."""

    job: str
    term: int
    generation: int  # the last when it was said: the next one's line may have left the point behind
    point: Point


@dataclass(frozen=True, slots=True)
class Explain:
    """The ranks differ there: say the digest of that commit again, with its parts."""

    job: str
    term: int
    point: Point
    commits: int


@dataclass(frozen=True, slots=True)
class Finished:
    """TrainingFinished is journaled: ``elastic.run`` may return."""

    job: str
    term: int
    point: Point


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over for everybody, for this reason."""

    job: str
    term: int
    kind: EndKind
    text: str


# ---- scheduler → anybody ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of the job, as ``service.status`` packs it, for followers and ``samebits status``."""

    packed: bytes


FromWorker = Register | Heartbeat | Join | Publish | LastWords | Leave | SavedPoints | PeerGone | Digests
FromScheduler = (
    Admitted
    | Pending
    | Refused
    | Fenced
    | RoundOpened
    | GenerationStarted
    | AddressMap
    | Finished
    | EndJob
    | Status
    | CommittedPoint
    | Explain
)

SCHEMA = Schema(
    {
        1: Register,
        2: Heartbeat,
        3: Join,
        4: Publish,
        5: LastWords,
        6: Leave,
        7: StatusQuery,
        8: StopJob,
        9: SavedPoints,
        10: PeerGone,
        11: Digests,
        20: Admitted,
        21: Pending,
        22: Refused,
        23: Fenced,
        24: RoundOpened,
        25: GenerationStarted,
        26: AddressMap,
        27: Finished,
        28: EndJob,
        29: Status,
        30: CommittedPoint,
        31: Explain,
    }
)
