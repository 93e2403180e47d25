"""The worker's side of membership: ``step(event, now) -> AgentReady``, pure like the scheduler's core.

The agent turns events of its process (it joins a round, publishes its address, is done) into messages, and the
scheduler's messages into notices for its process. It registers again on every new connection, sends its complete state
in every heartbeat, and repeats its address while a group is formed. Any single message may therefore be lost.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from samebits.core.agent.agent_events import (
    Addressed,
    AgentEvent,
    AgentReady,
    Answered,
    Began,
    BreakGroup,
    Called,
    Completed,
    Connected,
    Disconnected,
    EnterAgain,
    Entered,
    Failed,
    GaveUp,
    Heard,
    Invited,
    LeaveGently,
    Leaving,
    MustEnd,
    Observed,
    Over,
    Passed,
    RefusedByAll,
    SchedulerAway,
    SchedulerBack,
    ToldToWait,
    Trains,
    Waits,
)
from samebits.core.agent.failover import SchedulerFailover, TryNextAddress
from samebits.core.agent.key_calls import KeyCalls
from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    PROTOCOL,
    Activity,
    AddressMap,
    Admitted,
    CommittedPoint,
    Credential,
    Depart,
    EndJob,
    EqualPoint,
    Explain,
    Fenced,
    Finished,
    FromScheduler,
    FromWorker,
    GenerationStarted,
    GiveUp,
    Heartbeat,
    Holdings,
    Join,
    KeyAnswer,
    Leave,
    MemberRecord,
    Pairs,
    Pending,
    Process,
    Publish,
    RankPosition,
    Refusal,
    Refused,
    Register,
    ReportEnvelope,
    RoundId,
    RoundOpened,
    StopAt,
)
from samebits.core.point import Point
from samebits.core.reports import Body, Delivery, Digests, LastWords, Report, SavedPoints, StallReport, StopsAfter
from samebits.core.values import replace


class Reports:
    """The newest report of each kind, and when to send it.

    ``reports.Delivery`` defines when reports of a kind are sent. Each report is complete, so only the newest one is
    stored, and any of them may be lost.

    Attributes:
        to_explain: point and number of the commit whose digest was requested with its parts.
    """

    def __init__(self) -> None:
        self.to_explain: tuple[Point, int] | None = None
        self._newest: dict[type[Body], Report] = {}
        self._sent: dict[type[Body], Report] = {}

    def take(self, body: Report) -> None:
        """Keep a sensor's report."""
        self._newest[type(body)] = body

    def now(self, kind: type[Body]) -> list[Report]:
        """Return the newest report of a kind to send now, if it contains news or withdraws an earlier report."""
        body = self._newest.get(kind)
        if body is None or (body.is_empty and self._sent.get(kind, body).is_empty):
            return []
        self._sent[kind] = body
        return [body.explaining(self.to_explain) if isinstance(body, Digests) else body]

    def with_heartbeat(self, *, is_member: bool) -> list[Report]:
        """Return the reports to send with a heartbeat, by whether the sender forms a group or trains in one."""
        if not is_member:
            self.end_training()
        due: list[Report] = []
        for kind, body in self._newest.items():
            is_news = kind.delivery is Delivery.NEWS and body is not self._sent.get(kind)
            if is_news or kind.delivery is Delivery.STATE:
                due += self.now(kind)
        return due

    def end_training(self) -> None:
        """Withdraw reports that apply only to the generation that has ended."""
        for kind in [kind for kind in self._newest if kind.in_training]:
            del self._newest[kind]
        if StallReport in self._sent:
            self._newest[StallReport] = StallReport()

    def begin_connection(self) -> list[Report]:
        """Return the reports to send on a new connection.

        Reports on an earlier connection may not have arrived, so the next heartbeat repeats the newest ones.
        """
        for kind in [kind for kind in self._sent if kind.delivery is Delivery.NEWS and not kind.in_training]:
            del self._sent[kind]
        kept = [kind for kind in self._newest if kind.delivery is Delivery.KEPT]
        return [body for kind in kept for body in self.now(kind)]


