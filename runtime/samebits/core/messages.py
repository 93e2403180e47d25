"""Messages between the scheduler and its workers: frozen values without behaviour.

After admission a worker's messages carry its :class:`Credential`, which the scheduler compares with the seat first.
Messages may be repeated, late or lost: each heartbeat holds the complete state of one agent, so the next heartbeat
makes up for a lost message and none needs an acknowledgement. Reports of sensors (``core.reports``) are sent in one
envelope, :class:`ReportEnvelope`.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated, NamedTuple

import msgspec

from samebits.core.end_kinds import EndKind
from samebits.core.hangs import Doing
from samebits.core.point import Point
from samebits.core.reports import Report
from samebits.core.values import (
    MAX_NODE_CHARS,
    Count,
    Few,
    HostName,
    Id,
    Int,
    Many,
    Meta,
    Name,
    NodeId,
    Schema,
    Seconds,
    Text,
    TextValue,
    Value,
    line,
)
from samebits.errors import ProtocolError

PROTOCOL = 5
MAX_STOPPED_BY = 600
"""Most characters of ``StopJob.by``."""
MAX_DECISION = 400
"""Most characters of ``OperatorDecision.text``."""
MAX_END_CHARS = 400
"""Most characters of ``ProcessEnded.text`` and ``ProcessEnded.error``."""
MAX_FOLDER_CHARS = 400
"""Most characters of ``Holdings.folder``; a longer path is cut."""
MAX_SETTINGS = 64
PROOF_BYTES = 32
MAX_KEY_BYTES = 256  # of a key, in UTF-8
MAX_VALUE_BYTES = 1 << 16  # of a key's value, as msgpack

Pairs = Few[tuple[str, str]]
FixedSettings = Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=MAX_SETTINGS)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
OwnNode = Annotated[str, line(MAX_NODE_CHARS, least=1, pattern="^[^ /]*$")]
"""A node id that a process may choose. It becomes a folder's name, so it has no "/"."""
Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
ValueBytes = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]


class Activity(enum.IntEnum):
    """Activity of a seated worker."""

    SEATED = 1  # between init() and elastic.run
    WAITING = 2  # in rendezvous, waiting for a generation
    FORMING = 3  # knows its generation; building the group and restoring
    TRAINING = 4
    DONE = 5  # the user's function returned and the last commit is durable
    FINISHED = 6  # knows that training is finished


class Refusal(enum.IntEnum):
    """Why a process is not admitted."""

    ALIVE = 1  # the previous session of this node still holds its lease
    COOLING_DOWN = 2
    FULL = 3
    OTHER_JOB = 4
    OTHER_SETTINGS = 5
    PROTOCOL = 6
    NUMERICS = 7
    RECOVERY_OFF = 8  # a known node returned, with ENABLE_RECOVERY=0
    STOPPING = 9


class KeyOp(enum.IntEnum):
    """Operation on a key."""

    GET = 1
    PUT = 2
    DELETE = 3
    ADD = 4
    COMPARE_AND_SET = 5
    WAIT = 6  # until the key's version is above the call's


class KeyOutcome(enum.IntEnum):
    """Result of a call to a key."""

    DONE = 1
    ABSENT = 2  # the key does not exist; nothing was changed
    DIFFERS = 3  # the key has a different version; nothing was changed
    REFUSED = 4  # a limit is reached, or the value is not a number; nothing was changed


class RoundId(NamedTuple):
    """ID of one attempt to form a generation. IDs are ordered.

    Never reused, because ``term`` is durable and strictly increasing.
    """

    term: Int
    number: Int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


class Process(NamedTuple):
    """Where a session runs."""

    host: HostName  # its name, plus "#" and a suffix that distinguishes hosts of the same name
    pid: Int
    started_at: Int  # clock ticks after boot, which distinguishes a reused pid
    device: Id

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host.partition('#')[0]}" if self.pid else "process unknown"


class Credential(Value, frozen=True):
    """The sender's identity, which is compared with its seat before anything else is read."""

    job: Id
    node: NodeId
    session: Id
    incarnation: Int


