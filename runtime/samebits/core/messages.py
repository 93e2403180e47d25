"""What the scheduler and its workers say to each other; frozen values, no behaviour.

A worker's messages after admission carry its :class:`Credential`; the scheduler compares it with the seat before it
looks at anything else. Everything a worker says may be repeated, late or twice: the heartbeat is the whole truth about
one agent, so a lost message is fixed by the next heartbeat and no message needs an acknowledgement. What its sensors
find is in ``core.reports``, and comes in one envelope (:class:`Said`).
"""

from __future__ import annotations

import enum
from typing import Annotated, NamedTuple

import msgspec

from samebits.core.ends import EndKind
from samebits.core.hangs import Doing
from samebits.core.point import Point
from samebits.core.reports import Report
from samebits.core.values import (
    MAX_NODE_CHARS,
    Count,
    Few,
    Host,
    Id,
    Int,
    Many,
    Meta,
    Name,
    Node,
    Schema,
    Seconds,
    Text,
    Told,
    Value,
    line,
)
from samebits.errors import ProtocolError

PROTOCOL = 4
MAX_STOPPED_BY = 200
"""Characters of ``StopJob.by``; a scheduler takes no longer one."""
MAX_DECISION = 400
"""Characters of ``Decision.text``."""
MAX_END_CHARS = 400
"""Characters of ``ProcessEnded.text`` and ``ProcessEnded.error``."""
MAX_FOLDER_CHARS = 400
"""Characters of ``Holdings.folder``; a longer path is cut."""
MAX_SETTINGS = 64
PROOF_BYTES = 32
MAX_KEY_BYTES = 256  # of a key in UTF-8
MAX_VALUE_BYTES = 1 << 16  # of a key's value as msgpack

Pairs = Few[tuple[str, str]]
Settings = Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=MAX_SETTINGS)]
OwnNode = Annotated[str, line(MAX_NODE_CHARS, least=1, pattern="^[^ /]*$")]
"""A node id as a process may give it to itself: it names a folder."""
Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
KeyValue = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]


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


class KeyOp(enum.IntEnum):
    """What a call does to a key."""

    GET = 1
    PUT = 2
    DELETE = 3
    ADD = 4
    COMPARE_AND_SET = 5
    WAIT = 6  # until the key is there, at a version above the call's


class KeyOutcome(enum.IntEnum):
    """What became of a call."""

    DONE = 1
    ABSENT = 2  # there is no such key; nothing was changed
    DIFFERS = 3  # the key is at another version; nothing was changed
    REFUSED = 4  # a bound is met, or the value is no number; nothing was changed


class RoundId(NamedTuple):
    """One attempt to form a generation; never reused, because ``term`` is durable and rises. Ordered like a point."""

    term: Int
    number: Int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


class Process(NamedTuple):
    """Where a session runs."""

    host: Host  # its name and, behind a "#", what tells it from another host of that name
    pid: Int
    started_at: Int  # clock ticks after boot, so that a reused pid is told apart
    device: Id

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host.partition('#')[0]}" if self.pid else "process unknown"


class Credential(Value, frozen=True):
    """Who speaks: compared with the seat before anything else is read."""

    job: Id
    node: Node
    session: Id
    incarnation: Int


class Standing(Value, frozen=True):
    """What a member of a generation knows of its job: from it a lost journal can be made anew."""

    term: Int  # the last it was told
    generation: Int
    round: RoundId  # that made this generation
    slot: Int
    world_size: Int
    restore: Point | None  # what the generation started from
    final: Point | None  # training is finished there
    rank: Int


class Place(Value, frozen=True):
    """Where a worker is, or would be, in a generation."""

    slot: Int
    rank: Int  # the slot's index among the members' slots
    world_size: Int


class Copy(Value, frozen=True):
    """A copy, in its keeper's memory, of the point that the rank of ``slot`` saved."""

    slot: Int
    point: Point


class Loan(Value, frozen=True):
    """Whom a keeper sends a copy to, and whose point it is."""

    rank: Int
    slot: Int


class KeptCommit(Value, frozen=True):
    """A commit at which a page has the generators' states."""

    point: Point
    commits: Int  # of the line, up to it