# ---- the agent's knowledge: its connection, its seat and the round offered to it
#
# Facts that are only true together are stored in one frozen value, so flags cannot contradict each other. An event
# that changes a fact replaces its value.


class LinkState(enum.Enum):
    """State of the connection to the scheduler. Messages are sent only in the registered state."""

    CLOSED = "closed"
    OPEN = "open"
    REGISTERED = "registered"


class Link(msgspec.Struct, frozen=True):
    """The connection to the scheduler, and how long it has been of no use.

    Attributes:
        state: the connection's state.
        away_since: when the worker last heard from a scheduler whose job it belongs to, or may join.
        refused_since: when the present refusal began. None: not refused, or only for a cool-down.
        refusal: its reason.
    """

    state: LinkState
    away_since: float
    refused_since: float | None = None
    refusal: Refusal = Refusal.ALIVE

    @property
    def is_open(self) -> bool:
        """Return whether anything can be sent."""
        return self.state is not LinkState.CLOSED

    @property
    def is_registered(self) -> bool:
        """Return whether the scheduler has admitted this worker on this connection."""
        return self.state is LinkState.REGISTERED


class HeldSeat(msgspec.Struct, frozen=True):
    """The seat that this worker holds, as last announced by the scheduler.

    Attributes:
        sender: first field of all the holder's messages.
        slot: None for a spare.
        full_place: place in a world of full size, as admitted; None for a spare.
    """

    sender: Credential
    slot: int | None
    full_place: RankPosition | None


class RoundOffer(msgspec.Struct, frozen=True):
    """The newest round that the scheduler has offered to this worker.

    Attributes:
        round: its id.
        must_look: the round requires the content of the disk.
        is_gentle: the generation may continue to its next commit.
        committed: the last announced point that all members hold.
        text: why the round is open, and which nodes are missing.
        back_to: the point to return to, because newer ones are unreliable; None: the newest.
    """

    round: RoundId
    must_look: bool
    is_gentle: bool
    committed: Point | None
    text: str
    back_to: Point | None = None


class ReentryRequest(msgspec.Struct, frozen=True):
    """The last request to join a round again, and whether the process has done so."""

    round: RoundId
    place: RankPosition | None
    look: bool
    back_to: Point | None = None
    is_answered: bool = False


class AgentStage(enum.Enum):
    """Stage of an agent. TOLD_TO_END: holds its seat until the process exits. OVER: sends nothing more."""

    ACTIVE = "active"
    TOLD_TO_END = "told to end"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class AgentPolicy:
    """This worker's identity and time limits, in seconds.

    ``first_beat_s`` is the delay of the next heartbeat after another message, at most ``heartbeat_interval_s``. It
    differs between workers. Otherwise, thousands of workers that begin a generation together would always send their
    heartbeats at the same moment, which would delay the report of a loss.
    """

    node: str
    session: str
    process: Process
    job_name: str
    settings: Pairs
    heartbeat_interval_s: float = 1.0
    first_beat_s: float = 1.0
    topo_timeout_s: float = 1800.0
    job: str = ""  # the id that the launcher gave the job; "": any scheduler's job
    proof: bytes = b""  # a replacement's proof that the launcher started it
    failover_s: float | None = None  # how long a scheduler may be silent if there are others; None: there are none
    stranger_retry_s: float = 5.0  # how often a training worker tries a scheduler that does not know its job