class MemberRecord(Value, frozen=True):
    """What a member knows about its job, from which a lost journal can be rebuilt."""

    term: Int  # the latest that the scheduler sent it
    generation: Int
    round: RoundId  # the round that formed this generation
    slot: Int
    world_size: Int
    restore: Point | None  # the point that the generation started from
    final: Point | None  # the final point, if training is finished
    rank: Int


class RankPosition(Value, frozen=True):
    """A worker's position in a generation."""

    slot: Int
    rank: Int  # the slot's index among the members' slots
    world_size: Int


class Copy(Value, frozen=True):
    """A copy, in a buddy's memory, of a point that the rank of ``slot`` has saved."""

    slot: Int
    point: Point


class Loan(Value, frozen=True):
    """A copy to send: the rank that receives it, and the slot of the rank that saved it."""

    rank: Int
    slot: Int


class KeptCommit(Value, frozen=True):
    """A commit in shared memory that survives its process: the complete state, or only generator states (a page)."""

    point: Point
    commits: Int  # commits on the line up to this one


class Page(Value, frozen=True):
    """A slot's surviving random generator states, at its last commits and later."""

    commits: Few[KeptCommit]
    generation: Int  # of the step after the last commit
    next_commit: Int  # number of the commit that ends that step
    collectives: Int  # launched in that step
    draws_late: bool  # in some step, random numbers were drawn between the last collective and the commit


class OrphanedPage(Value, frozen=True):
    """The page of a dead rank, which another rank on its host has read and can send."""

    slot: Int
    page: Page


class PageLoan(Value, frozen=True):
    """A page that one rank of a generation sends to another."""

    lender: Int
    rank: Int
    slot: Int


class LiveStep(Value, frozen=True):
    """Facts about the step before the commit in a process's memory."""

    collectives: Int
    draws_late: bool  # random numbers were drawn between the last collective and the commit


class Sharding(Value, frozen=True):
    """How a device mesh divides the state among ranks. The ranks fill the mesh in order.

    Attributes:
        sizes: ranks along each dimension of the mesh, outermost first.
        replicates: for each dimension, whether the ranks along it hold the same part.
        shrinks: the replicating dimension whose size may change; None: none. The slots with one coordinate along it are
            a *shard group*, which holds every part.
    """

    sizes: Few[Size]
    replicates: Few[bool]
    shrinks: Count | None = None

    @property
    def has_replicas(self) -> bool:
        """Return whether every part is held by more than one rank."""
        return any(replicates and size > 1 for size, replicates in zip(self.sizes, self.replicates, strict=False))

    def key_of(self, rank: int) -> tuple[int, ...]:
        """Return the rank's replica key: its coordinate without the dimensions that replicate."""
        key: list[int] = []
        for size, replicates in zip(reversed(self.sizes), reversed(self.replicates), strict=False):
            rank, coordinate = divmod(rank, size)
            if not replicates:
                key.append(coordinate)
        return tuple(reversed(key))

    @property
    def key_count(self) -> int:
        """Return how many different keys there are."""
        return math.prod(size for size, replicates in zip(self.sizes, self.replicates, strict=False) if not replicates)

    @property
    def group_size(self) -> int:
        """Return how many slots a shard group has."""
        return math.prod(size for dim, size in enumerate(self.sizes) if dim != self.shrinks)

    def group_of(self, slot: int) -> int:
        """Return the slot's shard group: its coordinate along the dimension that shrinks."""
        assert self.shrinks is not None, "only such a mesh has shard groups"
        return slot // math.prod(self.sizes[self.shrinks + 1 :]) % self.sizes[self.shrinks]

    def resized(self, world_size: int) -> Sharding:
        """Return this mesh with only as many shard groups as these ranks fill, at least one."""
        if self.shrinks is None:
            return self
        groups = max(1, world_size // self.group_size)
        sizes = (*self.sizes[: self.shrinks], groups, *self.sizes[self.shrinks + 1 :])
        return Sharding(sizes, self.replicates, self.shrinks)


class Holdings(Value, frozen=True):
    """The points and copies that a process brings into a round; the input of ``restore.choose_restore_point``."""

    points: Few[Point]  # verified, on its disk
    own_parts: bool  # it has state that only its own points contain (saved RNG state)
    numerics: Pairs
    blob: bytes = b""  # its part of the next generation's address map; b"": sent later
    place: RankPosition | None = None  # the place that ``blob`` is valid for
    live: Point | None = None  # the complete commit that it holds in memory
    looked: bool = True  # False: the process has not read its disk yet, which takes a while
    commits: Int = 0  # commits on the line of ``live``; distinguishes several commits after one step
    copies: Few[Copy] = ()  # verified copies that it keeps for others; like ``points``, only if ``looked``
    page: Page | None = None  # its slot's page, if its own parts are only generators' states
    live_step: LiveStep | None = None  # the step that led to ``live``
    orphaned_pages: Few[OrphanedPage] = ()  # pages of dead ranks on its host
    back_to: Point | None = None  # the point that it has returned to, as the round required
    folder: Annotated[str, line(MAX_FOLDER_CHARS)] = ""  # where it searched for ``points``
    failed_with: Annotated[str, Meta(max_length=MAX_END_CHARS)] = ""  # the runtime error that ended its generation
    sharding: Sharding | None = None  # None: every rank's point holds the whole state
    kept: Few[KeptCommit] = ()  # commits of its slot in its host's shared memory, including its predecessor's


# ---- worker → scheduler -------------------------------------------------------------------------------------------


class Register(Value, frozen=True, tag=1):
    """A process's request for a seat (``incarnation`` 0), or to resume its own seat. Idempotent per session."""

    protocol: Int
    job: Id  # "": unknown to the sender
    job_name: Name
    node: OwnNode
    session: Id
    incarnation: Count
    process: Process
    settings: FixedSettings
    standing: MemberRecord | None = None  # of a current or former member of a generation
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)] = b""  # shows that the launcher started a replacement
    term: Int = 0  # the latest term of this job that it was sent, since a spare has no ``standing``


