"""Events for an agent and notices for its process, as frozen values without behavior.

Events come from the process, the clock and the connection. ``core/agent/agent_core.py`` handles events and emits
notices. A message of the scheduler that the process needs unchanged is itself the notice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samebits.core.agent.failover import TryNextAddress
from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    AddressMap,
    Admitted,
    CommittedPoint,
    Depart,
    EqualPoint,
    FromScheduler,
    FromWorker,
    GenerationStarted,
    Holdings,
    KeyAnswer,
    KeyOp,
    RankPosition,
    StopAt,
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
    """Event: time has passed. ``step`` is the process's number of completed optimizer steps."""

    step: int


@dataclass(frozen=True, slots=True)
class Observed:
    """Event: a sensor of the process has made this report."""

    body: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: a collective failed, so the process has left its generation and will join a round."""


@dataclass(frozen=True, slots=True)
class Entered:
    """Event: the process waits for a generation. ``seen`` is the last generation that it knew of."""

    holdings: Holdings
    seen: int | None = None


@dataclass(frozen=True, slots=True)
class Addressed:
    """Event: the process has created its part of the address map for its place."""

    generation: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Trains:
    """Event: the group of this generation is formed and the state is restored."""

    generation: int


@dataclass(frozen=True, slots=True)
class Completed:
    """Event: the training function has returned, and the commit of ``step`` is durable."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class KeyAsk:
    """A worker thread's operation on a key of ``samebits.kv``, with the fields of :class:`KeyCall`."""

    op: KeyOp
    key: bytes
    value: bytes = b""
    version: int = 0
    amount: int = 0
    is_durable: bool = False

    @property
    def changes(self) -> bool:
        """Return whether the call may change a key and so must be executed exactly once."""
        return self.op not in (KeyOp.GET, KeyOp.WAIT)


@dataclass(frozen=True, slots=True)
class Called:
    """Event: a thread calls ``samebits.kv``. ``ticket`` is its ID of the call."""

    ticket: int
    ask: KeyAsk


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Event: the thread has stopped waiting for this call."""

    ticket: int


@dataclass(frozen=True, slots=True)
class RefusedByAll:
    """Event: at every address, another job's scheduler refused this process. ``text`` lists the refusals."""

    text: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """Event: the process is exiting. ``status`` is its exit status, or None if unknown."""

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
class ToldToWait:
    """Notice: there is no seat yet. Ask again in ``retry_after_s`` seconds; 0: not all workers have registered."""

    text: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """Leave any collective now."""

    text: str


@dataclass(frozen=True, slots=True)
class EnterAgain:
    """Notice: join the round again in this place. With ``look``, first read the checkpoints on disk.

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
    """Notice: the members change, so leave the generation at the next commit."""

    text: str


@dataclass(frozen=True, slots=True)
class Invited:
    """Notice: a round is open that the process has not joined."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Notice: the process waits in a round, for this reason."""

    text: str


@dataclass(frozen=True, slots=True)
class Began:
    """The process's place in a new generation."""

    started: GenerationStarted
    is_addressed: bool = True  # the process has sent its part of the address map; otherwise it must publish it


@dataclass(frozen=True, slots=True)
class Over:
    """Notice: training is finished on every rank. ``point`` is the final one."""

    point: Point


@dataclass(frozen=True, slots=True)
class MustEnd:
    """Notice: the process no longer belongs to the job and must exit."""

    reason: EndKind
    text: str
    may_return: bool = False  # with a new session, after it has left its generation


@dataclass(frozen=True, slots=True)
class SchedulerAway:
    """The connection closed; training continues."""


@dataclass(frozen=True, slots=True)
class SchedulerBack:
    """Notice: the agent has resumed with the scheduler of this term."""

    term: int
    away_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The scheduler answered a call to a key."""

    ticket: int
    answer: KeyAnswer


AgentNotice = (
    Admitted
    | ToldToWait
    | TryNextAddress
    | BreakGroup
    | EnterAgain
    | LeaveGently
    | Invited
    | Waits
    | Began
    | AddressMap
    | CommittedPoint
    | EqualPoint
    | Over
    | MustEnd
    | Depart
    | StopAt
    | SchedulerAway
    | SchedulerBack
    | Answered
)


@dataclass(slots=True)
class AgentReady:
    """The result of one step, to be carried out by the caller: first the messages to send, then the notices."""

    sends: list[FromWorker] = field(default_factory=list)
    notices: list[AgentNotice] = field(default_factory=list)
    wake_at: float | None = None
