"""What the scheduler and its workers say to each other; frozen values, no behaviour.

A worker's messages after admission carry its :class:`Credential`; the scheduler compares it with the seat before it
looks at anything else. Everything a worker says is a *report* that may be repeated, late or twice: the heartbeat is the
whole truth about one agent, so a lost message is fixed by the next heartbeat and no message needs an acknowledgement.
"""

from __future__ import annotations

import enum
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from samebits.core.hangs import Doing
from samebits.core.point import Point
from samebits.core.values import Int, Meta, Schema, Told, Value
from samebits.errors import ProtocolError

PROTOCOL = 4
MAX_SAVED_POINTS = 8
MAX_STOPPED_BY = 200
"""Characters of ``StopJob.by``; a scheduler takes no longer one."""
MAX_DECISION = 400
"""Characters of ``Decision.text``."""
MAX_END_CHARS = 400
"""Characters of ``ProcessEnded.text`` and ``ProcessEnded.error``."""
MAX_DIGESTS = 16
MAX_PARTS = 2000
MAX_PART_CHARS = 200
MAX_PLACE_CHARS = 200
MAX_FOLDER_CHARS = 400
"""Characters of ``Join.folder``; a longer path is cut."""
MAX_NODE_CHARS = 128  # as NODE_ID
MAX_NAME_CHARS = 200  # as JOB_NAME
MAX_ID_CHARS = 64  # sessions and job ids: a UUID has 36
MAX_HOST_CHARS = 320  # a host name of 253 (RFC 1035) and what tells it from another of that name
MAX_AILMENTS = 32
MAX_ODDITY_CHARS = 400
OF_A_THREAD = "its thread "
OF_HIDDEN_STATE = "hidden state: "
"""How an oddity begins that is no number: an exception has ended a thread."""
MAX_STEP_US = 10**12  # of one part of one step
MAX_FIGURES = 16
MAX_FIGURE_CHARS = 40
MEASURED = ("cpu", "memory")
"""The figures that a worker's process looks at by itself."""
MAX_ITEMS = 4096
"""Of any other list that a worker sends: the restore points that it holds, or its settings."""
MAX_KEY_BYTES = 256  # of a key in UTF-8
MAX_VALUE_BYTES = 1 << 16  # of a key's value as msgpack
MAX_MEMBERS = 1 << 17
"""Of a list that the scheduler sends: MAX_WORKER_NUM goes to a hundred thousand."""
FINAL = -1
"""In the place of a commit's number: the state with which the training function has returned."""

_Of = TypeVar("_Of")
Few = Annotated[tuple[_Of, ...], Meta(max_length=MAX_ITEMS)]
Many = Annotated[tuple[_Of, ...], Meta(max_length=MAX_MEMBERS)]
Pairs = Few[tuple[str, str]]
Id = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Node = Annotated[str, Meta(max_length=MAX_NODE_CHARS)]
Host = Annotated[str, Meta(max_length=MAX_HOST_CHARS)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # as every time of a setting
Share = Annotated[float, Meta(ge=0, le=1e6)]
Microseconds = Annotated[int, Meta(ge=0, le=MAX_STEP_US)]
Hash = Annotated[bytes, Meta(max_length=MAX_ID_CHARS)]
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
    POINTS_LOST = 9  # every copy of the restore points is gone; recoverable once they are brought back


class Phase(enum.IntEnum):
    """What a training process's main thread is in."""

    OUTSIDE = 0  # nothing of the training function
    USER = 1  # the script's own code
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    COMMUNICATION = 5  # it waits in a collective
    OPTIMIZER = 6
    COMMIT = 7
    COMPILING = 8


class Sign(enum.IntEnum):
    """What a host may lack, or what is wrong with the device that a worker trains on."""

    CPU = 1
    MEMORY = 2
    DISK = 3
    DESCRIPTORS = 4
    DEVICE_MEMORY = 5
    DEVICE_HEAT = 6  # in hundreds of °C
    DEVICE_ERRORS = 7  # of its memory, that were not corrected: how many
    DEVICE_FAULT = 8  # that its driver tells
    DEVICE_SLOWED = 9  # its clock, for heat or power
    DEVICE_SHARED = 10  # how busy it is, where others use it as well


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


class PartKind(enum.IntEnum):
    """What a part of a rank's state is; the lower come first where the first difference is named."""

    STEPS = 1  # completed steps, or averages
    SAMPLER = 2  # an ElasticSampler's position
    TRAINED = 3  # a parameter of an optimizer, or one of its moments
    UNTRAINED = 4  # a parameter that no optimizer has
    SHARED = 5  # what a state of the user's own marks as shared
    LOOSE = 6  # all else: it may differ
    SETTING = 7  # of an optimizer's parameter group, such as its learning rate


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


class Progress(NamedTuple):
    """Where a process stands that makes no step, and launches no collective."""

    phase: Phase
    collectives: Count  # launched in the generation's own group
    steps: Count  # that it has made in this generation
    still_s: Seconds  # since the last of both
    longest_s: Seconds  # that it took from one to the next, but for the first steps
    rests: bool  # it uses no CPU
    place: Annotated[str, Meta(max_length=MAX_PLACE_CHARS)]  # as ``train.py:46 (time.sleep)``


class Ailment(NamedTuple):
    """Of something that a worker's host or device has, more than the limit is taken."""

    sign: Sign
    where: Annotated[str, Meta(max_length=MAX_PLACE_CHARS)]  # of DISK, the path; of a device, which, and its fault
    share: Share
    limit: Share
    drains: bool  # the worker is to leave for a spare


class StepTime(NamedTuple):
    """What a rank's main thread does in one step, in microseconds; together they are the step."""

    data_us: Microseconds  # waits for the loader's next batch
    compute_us: Microseconds  # all else
    communication_us: Microseconds  # waits in collectives
    commit_us: Microseconds  # in ``state.commit()``


class Figure(NamedTuple):
    """A number that a worker measures: its script's own, or ``cpu`` and ``memory``, which its process looks at."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_FIGURE_CHARS)]
    value: float


class Place(Value, frozen=True):
    """Where a worker is, or would be, in a generation."""

    slot: Int
    rank: Int  # the slot's index among the members' slots
    world_size: Int


class Copy(Value, frozen=True):
    """A copy, in its keeper's memory, of the point that the rank of ``slot`` saved."""

    slot: Int
    point: Point


class Part(NamedTuple):
    """One part of a rank's state; ``value`` is text that can be shown, or, of a tensor, its hash in hex."""

    kind: PartKind
    name: Annotated[str, Meta(max_length=MAX_PART_CHARS)]
    value: Annotated[str, Meta(max_length=MAX_PART_CHARS)]


class Digest(Value, frozen=True):
    """What a rank's state was at one of its commits, in a few bytes."""

    point: Point
    commits: Int  # of the line, up to this one: there may be several after one step; FINAL: see there
    shared: Hash  # of what must be equal on every rank
    loose: Hash = b""  # of what may differ; b"": it was not looked at
    averages: bool = True  # a wrapper that averages gradients is in use
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)] = ()  # only where they were asked for
    is_kept: bool = False  # the rank holds a copy of the state as it was then


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