class Heartbeat(Value, frozen=True, tag=2):
    """The complete state of one agent, sent every HEARTBEAT_INTERVAL seconds and after each change."""

    sender: Credential
    term: Int  # of the scheduler start that the sender is connected to
    activity: Activity
    generation: Int  # the last one that it was sent; 0 before the first
    round: RoundId | None  # the last round it joined
    step: Int  # completed optimizer steps


class Join(Value, frozen=True, tag=3):
    """The sender has left its old group and waits in this round."""

    sender: Credential
    round: RoundId
    holdings: Holdings


class Publish(Value, frozen=True, tag=4):
    """The sender's part of the address map. Sent, and repeated, if its Join did not contain it."""

    sender: Credential
    generation: Int
    blob: bytes


class ReportEnvelope(Value, frozen=True, tag=48):
    """A report, with the sender's generation and step when it was made."""

    sender: Credential
    body: Report
    generation: Int = 0  # the last that the sender was sent
    step: Int = 0  # completed optimizer steps


class Leave(TextValue, frozen=True, tag=6):
    """The sender gives up its seat. ``on_purpose``: its program has ended, or the worker was asked to stop."""

    sender: Credential
    on_purpose: bool
    text: Text
    step: Int = 0  # completed steps; 0 from an earlier release
    status: Annotated[int, Meta(ge=0, le=255)] | None = 0  # exit status of its process; None: unknown


class KeyCall(Value, frozen=True, tag=40):
    """A call of ``samebits.kv``, repeated under the same number until it is answered.

    An earlier scheduler release without keys ignores it, so it is sent only if the script calls ``samebits.kv``.
    """

    sender: Credential
    number: Count  # of this session's calls, from 1
    floor: Count  # its lowest unanswered call that changes something; all calls below are settled
    op: KeyOp
    key: Key
    value: ValueBytes = b""  # of PUT and COMPARE_AND_SET, one msgpack value
    version: Count = 0  # expected version for COMPARE_AND_SET (0: absent) and DELETE (0: any). WAIT: see KeyOp.WAIT
    amount: Int = 0  # of ADD
    is_durable: bool = False  # the key outlives the scheduler's process from now on
    term: Int = 0  # the scheduler start that is called; a later one ignores the call, which is sent again. 0: any


class StatusQuery(Value, frozen=True, tag=7):
    """Request for one :class:`Status` or, with ``follow``, for one now and one after each change."""

    follow: bool