class Page(Value, frozen=True):
    """What outlived a process, or was read by it, of its slot's generators: at its last commits, and after them."""

    commits: Few[KeptCommit]
    generation: Int  # that the step after the last commit is in
    next_commit: Int  # how many commits there will be with that step's
    collectives: Int  # launched in that step
    draws_late: bool  # it has ever drawn between a step's last collective and its commit


class OrphanedPage(Value, frozen=True):
    """The page of a rank whose process is gone, read by another of its host, who lends it."""

    slot: Int
    page: Page


class PageLoan(Value, frozen=True):
    """A page that one rank of a generation sends to another."""

    lender: Int
    rank: Int
    slot: Int


class LiveStep(Value, frozen=True):
    """What a process knows of the step that led to the commit in its memory."""

    collectives: Int
    draws_late: bool  # something was drawn between the last of them and the commit


class Holdings(Value, frozen=True):
    """What a process brings into a round: made by the process, kept by its agent, and weighed by ``restore.choose``."""

    points: Few[Point]  # verified, on its disk
    own_parts: bool  # it has state that only its own points hold (saved RNG state)
    numerics: Pairs
    blob: bytes = b""  # its part of the address map of the generation that the round makes; b"": it follows
    place: Place | None = None  # what ``blob`` was made for; it is void in any other place
    live: Point | None = None  # the commit that it holds in memory, whole
    looked: bool = True  # ``points`` is what its disk holds; else it has not looked, which takes a while
    commits: Int = 0  # of the line that ``live`` is on: which of several commits after one step it is
    copies: Few[Copy] = ()  # verified, that it keeps for others; as ``points``, only if it has looked
    page: Page | None = None  # of its slot, where the generators' states are all that only its own points hold
    live_step: LiveStep | None = None  # that led to ``live``
    orphaned_pages: Few[OrphanedPage] = ()  # on its host
    back_to: Point | None = None  # it has gone back as far, as the round had asked
    folder: Annotated[str, line(MAX_FOLDER_CHARS)] = ""  # where it looked for ``points``
    failed_with: Annotated[str, Meta(max_length=MAX_END_CHARS)] = ""  # the runtime's error that ended its generation


# ---- worker → scheduler -------------------------------------------------------------------------------------------


class Register(Value, frozen=True, tag=1):
    """A process asks for a seat (``incarnation`` 0) or resumes the one it holds. Idempotent by session."""

    protocol: Int
    job: Id  # "" where no job was ever told
    job_name: Name
    node: OwnNode
    session: Id
    incarnation: Count
    process: Process
    settings: Settings
    standing: Standing | None = None  # of a process that is or was a member of a generation
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)] = b""  # of a replacement: the job's launcher started it
    term: Int = 0  # the last of this job that it was told; a spare has no standing that would say it


class Heartbeat(Value, frozen=True, tag=2):
    """The whole truth about one agent. Sent every HEARTBEAT_INTERVAL and at once on every change."""

    sender: Credential
    term: Int  # of the scheduler start that it believes it talks to
    activity: Activity
    generation: Int  # the last one it was told; 0 before the first
    round: RoundId | None  # the last round it joined
    step: Int  # completed optimizer steps


class Join(Value, frozen=True, tag=3):
    """The sender has left its old group and waits in this round, with what it brings."""

    sender: Credential
    round: RoundId
    holdings: Holdings


class Publish(Value, frozen=True, tag=4):
    """The sender's contribution to the generation's address map, where the join did not bring it, or again."""

    sender: Credential
    generation: Int
    blob: bytes


class Said(Value, frozen=True, tag=48):
    """The envelope of a report: what the sender's sensors have found, and where the sender was as it was sent."""

    sender: Credential
    body: Report
    generation: Int = 0  # the last that the sender was told
    step: Int = 0  # completed optimizer steps


class Leave(Told, frozen=True, tag=6):
    """The sender gives up its seat. ``on_purpose``: its program has done its part, or it was told to stop."""

    sender: Credential
    on_purpose: bool
    text: Text
    step: Int = 0  # completed ones; 0 of an earlier release
    status: Annotated[int, Meta(ge=0, le=255)] | None = 0  # its process's exit status; None: it cannot tell