# ---- worker → scheduler -------------------------------------------------------------------------------------------


class Register(Value, frozen=True, tag=1):
    """A process asks for a seat (``incarnation`` 0) or resumes the one it holds. Idempotent by session."""

    protocol: Int
    job: Id  # "" where no job was ever told
    job_name: Name
    node: Node
    session: Id
    incarnation: Int
    process: Process
    settings: Pairs
    standing: Standing | None = None  # of a process that is or was a member of a generation
    proof: bytes = b""  # of a replacement: that the job's own launcher has started this session
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
    """The sender has left its old group and waits; these are the restore points it holds."""

    sender: Credential
    round: RoundId
    points: Few[Point]  # verified, on its disk
    own_parts: bool  # it has state that only its own points hold (saved RNG state)
    numerics: Pairs
    blob: bytes = b""  # its contribution to the address map of the generation that this round makes; b"": it follows
    place: Place | None = None  # what ``blob`` was made for; it is void in any other place
    live: Point | None = None  # the commit that it holds in memory, whole
    looked: bool = True  # ``points`` is what its disk holds; else it has not looked, which takes a while
    commits: Int = 0  # of the line that ``live`` is on: which of several commits after one step it is
    copies: Few[Copy] = ()  # verified, that it keeps for others; as ``points``, of who has looked
    page: Page | None = None  # of its slot, where the generators' states are all that only its own points hold
    live_step: LiveStep | None = None  # that led to ``live``
    orphaned_pages: Few[OrphanedPage] = ()  # on its host
    back_to: Point | None = None  # it has gone back as far, as the round had asked
    folder: Annotated[str, Meta(max_length=MAX_FOLDER_CHARS)] = ""  # where it looked for ``points``; printable
    failed_with: Annotated[str, Meta(max_length=MAX_END_CHARS)] = ""  # the runtime's error that ended its generation


class Publish(Value, frozen=True, tag=4):
    """The sender's contribution to the generation's address map, where the join did not bring it, or again."""

    sender: Credential
    generation: Int
    blob: bytes


class SavedPoints(Value, frozen=True, tag=9):
    """What the sender's disk holds, verified: its newest points, all of them each time. Said again when it returns."""

    sender: Credential
    points: Annotated[tuple[Point, ...], Meta(max_length=MAX_SAVED_POINTS)]
    stalled_s: Seconds = 0.0  # that the sender's steps have waited for saves, since its process began


class Digests(Value, frozen=True, tag=11):
    """What the sender's state was: all it remembers, each time. Said again when it returns, and while it is done."""

    sender: Credential
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_DIGESTS)]


