"""Events for an agent and notices for its process: frozen values without behaviour.

Events come from the process, the clock and the connection. ``core/agent/agent_core.py`` decides on them and emits
notices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samebits.core.agent.failover import TryNextAddress
from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    Admitted,
    FromScheduler,
    FromWorker,
    GenerationStarted,
    Holdings,
    KeyAnswer,
    KeyOp,
    RankPosition,
)
from samebits.core.point import Point
from samebits.core.reports import Report

# ---- events


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection to the scheduler is open."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to the scheduler is closed."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from the scheduler arrived."""

    message: FromScheduler


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed; ``step`` is the process's count of completed optimizer steps."""

    step: int


@dataclass(frozen=True, slots=True)
class Observed:
    """A sensor of the process has made this report."""

    body: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """A collective failed: the process has left its generation and will enter the rendezvous."""


@dataclass(frozen=True, slots=True)
class Entered:
    """The process waits for a generation; ``seen`` is the last one that it knew of."""

    holdings: Holdings
    seen: int | None = None


@dataclass(frozen=True, slots=True)
class Addressed:
    """The process's part of the address map, made once it knew its place."""

    generation: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Trains:
    """The group of this generation is formed and the state is restored."""

    generation: int


@dataclass(frozen=True, slots=True)
class Completed:
    """The user's function returned; the commit of ``step`` is durable."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class KeyAsk:
    """A worker thread's request for a key, with the fields of :class:`KeyCall`."""

    op: KeyOp
    key: bytes
    value: bytes = b""
    version: int = 0
    amount: int = 0
    is_durable: bool = False

    @property
    def changes(self) -> bool:
        """Return whether the call may change a key and so must be done exactly once."""
        return self.op not in (KeyOp.GET, KeyOp.WAIT)


@dataclass(frozen=True, slots=True)
class Called:
    """A thread calls the scheduler's keys; ``ticket`` is its id of the call."""

    ticket: int
    ask: KeyAsk


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The thread no longer waits for that call."""

    ticket: int


@dataclass(frozen=True, slots=True)
class RefusedByAll:
    """Another job's scheduler refused this process at each address; ``text`` lists the refusals."""

    text: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The process exits now; ``status`` is its exit status, None if unknown."""

    on_purpose: bool
    text: str
    status: int | None = 0


AgentEvent = (
    Connected
    | Disconnected
    | Heard
    | Passed
    | Observed
    | Failed
    | Entered
    | Addressed
    | Trains
    | Completed
    | Called
    | GaveUp
    | RefusedByAll
    | Leaving
)


# ---- notices


@dataclass(frozen=True, slots=True)
class Seated:
    """The process has a seat."""

    admitted: Admitted


@dataclass(frozen=True, slots=True)
class ToldToWait:
    """No seat yet; ask again in ``retry_after_s`` (0: not all workers have registered)."""

    text: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """Leave any collective now."""

    text: str


@dataclass(frozen=True, slots=True)
class EnterAgain:
    """Enter the round again in this place and, with ``look``, with the content of the disk.

    Attributes:
        committed: the last point that every member held. Older points help only members whose state is in their own
            points alone.
        back_to: newer points are unreliable: restore the kept copy of this one.
    """

    place: RankPosition | None
    look: bool
    committed: Point | None = None
    back_to: Point | None = None


@dataclass(frozen=True, slots=True)
class LeaveGently:
    """The members change: leave the generation at the next commit."""

    text: str


@dataclass(frozen=True, slots=True)
class Invited:
    """A round is open that the process has not joined."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The process waits in a round, for this reason."""

    text: str


@dataclass(frozen=True, slots=True)
class Began:
    """The process's place in a new generation."""

    started: GenerationStarted
    is_addressed: bool = True  # the process has sent its part of the address map; otherwise it must publish it


@dataclass(frozen=True, slots=True)
class Mapped:
    """The addresses of the generation's members, in rank order."""

    generation: int
    blobs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CommittedByAll:
    """Every rank has this point on disk; older ones may be deleted."""

    point: Point


@dataclass(frozen=True, slots=True)
class FoundEqual:
    """All ranks were equal at this point; older copies in memory are no longer needed."""

    point: Point


@dataclass(frozen=True, slots=True)
class Over:
    """Training is finished on every rank; ``point`` is the final one."""

    point: Point


@dataclass(frozen=True, slots=True)
class MustEnd:
    """The process no longer has a place in the job."""

    reason: EndKind
    text: str
    may_return: bool = False  # with a new session, after it has left its generation


@dataclass(frozen=True, slots=True)
class AskedToLeave:
    """Leave the job on purpose at the next commit, as after SIGTERM."""

    text: str


@dataclass(frozen=True, slots=True)
class StopTogether:
    """Stop after the commit of this number in the generation; 0: not agreed yet, so do not train past the next one."""

    commits: int


@dataclass(frozen=True, slots=True)
class SchedulerAway:
    """The connection closed; training continues."""


@dataclass(frozen=True, slots=True)
class SchedulerBack:
    """The agent resumed with the scheduler of this term."""

    term: int
    away_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The scheduler answered a call to a key."""

    ticket: int
    answer: KeyAnswer


AgentNotice = (
    Seated
    | ToldToWait
    | TryNextAddress
    | BreakGroup
    | EnterAgain
    | LeaveGently
    | Invited
    | Waits
    | Began
    | Mapped
    | CommittedByAll
    | FoundEqual
    | Over
    | MustEnd
    | AskedToLeave
    | StopTogether
    | SchedulerAway
    | SchedulerBack
    | Answered
)


@dataclass(slots=True)
class AgentReady:
    """The output of one step, which the shell carries out: sends first, then notices."""

    sends: list[FromWorker] = field(default_factory=list)
    notices: list[AgentNotice] = field(default_factory=list)
    wake_at: float | None = None