class StopJob(Value, frozen=True, tag=8):
    """Request to end the job gracefully.

    Attributes:
        by: shown to all processes.
        status: exit code of the process whose error ends the job because every retry would repeat it; else 0.
        at_commit: all members first stop after the same commit.
    """

    by: Annotated[str, line(MAX_STOPPED_BY)]
    status: Annotated[int, Meta(ge=0, le=255)] = 0
    at_commit: bool = False


class OperatorDecision(Value, frozen=True, tag=13):
    """A decision of an operator or launcher, for the history. The nodes in ``drain`` leave at their next commit.

    The message is repeated without its text until these nodes have left.
    """

    text: Annotated[str, line(MAX_DECISION)]  # includes the reason
    drain: Few[NodeId] = ()


class ProcessSeen(Value, frozen=True, tag=15):
    """State of a worker's process, observed on its host by a follower. Informational only."""

    node: NodeId
    host: HostName
    pid: Int
    started_at: Int  # as in Process
    doing: Doing
    quiet_s: Seconds | None  # seconds since its control thread last ran; None: unknown


class Restarting(Value, frozen=True, tag=16):
    """A supervisor is starting workers that have not registered yet.

    Repeated until they have registered. A job without workers is not given up within 2 × NODE_TIMEOUT of the last one.
    """


class ProcessEnded(Value, frozen=True, tag=14):
    """How a worker's process ended, as its launcher reports it. Informational only."""

    node: NodeId
    host: HostName
    pid: Int
    started_at: Int  # as in Process
    text: Annotated[str, line(MAX_END_CHARS)]  # ``was killed by signal 11 (SIGSEGV)``
    status: Annotated[int, Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, Meta(ge=1, le=127)] | None = None
    error: Annotated[str, line(MAX_END_CHARS)] = ""  # the last error in its log
    is_failure: bool = False  # the error is an exception of the script
    is_out_of_memory: bool = False


# ---- scheduler → worker -------------------------------------------------------------------------------------------


class Admitted(Value, frozen=True, tag=20):
    """The session now has the seat. Sent after this is durable."""

    session: str
    job: str
    term: Int
    slot: Int | None  # None: a spare
    incarnation: Int
    world_size: Int
    finished: Point | None  # the final point, if training is over
    generation: Int = 0  # the last committed one


class Pending(Value, frozen=True, tag=21):
    """The session was accepted. Slots are assigned when all workers have registered."""

    session: str
    term: Int
    registered: Int
    world_size: Int


class Refused(TextValue, frozen=True, tag=22):
    """The process is not admitted. It may ask again in ``retry_after_s`` seconds; 0: waiting cannot help."""

    session: str
    refusal: Refusal
    retry_after_s: float
    text: Text
    job: Id = ""  # "": to a peer with a different protocol
    term: Int = 0


class Fenced(TextValue, frozen=True, tag=23):
    """The seat belongs to a later incarnation or another node, so the receiver must exit."""

    job: str
    session: str
    incarnation: Int  # of the receiver
    text: Text
    may_return: bool = False  # under a new session: its node id is unused and the job has room
    term: Int = 0


class RoundOpened(TextValue, frozen=True, tag=24):
    """Invitation to leave the current generation and join this round."""

    job: str
    term: Int
    incarnation: Int
    round: RoundId
    text: Text  # the reason
    missing: Text  # the missing nodes; "": none
    place: RankPosition | None = None  # the receiver's, if the round closes with its present members; None: unchanged
    look: bool = False  # memories do not hold enough: read the disk before joining
    gently: bool = False  # no rank is lost, the world only grows: leave at the next commit
    committed: Point | None = None  # every member held it; with ``look``, older points need not be read
    back_to: Point | None = None  # newer points are unreliable: join with this one or an older one


class GenerationStarted(TextValue, frozen=True, tag=25):
    """A new generation is durable. Contains the receiver's place in it."""

    job: str
    term: Int
    incarnation: Int
    generation: Int
    round: RoundId
    rank: Int
    world_size: Int
    local_rank: Int
    local_world_size: Int
    restore: Point | None  # None: no commit yet; start from rank 0's initial state
    source: Int  # the rank that sends the point to the receiver; its own rank if it holds the point
    serves: Many[Int]  # the ranks that the receiver sends its point to
    text: Text
    slot: Int
    lends: Many[Loan] = ()  # the copies that the receiver sends; a copy for its own rank is loaded, not sent
    buddy: Int | None = None  # the rank that keeps copies of the receiver's newest points
    is_apart: bool = False  # on another host
    keeps: Many[Int] = ()  # the slots whose copies the receiver keeps
    watches: Int | None = None  # the rank on the same host whose death the receiver reports
    by_page: bool = False  # the receiver's generators are restored from its page
    page_loans: Many[PageLoan] = ()  # of the whole generation: pages that are not on their rank's host