class KeyCall(Value, frozen=True, tag=40):
    """A call to the keys that the scheduler keeps. Said again, under its number, until it is answered.

    A scheduler of a release that has no keys counts it as nonsense and does not answer: it is said only where the
    script calls ``samebits.kv``.
    """

    sender: Credential
    number: Count  # of this session's calls, from 1 on
    floor: Count  # the lowest of its calls that change something and are not answered; what is below is done with
    op: KeyOp
    key: Key
    value: KeyValue = b""  # of PUT and COMPARE_AND_SET, one msgpack value
    version: Count = 0  # COMPARE_AND_SET and DELETE: what the key must be at (0: absent; anything). WAIT: see there
    amount: Int = 0  # of ADD
    is_durable: bool = False  # from now on the key outlives the scheduler's process
    term: Int = 0  # of the scheduler that it is said to: to another one it comes late, and is said again. 0: to any


# ---- anybody → scheduler ------------------------------------------------------------------------------------------


class StatusQuery(Value, frozen=True, tag=7):
    """Asks for one :class:`Status`, or, with ``follow``, for one now and one at every change."""

    follow: bool


class StopJob(Value, frozen=True, tag=8):
    """Asks the scheduler to end the job gracefully; ``by`` is told to everybody."""

    by: Annotated[str, line(MAX_STOPPED_BY)]


class Decision(Value, frozen=True, tag=13):
    """What somebody around the job has decided, for its history; these nodes are to leave at their next commit.

    Said again, with no text, until they have left.
    """

    text: Annotated[str, line(MAX_DECISION)]  # with its reason
    drain: Few[Node] = ()


class ProcessSeen(Value, frozen=True, tag=15):
    """What is seen of a worker's process by whoever follows the job on its host; nothing but words follows from it."""

    node: Node
    host: Host
    pid: Int
    started_at: Int  # as of a Process
    doing: Doing
    quiet_s: Seconds | None  # since its control thread last ran; None: that is not to be seen


class Restarting(Value, frozen=True, tag=16):
    """A supervisor is starting workers that have not registered yet.

    It repeats this while that lasts; the job is not given up for want of workers until 2 × NODE_TIMEOUT after the last
    one.
    """


class ProcessEnded(Value, frozen=True, tag=14):
    """How a worker's process has ended, by who has started it; nothing but words follows from it."""

    node: Node
    host: Host
    pid: Int
    started_at: Int  # as of a Process
    text: Annotated[str, line(MAX_END_CHARS)]  # ``was killed by signal 11 (SIGSEGV)``
    status: Annotated[int, Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, Meta(ge=1, le=127)] | None = None
    error: Annotated[str, line(MAX_END_CHARS)] = ""  # the last that its log tells of one
    is_failure: bool = False  # the error is an exception of the script's own
    is_out_of_memory: bool = False


# ---- scheduler → worker -------------------------------------------------------------------------------------------


class Admitted(Value, frozen=True, tag=20):
    """The session has the seat. Sent only after the seat is durable."""

    session: str
    job: str
    term: Int
    slot: Int | None  # None: a spare
    incarnation: Int
    world_size: Int
    finished: Point | None  # training is over; this is the final point
    generation: Int = 0  # the last that was committed


class Pending(Value, frozen=True, tag=21):
    """The session is known; its slot is decided when the house is full."""

    session: str
    term: Int
    registered: Int
    world_size: Int


class Refused(Told, frozen=True, tag=22):
    """Not admitted. ``retry_after_s`` is the time until admission is possible; 0 where waiting cannot help."""

    session: str
    refusal: Refusal
    retry_after_s: float
    text: Text
    job: Id = ""  # "": of a peer that speaks another protocol, whatever it asked for
    term: Int = 0


class Fenced(Told, frozen=True, tag=23):
    """The seat belongs to a later incarnation, or to another node; the receiver must leave."""

    job: str
    session: str
    incarnation: Int  # the receiver's
    text: Text
    may_return: bool = False  # under a new session: nobody else has its node id, and the job has use for it
    term: Int = 0


class RoundOpened(Told, frozen=True, tag=24):
    """Leave whatever generation you are in and join this round."""

    job: str
    term: Int
    incarnation: Int
    round: RoundId
    text: Text  # why
    missing: Text  # the nodes that are not there; "" where all are
    place: Place | None = None  # the receiver's, if the round closes with those it is opened for; None: the one it has
    look: bool = False  # nobody's memory holds enough: join with what the disk holds
    gently: bool = False  # nobody is lost, the world only grows: leave at the next commit
    committed: Point | None = None  # every member held it; with ``look``: what is older need not be looked at
    back_to: Point | None = None  # what is newer is not to be relied on: join with what was kept of this, or is older