class AgentCore:
    """The agent of one worker, without I/O, clock or threads."""

    def __init__(self, policy: AgentPolicy, now: float) -> None:
        self._policy = policy
        self._now = now
        self._ready = AgentReady()
        self._stage = AgentStage.ACTIVE
        self._link = Link(LinkState.CLOSED, away_since=now)
        self._failover = SchedulerFailover(policy.failover_s)
        self._ask_at = now
        self._beat_at = now
        # from the scheduler
        self.term = 0
        self._seat: HeldSeat | None = None  # None: never admitted
        self._offer: RoundOffer | None = None
        self.offered_place: RankPosition | None = None  # from the last round that contained one
        self.joined: RoundId | None = None  # the round that it joined last
        self._started: GenerationStarted | None = None  # the last one
        self.generation = 0  # its number
        self._final: Point | None = None
        # from the process
        self.activity = Activity.SEATED
        self.step_count = 0
        self._holdings: Holdings | None = None
        self._asked: ReentryRequest | None = None
        self._blob: bytes | None = None
        self._reports = Reports()
        self._key_calls = KeyCalls()
        self._departs = False  # it was asked to leave

    @property
    def seated(self) -> bool:
        """Return whether the process was ever admitted."""
        return self._seat is not None

    @property
    def job(self) -> str:
        """Return the ID of the job that admitted this worker, or "" before admission."""
        return self._seat.sender.job if self._seat else ""

    @property
    def expected_job(self) -> str:
        """Return the ID of the only job that this worker may join, from its launcher or its own, or "" if unknown."""
        return self.job or self._policy.job

    @property
    def incarnation(self) -> int:
        """Return the seat's incarnation; 0 before admission."""
        return self._seat.sender.incarnation if self._seat else 0

    @property
    def _sender(self) -> Credential | None:
        """Return the credential for messages, or None while the scheduler would not accept any."""
        return self._seat.sender if self._seat is not None and self._link.is_registered else None

    @property
    def slot(self) -> int | None:
        """Return the slot of the worker's seat, or None for a spare and before admission."""
        return self._seat.slot if self._seat else None

    @property
    def offered(self) -> RoundId | None:
        """Return the newest round that was offered, or None."""
        return self._offer.round if self._offer else None

    def step(self, event: AgentEvent, now: float) -> AgentReady:
        """Process one event."""
        self._now = now
        if self._stage is not AgentStage.OVER:
            self._dispatch(event)
        ready, self._ready = self._ready, AgentReady()
        ready.wake_at = self._wake_at()
        return ready

    # ---- the process

    def _dispatch(self, event: AgentEvent) -> None:
        match event:
            case Passed():
                if self.activity is not Activity.DONE:  # once done, the step stays that of the durable commit
                    self.step_count = event.step
                self._pass()
            case Heard():
                self._hear(event.message)
            case Observed(body):
                self._observed(body)
            case Connected():
                self._link = replace(self._link, state=LinkState.OPEN)
                self._failover.opened(self._now)
                self._register()
            case Disconnected():
                self._disconnected()
            case Failed():
                if self.activity in (Activity.FORMING, Activity.TRAINING, Activity.DONE):
                    self._become(Activity.WAITING)
            case Entered():
                self._enter(event)
            case Addressed(generation, blob):
                if generation == self.generation and self.activity is Activity.FORMING:
                    self._blob = blob
                    self._publish()
            case Trains(generation):
                if generation == self.generation and self.activity is Activity.FORMING:
                    self._become(Activity.TRAINING)
                    self._repeat(SavedPoints)
            case Completed(generation, step):
                self.step_count = step
                if generation == self.generation and self.activity is Activity.TRAINING:
                    self._become(Activity.DONE)
                    if self._offer and self._is_invited() and self._offer.is_gentle:  # no later commit follows
                        self._ready.notices.append(BreakGroup(self._offer.text))
            case Called(ticket, ask):
                self._key_calls.begin(ticket, ask, self._now)
                self._call_keys()
            case GaveUp(ticket):
                self._key_calls.give_up(ticket)
                self._call_keys()
            case RefusedByAll(text):
                if self.activity is not Activity.TRAINING:  # training continues without a scheduler
                    self._end(EndKind.REFUSED, f"worker {self._policy.node}: {text}")
            case Leaving(on_purpose, text, status):
                if self._seat is not None:
                    self._send(Leave(self._seat.sender, on_purpose, text, self.step_count, status))
                self._stage = AgentStage.OVER

    def _become(self, activity: Activity) -> None:
        self.activity = activity
        if activity is not Activity.FORMING:
            self._blob = None
        self._heartbeat()

    def _enter(self, event: Entered) -> None:
        if event.seen is not None and event.seen < self.generation:
            return  # sent before the process knew that its last entry led to a generation
        self._holdings = event.holdings
        if self._asked is not None:
            self._asked = replace(self._asked, is_answered=True)
        if self.activity is not Activity.FINISHED:
            self.activity, self._blob = Activity.WAITING, None
            self._join()
            if self._is_invited():  # otherwise only a heartbeat reports the failed collective
                self._beat_at = self._now + self._policy.first_beat_s
            else:
                self._heartbeat()

    def _is_invited(self) -> bool:
        """Return whether a newer round than this process's current generation has been offered."""
        return self._offer is not None and (self._started is None or self._offer.round > self._started.round)

    def _join(self) -> None:
        holdings, offer, sender = self._holdings, self._offer, self._sender
        if holdings is None or offer is None or sender is None:
            return
        if (offer.must_look and not holdings.looked) or offer.back_to not in (None, holdings.back_to):
            self._ask(holdings, offer, self.offered_place or holdings.place)
            return
        self.joined = offer.round
        self._send(Join(sender, offer.round, holdings))

    def _ask(self, holdings: Holdings, offer: RoundOffer, place: RankPosition | None) -> None:
        """Ask the process to join the round again, because what it holds does not fit. Each reason is sent once."""
        asked = ReentryRequest(offer.round, place, offer.must_look and not holdings.looked, offer.back_to)
        if asked != self._asked:
            again = EnterAgain(place, look=asked.look, committed=offer.committed, back_to=offer.back_to)
            self._ready.notices.append(again)
        self._asked = asked

    def _publish(self) -> None:
        if self._blob is not None and (sender := self._sender):
            self._send(Publish(sender, self.generation, self._blob))

    def _observed(self, body: Report) -> None:
        if body.delivery is Delivery.ONCE:
            # A dying process reports its error even before the scheduler has answered on this connection.
            sender = self._seat.sender if self._seat and isinstance(body, LastWords) else self._sender
            if sender is not None:
                self._say(sender, [body])
            return
        self._reports.take(body)
        if body.delivery is Delivery.KEPT:
            self._repeat(type(body))

    def _repeat(self, kind: type[Report]) -> None:
        """Send the newest report of this kind."""
        if sender := self._sender:
            self._say(sender, self._reports.now(kind))

    def _say(self, sender: Credential, bodies: Iterable[Report]) -> None:
        self._ready.sends += [ReportEnvelope(sender, body, self.generation, self.step_count) for body in bodies]

    def _call_keys(self) -> None:
        if sender := self._sender:
            self._ready.sends += self._key_calls.due(sender, self._now, self.term)

    # ---- time

    def _pass(self) -> None:
        self._call_keys()
        is_unsure = self._link.is_registered and self._failover.is_doubtful(self._now)
        if (self._link.state is LinkState.OPEN or is_unsure) and self._ask_at <= self._now:
            self._register()
        if self._link.is_open and self._failover.is_over(self._now):
            said_nothing = f"the scheduler there has said nothing for {self._policy.failover_s or 0:g} s"
            self._look_elsewhere(TryNextAddress(said_nothing))
        if self._beat_at <= self._now and (sender := self._sender):
            self._heartbeat()
            self._beat_at = self._now + self._policy.heartbeat_interval_s
            self._publish()
            is_member = self.activity in (Activity.FORMING, Activity.TRAINING)
            self._say(sender, self._reports.with_heartbeat(is_member=is_member))
            if self.activity is Activity.DONE:
                self._repeat(Digests)
        deadline = self._patience_ends_at()
        if deadline is not None and deadline <= self._now:
            self._lose_patience()

    def _patience_ends_at(self) -> float | None:
        link = self._link
        if self.activity is Activity.FINISHED or self._stage is not AgentStage.ACTIVE:
            return None
        if link.refused_since is not None:
            return link.refused_since + self._policy.topo_timeout_s
        if not link.is_registered and self.activity is not Activity.TRAINING:
            return link.away_since + self._policy.topo_timeout_s
        return None

    def _look_elsewhere(self, objection: TryNextAddress) -> None:
        self._failover.opened(self._now)  # restarts the timer until the connection is closed
        self._ready.notices.append(objection)

    def _lose_patience(self) -> None:
        waited = f"after {self._policy.topo_timeout_s:g} s (TOPO_TIMEOUT)"
        if self._link.refused_since is not None and self._link.refusal is Refusal.FULL:
            self._end(EndKind.REFUSED, f"worker {self._policy.node}: every seat is still held {waited}")
        elif self._link.refused_since is not None:
            self._end(EndKind.DUPLICATE, f"worker {self._policy.node}: its seat is still held {waited}")
        else:
            self._end(EndKind.UNREACHABLE, f"worker {self._policy.node}: no scheduler answered {waited}")

    def _wake_at(self) -> float | None:
        if self._stage is AgentStage.OVER:
            return None
        patience_ends_at = self._patience_ends_at()
        if not self._link.is_open:
            return patience_ends_at
        speak_at = self._beat_at if self._link.is_registered else self._ask_at
        if self._link.is_registered and (say_at := self._key_calls.say_at) is not None:
            speak_at = min(speak_at, say_at)
        if (failover_at := self._failover.wake_at(self._now)) is not None:
            speak_at = min(speak_at, max(failover_at, self._ask_at) if self._link.is_registered else failover_at)
        return speak_at if patience_ends_at is None else min(speak_at, patience_ends_at)

    # ---- the connection

    def _disconnected(self) -> None:
        if self._link.is_registered:
            self._link = replace(self._link, away_since=self._now)
            self._ready.notices.append(SchedulerAway())
        self._link = replace(self._link, state=LinkState.CLOSED)

    def _register(self) -> None:
        policy = self._policy
        self._ask_at = self._now + policy.heartbeat_interval_s
        self._ready.sends.append(
            Register(
                protocol=PROTOCOL,
                job=self.expected_job,
                job_name=policy.job_name,
                node=policy.node,
                session=policy.session,
                incarnation=self.incarnation,
                process=policy.process,
                settings=policy.settings,
                standing=self._standing(),
                proof=policy.proof,
                term=self.term,
            )
        )

    def _standing(self) -> MemberRecord | None:
        started = self._started
        if started is None:
            return None
        return MemberRecord(
            term=self.term,
            generation=started.generation,
            round=started.round,
            slot=started.slot,
            world_size=started.world_size,
            restore=started.restore,
            final=self._final,
            rank=started.rank,
        )

    def _heartbeat(self) -> None:
        self._beat_at = self._now + self._policy.first_beat_s
        if sender := self._sender:
            self._send(
                Heartbeat(
                    sender=sender,
                    term=self.term,
                    activity=self.activity,
                    generation=self.generation,
                    round=self.joined,
                    step=self.step_count,
                )
            )

    def _send(self, message: FromWorker) -> None:
        self._ready.sends.append(message)

    # ---- the scheduler

    def _hear(self, message: FromScheduler) -> None:
        objection = self._failover.objection(message, self.expected_job, self.term)
        if objection is not None:
            self._look_elsewhere(objection)
            return
        self._failover.heard(message, self._now)
        match message:
            case Admitted():
                self._admitted(message)
            case Pending():
                if message.session == self._policy.session and not self.seated:
                    self._link = replace(self._link, away_since=self._now)
                    text = f"{message.registered}/{message.world_size} registered; waiting for the others"
                    self._ready.notices.append(ToldToWait(text, 0.0))
            case Refused():
                self._refused(message)
            case Fenced():
                is_of_my_job = not self.seated or (message.job == self.job and not self._is_late(message.term))
                if message.session == self._policy.session and is_of_my_job:
                    self._end(EndKind.FENCED, message.text, may_return=message.may_return)
            case RoundOpened():
                if self._is_for_me(message):
                    self._round_opened(message)
            case GenerationStarted():
                if self._is_for_me(message):
                    self._generation_started(message)
            case AddressMap():
                if self._is_of_my_job(message) and message.generation == self.generation:
                    self._ready.notices.append(message)
            case CommittedPoint():
                if self._is_of_my_job(message) and message.generation >= self.generation:
                    self._ready.notices.append(message)
            case EqualPoint():
                if self._is_of_my_job(message) and message.generation == self.generation:
                    self._ready.notices.append(message)
            case Explain():
                if self._is_of_my_job(message):
                    self._reports.to_explain = (message.point, message.commits)
                    self._repeat(Digests)
            case KeyAnswer():
                if message.session == self._policy.session and message.term >= self.term:
                    ticket = self._key_calls.answered(message.number)
                    if ticket is not None:
                        self._ready.notices.append(Answered(ticket, message))
                    self._call_keys()
            case GiveUp():
                if self._is_for_me(message):
                    self._end(EndKind.STUCK, message.text)
            case Depart():
                if self._is_for_me(message) and not self._departs:
                    self._departs = True  # requests repeat until it has left; one answer is enough
                    self._ready.notices.append(message)
            case StopAt():
                if self._is_of_my_job(message) and message.generation == self.generation:
                    self._ready.notices.append(message)
                    self._repeat(StopsAfter)
            case Finished():
                if self.seated and message.job == self.job:  # true in every term
                    self._finished(message.point)
            case EndJob():
                self._end_job(message)

    def _is_for_me(self, message: RoundOpened | GenerationStarted | GiveUp | Depart) -> bool:
        return self._is_of_my_job(message) and message.incarnation == self.incarnation

    def _is_of_my_job(
        self,
        message: RoundOpened
        | GenerationStarted
        | AddressMap
        | CommittedPoint
        | EqualPoint
        | Explain
        | GiveUp
        | Depart
        | StopAt,
    ) -> bool:
        """Return whether a message comes from the current scheduler of this worker's job."""
        return self.seated and message.job == self.job and message.term >= self.term

    def _is_late(self, term: int) -> bool:
        """Return whether a term belongs to an earlier scheduler. Earlier releases send 0."""
        return 0 < term < self.term

    def _admitted(self, message: Admitted) -> None:
        if message.session != self._policy.session or message.term < self.term or not self._link.is_open:
            return  # on a closed connection it may be from a scheduler that is gone
        if self.expected_job not in ("", message.job):
            return  # another launcher's scheduler
        if self.seated and (message.job, message.incarnation) != (self.job, self.incarnation):
            return  # a late message of another job's scheduler must not take this process over
        first, resumed = not self.seated, self.seated and not self._link.is_registered
        if self._link.is_registered and self._failover.has_choice:
            return  # only a sign of life was requested
        sender = Credential(message.job, self._policy.node, self._policy.session, message.incarnation)
        slot = message.slot
        self._seat = HeldSeat(sender, slot, None if slot is None else RankPosition(slot, slot, message.world_size))
        self.term = message.term
        self._link = replace(self._link, state=LinkState.REGISTERED, refused_since=None)
        if first:
            self._ready.notices.append(message)
        elif resumed:
            self._ready.notices.append(SchedulerBack(message.term, self._now - self._link.away_since))
        if message.finished is not None:
            self._finished(message.finished)
        self._key_calls.say_all_again(self._now)
        self._call_keys()
        if first:  # the registration contained everything else
            self._beat_at = self._now + self._policy.first_beat_s
        else:
            self._heartbeat()
            self._publish()
        self._say(sender, self._reports.begin_connection())

    def _refused(self, message: Refused) -> None:
        if message.session != self._policy.session or (message.job == self.job != "" and self._is_late(message.term)):
            return
        if message.refusal is Refusal.NUMERICS:
            self._end(EndKind.NUMERICS, message.text)
        elif self.activity is Activity.TRAINING:
            # A scheduler that does not know this job must not stop its training.
            self._ask_at = self._now + self._policy.stranger_retry_s
            self._ready.notices.append(ToldToWait(message.text, self._policy.stranger_retry_s))
        elif message.retry_after_s <= 0:
            self._end(EndKind.REFUSED, message.text)
        elif not self._link.is_registered:
            self._ask_at = self._now + message.retry_after_s
            if message.refusal is Refusal.COOLING_DOWN:
                self._link = replace(self._link, refused_since=None)
            elif self._link.refused_since is None or message.refusal is not self._link.refusal:
                self._link = replace(self._link, refused_since=self._now, refusal=message.refusal)
            self._link = replace(self._link, away_since=self._now + message.retry_after_s)
            self._ready.notices.append(ToldToWait(message.text, message.retry_after_s))

    def _round_opened(self, message: RoundOpened) -> None:
        before, self.term = self._offer, message.term
        if self.activity is Activity.FINISHED or (before is not None and message.round < before.round):
            return
        is_new = before is None or message.round != before.round
        hardens = before is not None and before.is_gentle and not message.gently
        text = message.text + (f"; waiting for {message.missing}" if message.missing else "")
        self._offer = offer = RoundOffer(
            message.round, message.look, message.gently, message.committed, text, message.back_to
        )
        if message.place is not None:
            self._sit(message.place.slot)
            self.offered_place = message.place
        if (is_new or hardens) and self.activity in (Activity.FORMING, Activity.TRAINING, Activity.DONE):
            leave = LeaveGently if message.gently and self.activity is Activity.TRAINING else BreakGroup
            self._ready.notices.append(leave(text))
        elif message.missing and self.activity is Activity.WAITING and (before is None or text != before.text):
            self._ready.notices.append(Waits(text))
        elif is_new and self.activity is Activity.SEATED:
            self._ready.notices.append(Invited())
        if self.activity is not Activity.WAITING or self._holdings is None:
            return
        if message.place is None or self._is_ready_for(message.place) or self._was_asked_for(message.place):
            self._join()
        else:
            self._ask(self._holdings, offer, message.place)

    def _sit(self, slot: int | None) -> None:
        if self._seat is not None and self._seat.slot != slot:
            self._seat = replace(self._seat, slot=slot)

    def _is_ready_for(self, place: RankPosition) -> bool:
        """Return whether the process's holdings were made for this place; by default, the place in a full world."""
        full_place = self._seat.full_place if self._seat else None
        return self._holdings is not None and (self._holdings.place or full_place) == place

    def _was_asked_for(self, place: RankPosition) -> bool:
        """Return whether the process was already asked to join again for this round and place."""
        asked = self._asked
        return asked is not None and asked.is_answered and (asked.round, asked.place) == (self.offered, place)

    def _generation_started(self, message: GenerationStarted) -> None:
        self.term = message.term
        if self._holdings is None or message.generation <= self.generation or message.round != self.joined:
            return
        if self._offer is not None and message.round < self._offer.round:
            return  # outdated: the round that replaces it was announced first, and only once
        is_ready = self._is_ready_for(RankPosition(message.slot, message.rank, message.world_size))
        blob = self._holdings.blob if is_ready else b""
        self.generation, self._blob, self._holdings = message.generation, blob or None, None
        self._started = message
        self._reports.end_training()
        self._sit(message.slot)
        if self._offer is not None:
            self._offer = replace(self._offer, must_look=False, back_to=None)
        self._ready.notices.append(Began(message, is_addressed=is_ready))
        self._become(Activity.FORMING)

    def _finished(self, point: Point) -> None:
        if self.activity is not Activity.FINISHED:
            self._holdings, self._final = None, point
            self._ready.notices.append(Over(point))
            self._become(Activity.FINISHED)

    def _end_job(self, message: EndJob) -> None:
        if message.term < self.term or self.expected_job not in ("", message.job):
            return
        if message.kind is EndKind.FINISHED:
            if not self.seated:
                self._end(EndKind.REFUSED, "the job is finished: there is nothing left to do")
        else:
            self._end(message.kind, message.text)

    def _end(self, reason: EndKind, text: str, *, may_return: bool = False) -> None:
        if self._stage is AgentStage.ACTIVE:
            self._ready.notices.append(MustEnd(reason, text, may_return))
            # The seat stays held until the process exits; a process without a seat must send nothing more.
            is_unseated = reason in (EndKind.FENCED, EndKind.REFUSED, EndKind.NUMERICS, EndKind.DUPLICATE)
            self._stage = AgentStage.OVER if is_unseated else AgentStage.TOLD_TO_END