class AddressMap(Value, frozen=True, tag=26):
    """All members' addresses in rank order. Sent when the last one has arrived."""

    job: str
    term: Int
    generation: Int
    blobs: Many[bytes]


class CommittedPoint(Value, frozen=True, tag=30):
    """Every member of the generation has this point on disk, so older ones may be deleted."""

    job: str
    term: Int
    generation: Int  # at the time of sending: a later generation may have abandoned the point
    point: Point


class Explain(Value, frozen=True, tag=31):
    """The ranks differ at this commit. Asks the receiver to send its digest again, with its parts."""

    job: str
    term: Int
    point: Point
    commits: Int


class EqualPoint(Value, frozen=True, tag=34):
    """All ranks reported the same digest, so older copies in memory are no longer needed."""

    job: str
    term: Int
    generation: Int
    point: Point


class GiveUp(TextValue, frozen=True, tag=32):
    """The receiver's main thread is stuck. Asks the receiver to report where, give up the seat and exit."""

    job: str
    term: Int
    incarnation: Int
    text: Text  # the reason


class KeyAnswer(TextValue, frozen=True, tag=41):
    """The answer to a :class:`KeyCall`, sent after the change was made and, for a durable key, is durable."""

    session: Id
    number: Count
    term: Int  # answers of an earlier term are void: changes that were not durable are lost with it
    outcome: KeyOutcome
    version: Count = 0  # of the key now, or of its deletion
    value: ValueBytes = b""  # GET, WAIT: the key's; ADD: the sum
    text: Text = ""  # the reason of a refusal


class Depart(TextValue, frozen=True, tag=33):
    """Request to leave the job on purpose, at the next commit."""

    job: str
    term: Int
    incarnation: Int
    text: Text  # the reason


class StopAt(Value, frozen=True, tag=35):
    """All members of the generation must stop after the same commit.

    Repeated until the receiver has stopped there.
    """

    job: str
    term: Int
    generation: Int
    commits: Int  # the number of that commit in the generation, from 1; 0: reply with the first one you can stop after


class Finished(Value, frozen=True, tag=27):
    """TrainingFinished is journaled: ``elastic.run`` may return."""

    job: str
    term: Int
    point: Point


class EndJob(TextValue, frozen=True, tag=28):
    """The job is over for all processes. Contains the reason."""

    job: str
    term: Int
    kind: EndKind
    text: Text


class Status(Value, frozen=True, tag=29):
    """A snapshot of the job, as ``service.status`` packs it, for followers and ``samebits status``."""

    packed: bytes


FromWorker = Register | Heartbeat | Join | Publish | Leave | KeyCall | ReportEnvelope
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
    | StopAt
)

Message = (
    FromWorker | FromScheduler | StatusQuery | StopJob | OperatorDecision | ProcessEnded | ProcessSeen | Restarting
)

SCHEMA: Schema[Message] = Schema(Message)


class _AnyRegister(msgspec.Struct, frozen=True, array_like=True, tag=1):
    protocol: Annotated[int, Meta(gt=-(2**31), lt=2**31)]  # later fields may be anything


_REGISTERS: Schema[_AnyRegister] = Schema(_AnyRegister)


def protocol_difference(sender: str, protocol: int) -> str:
    """Return why a sender with a different protocol version is refused. The text names both versions."""
    return (
        f"this scheduler speaks protocol {PROTOCOL}, {sender} speaks {protocol}, so their releases differ. "
        "Fix: install the same samebits release on all hosts"
    )


def protocol_of(packed: bytes) -> int | None:
    """Return the protocol version of a Register message, its first field in every version, or None."""
    try:
        return _REGISTERS.unpack(packed).protocol
    except ProtocolError:
        return None
