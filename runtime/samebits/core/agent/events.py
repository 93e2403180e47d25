"""What an agent is told and what it tells its process; frozen values, no behaviour.

Events come from the process, the clock and the connection; notices go to the process. The decisions between the two are
in ``core/agent/agent.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samebits.core.agent.failover import LookElsewhere
from samebits.core.ends import EndKind
from samebits.core.messages import (
    Admitted,
    FromScheduler,
    FromWorker,
    GenerationStarted,
    Holdings,
    KeyAnswer,
    KeyOp,
    Place,
)
from samebits.core.point import Point
from samebits.core.reports import Report

# ---- events


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection to the scheduler stands."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to the scheduler is gone."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The scheduler said something."""

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
    """A collective failed: the process has left its generation and prepares to enter the rendezvous."""


@dataclass(frozen=True, slots=True)
class Entered:
    """The process waits for a generation; ``seen`` is the last one that it knew of when it said this."""

    holdings: Holdings
    seen: int | None = None


@dataclass(frozen=True, slots=True)
class Addressed:
    """The process's part of its generation's address map, made when it knew its place."""

    generation: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Trains:
    """The group of this generation stands and the state is restored."""

    generation: int


@dataclass(frozen=True, slots=True)
class Completed:
    """The user's function returned; the commit of ``step`` is durable."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class KeyAsk:
    """What a thread of the worker wants of a key; the fields are :class:`KeyCall`'s."""

    op: KeyOp
    key: bytes
    value: bytes = b""
    version: int = 0
    amount: int = 0
    is_durable: bool = False

    @property
    def changes(self) -> bool:
        """Whether it may change something: then it is to be done once."""
        return self.op not in (KeyOp.GET, KeyOp.WAIT)


@dataclass(frozen=True, slots=True)
class Called:
    """A thread of the process calls the scheduler's keys; ``ticket`` is its name for the call."""

    ticket: int
    ask: KeyAsk


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The thread does not wait for that call any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class RefusedByAll:
    """At each address where the scheduler may be, another job's refuses this process; what they have said."""

    text: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The process ends now; ``status`` is its exit status, None if it cannot tell."""

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
    """No seat yet; ask again in ``retry_after_s`` (0: the house is filling)."""

    text: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """Leave whatever collective the process is in, now."""

    text: str


@dataclass(frozen=True, slots=True)
class EnterAgain:
    """The round needs another answer: from the process in this place, and, to ``look``, with what its disk holds.

    ``committed``: every member has held it, so that what is older helps only those whose points are theirs alone.
    ``back_to``: what is newer is not to be relied on; the process is to go back to what it has kept of this.
    """

    place: Place | None
    look: bool
    committed: Point | None = None
    back_to: Point | None = None


@dataclass(frozen=True, slots=True)
class LeaveGently:
    """The members change: leave the generation at the next commit."""

    text: str


@dataclass(frozen=True, slots=True)
class Invited:
    """A round is open, and the process has not come to it yet."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The process waits in a round, for this."""

    text: str


@dataclass(frozen=True, slots=True)
class Began:
    """The process's place in a new generation."""

    started: GenerationStarted
    is_addressed: bool = True  # it brought its part of the address map; else that is to be published


@dataclass(frozen=True, slots=True)
class Mapped:
    """The addresses of the generation's members, in rank order."""

    generation: int
    blobs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CommittedByAll:
    """Every rank holds this point on its disk; older ones may be deleted."""

    point: Point


@dataclass(frozen=True, slots=True)
class FoundEqual:
    """All ranks were the same at this point; older copies in memory are not needed any more."""

    point: Point


@dataclass(frozen=True, slots=True)
class Over:
    """Training is finished on every rank; ``point`` is the final one."""

    point: Point


@dataclass(frozen=True, slots=True)
class MustEnd:
    """The process has no place in the job any more."""

    reason: EndKind
    text: str
    may_return: bool = False  # with a new session, once it is out of its generation


@dataclass(frozen=True, slots=True)
class AskedToLeave:
    """The process is to leave the job on purpose, as at SIGTERM: at its next commit."""

    text: str


@dataclass(frozen=True, slots=True)
class SchedulerAway:
    """The connection closed; training goes on."""


@dataclass(frozen=True, slots=True)
class SchedulerBack:
    """The agent resumed with the scheduler of this term."""

    term: int
    away_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The scheduler's keys have answered a call."""

    ticket: int
    answer: KeyAnswer


Notice = (
    Seated
    | ToldToWait
    | LookElsewhere
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
    | SchedulerAway
    | SchedulerBack
    | Answered
)


@dataclass(slots=True)
class AgentReady:
    """Filled by one step, carried out by the shell: sends first, then notices."""

    sends: list[FromWorker] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    wake_at: float | None = None