class GenerationStarted(Told, frozen=True, tag=25):
    """The generation is durable; this is the receiver's place in it."""

    job: str
    term: Int
    incarnation: Int
    generation: Int
    round: RoundId
    rank: Int
    world_size: Int
    local_rank: Int
    local_world_size: Int
    restore: Point | None  # None: nothing was ever committed; start from rank 0's initial state
    source: Int  # the rank whose copy of the point the receiver loads; its own rank where it holds it
    serves: Many[Int]  # the ranks the receiver sends its copy to
    text: Text
    slot: Int
    lends: Many[Loan] = ()  # the copies the receiver sends; to its own rank: it loads that copy itself
    buddy: Int | None = None  # the rank that keeps copies of the receiver's newest points
    is_apart: bool = False  # on another host
    keeps: Many[Int] = ()  # the slots whose copies the receiver keeps
    watches: Int | None = None  # the rank on the receiver's host whose death it reports
    by_page: bool = False  # the receiver's generators are as its page has them
    page_loans: Many[PageLoan] = ()  # all of the generation: the pages that lie on another host than their rank


class AddressMap(Value, frozen=True, tag=26):
    """All members' contributions, in rank order; sent when the last one is in."""

    job: str
    term: Int
    generation: Int
    blobs: Many[bytes]


class CommittedPoint(Value, frozen=True, tag=30):
    """Every member of the generation holds this point on disk: older ones may be deleted."""

    job: str
    term: Int
    generation: Int  # the last when it was said: the next one's line may have left the point behind
    point: Point


class Explain(Value, frozen=True, tag=31):
    """The ranks differ there: say the digest of that commit again, with its parts."""

    job: str
    term: Int
    point: Point
    commits: Int


class EqualPoint(Value, frozen=True, tag=34):
    """All ranks have reported the same digest there: older copies in memory are not needed any more."""

    job: str
    term: Int
    generation: Int
    point: Point


class GiveUp(Told, frozen=True, tag=32):
    """The receiver's main thread does not come on: the process is to say where it is, leave its seat and end."""

    job: str
    term: Int
    incarnation: Int
    text: Text  # why


class KeyAnswer(Told, frozen=True, tag=41):
    """The answer to a :class:`KeyCall`; what it says was changed, and is durable where the key is, is so."""

    session: Id
    number: Count
    term: Int  # an earlier one's is void: what was not durable, and that nothing was done, is forgotten with it
    outcome: KeyOutcome
    version: Count = 0  # of the key now, or of its deletion
    value: KeyValue = b""  # GET, WAIT: the key's; ADD: the sum
    text: Text = ""  # why it was refused


class Depart(Told, frozen=True, tag=33):
    """The receiver is asked to leave the job on purpose, at its next commit."""

    job: str
    term: Int
    incarnation: Int
    text: Text  # why


class Finished(Value, frozen=True, tag=27):
    """TrainingFinished is journaled: ``elastic.run`` may return."""

    job: str
    term: Int
    point: Point


class EndJob(Told, frozen=True, tag=28):
    """The job is over for everybody, for this reason."""

    job: str
    term: Int
    kind: EndKind
    text: Text


# ---- scheduler → anybody ------------------------------------------------------------------------------------------


class Status(Value, frozen=True, tag=29):
    """A snapshot of the job, as ``service.status`` packs it, for followers and ``samebits status``."""

    packed: bytes


FromWorker = Register | Heartbeat | Join | Publish | Leave | KeyCall | Said
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
    | GiveUp
    | KeyAnswer
    | Depart
    | EqualPoint
)

Message = FromWorker | FromScheduler | StatusQuery | StopJob | Decision | ProcessEnded | ProcessSeen | Restarting

SCHEMA: Schema[Message] = Schema(Message)


class _AnyRegister(msgspec.Struct, frozen=True, array_like=True, tag=1):
    protocol: Annotated[int, Meta(gt=-(2**31), lt=2**31)]  # what follows may be anything


_REGISTERS: Schema[_AnyRegister] = Schema(_AnyRegister)


def protocol_of(packed: bytes) -> int | None:
    """The version in a Register, which is its first field in every version; None where it is none."""
    try:
        return _REGISTERS.unpack(packed).protocol
    except ProtocolError:
        return None