class LastWords(Told, frozen=True, tag=5):
    """Why the sender is about to die: the cause everybody else is shown."""

    sender: Credential
    text: str
    step: Int


class Leave(Told, frozen=True, tag=6):
    """The sender gives up its seat. ``on_purpose``: its program has done its part, or it was told to stop."""

    sender: Credential
    on_purpose: bool
    text: str
    step: Int = 0  # completed ones; 0 of an earlier release
    status: Annotated[int, Meta(ge=0, le=255)] | None = 0  # its process's exit status; None: it cannot tell


class Still(Value, frozen=True, tag=12):
    """The sender has made no step for longer than it ever took; said with every heartbeat, and once when that ends."""

    sender: Credential
    generation: Int
    step: Int
    progress: Progress | None  # None: it comes on


class PeerGone(Value, frozen=True, tag=10):
    """The process of another session, on the sender's host, is dead, whatever its connection says."""

    sender: Credential
    session: Id


class Unwell(Value, frozen=True, tag=42):
    """What is wrong with the sender's host: all of it, each time. Said at a change, and again while there is any."""

    sender: Credential
    ailments: Annotated[tuple[Ailment, ...], Meta(max_length=MAX_AILMENTS)]


class Oddity(Value, frozen=True, tag=44):
    """A number that the sender's script has reported is none that training can have; said once for a row of them."""

    sender: Credential
    step: Count
    text: Annotated[str, Meta(max_length=MAX_ODDITY_CHARS)]  # printable: which number, and what is wrong with it
    is_verdict: bool = False  # the step was computed again, and the text says what was at fault
    comes_again: bool = False  # no rank commits the step: all go back, and compute it again


class Paced(Value, frozen=True, tag=46):
    """How long the sender took for its last steps. Said with a heartbeat, once for each window of steps."""

    sender: Credential
    generation: Int
    steps: Annotated[int, Meta(ge=1, le=10**9)]  # of the window
    time: StepTime  # of one of them


class Figures(Value, frozen=True, tag=47):
    """What the sender measures: the newest of each name, all of them each time; at most one with each heartbeat.

    A scheduler of a release that has none counts it as nonsense: it is said only where a script calls
    ``samebits.report``, and in a world that may change its size.
    """

    sender: Credential
    figures: Annotated[tuple[Figure, ...], Meta(max_length=MAX_FIGURES)]


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

    by: Annotated[str, Meta(max_length=MAX_STOPPED_BY)]  # printable


class Decision(Value, frozen=True, tag=13):
    """What somebody around the job has decided, for its history; these nodes are to leave at their next commit.

    Said again, with no text, until they have left.
    """

    text: Annotated[str, Meta(max_length=MAX_DECISION)]  # with its reason; printable
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
    text: Annotated[str, Meta(max_length=MAX_END_CHARS)]  # ``was killed by signal 11 (SIGSEGV)``; printable
    status: Annotated[int, Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, Meta(ge=1, le=127)] | None = None
    error: Annotated[str, Meta(max_length=MAX_END_CHARS)] = ""  # the last that its log tells of one; printable
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
    text: str
    job: Id = ""  # "": of a peer that speaks another protocol, whatever it asked for
    term: Int = 0


class Fenced(Told, frozen=True, tag=23):
    """The seat belongs to a later incarnation, or to another node; the receiver must leave."""

    job: str
    session: str
    incarnation: Int  # the receiver's
    text: str
    may_return: bool = False  # under a new session: nobody else has its node id, and the job has use for it
    term: Int = 0


class RoundOpened(Told, frozen=True, tag=24):
    """Leave whatever generation you are in and join this round."""

    job: str
    term: Int
    incarnation: Int
    round: RoundId
    text: str  # why
    missing: str  # the nodes that are not there; "" where all are
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
    text: str
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
    text: str  # why


class KeyAnswer(Told, frozen=True, tag=41):
    """The answer to a :class:`KeyCall`; what it says was changed, and is durable where the key is, is so."""

    session: Id
    number: Count
    term: Int  # an earlier one's is void: what was not durable, and that nothing was done, is forgotten with it
    outcome: KeyOutcome
    version: Count = 0  # of the key now, or of its deletion
    value: KeyValue = b""  # GET, WAIT: the key's; ADD: the sum
    text: str = ""  # why it was refused


class Depart(Told, frozen=True, tag=33):
    """The receiver is asked to leave the job on purpose, at its next commit."""

    job: str
    term: Int
    incarnation: Int
    text: str  # why


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
    text: str


# ---- scheduler → anybody ------------------------------------------------------------------------------------------


class Status(Value, frozen=True, tag=29):
    """A snapshot of the job, as ``service.status`` packs it, for followers and ``samebits status``."""

    packed: bytes


FromWorker = (
    Register
    | Heartbeat
    | Join
    | Publish
    | LastWords
    | Leave
    | SavedPoints
    | PeerGone
    | Digests
    | Still
    | KeyCall
    | Unwell
    | Oddity
    | Paced
    | Figures
)
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
