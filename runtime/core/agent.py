"""The worker's side of membership: ``step(event, now) -> AgentReady``, pure like the scheduler's core.

The agent turns what its process does (enters the rendezvous, publishes its address, is done) into reports, and what the
scheduler says into notices for its process. It repeats itself: on every connection it registers again, every
heartbeat is its whole truth, and while it forms a group it repeats its address. So any message may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.core.agent_events import (
    Addressed,
    AgentEvent,
    AgentReady,
    Began,
    BreakGroup,
    CommittedByAll,
    Compared,
    Completed,
    Connected,
    Disconnected,
    EndReason,
    EnterAgain,
    Entered,
    Failed,
    Heard,
    LeaveGently,
    Leaving,
    Mapped,
    MustEnd,
    Over,
    Passed,
    Saved,
    SawDeath,
    SchedulerAway,
    SchedulerBack,
    Seated,
    Spoke,
    ToldToWait,
    Trains,
    Waits,
)
from runtime.core.messages import (
    MAX_DIGESTS,
    MAX_PARTS,
    MAX_SAVED_POINTS,
    PROTOCOL,
    Activity,
    AddressMap,
    Admitted,
    CommittedPoint,
    Credential,
    Digest,
    Digests,
    EndJob,
    EndKind,
    Explain,
    Fenced,
    Finished,
    FromScheduler,
    FromWorker,
    GenerationStarted,
    GiveUp,
    Heartbeat,
    Join,
    LastWords,
    Leave,
    Pairs,
    PeerGone,
    Pending,
    Place,
    Process,
    Progress,
    Publish,
    Refusal,
    Refused,
    Register,
    RoundId,
    RoundOpened,
    SavedPoints,
    Standing,
    Still,
)
from runtime.core.point import Point
from runtime.core.values import replace


@dataclass(frozen=True, slots=True)
class AgentPolicy:
    """Who this worker is and how long it is patient. Durations in seconds.

    ``first_beat_s`` is how soon it beats again after it has said something else, at most ``heartbeat_interval_s``.
    Thousands begin a generation at the same moment: if each waited as long as the others, all would beat in one breath
    from then on, and a loss that the scheduler is told of would wait behind them. So it is to be another for each.
    """

    node: str
    session: str
    process: Process
    job_name: str
    settings: Pairs
    heartbeat_interval_s: float = 1.0
    first_beat_s: float = 1.0
    topo_timeout_s: float = 1800.0
    proof: bytes = b""  # of a replacement
    stranger_retry_s: float = 5.0  # how often a training worker tries a scheduler that does not know its job


_END_REASONS = {
    EndKind.STOPPED: EndReason.STOPPED,
    EndKind.INTERRUPTED: EndReason.INTERRUPTED,
    EndKind.FORMATION_TIMEOUT: EndReason.FORMATION_TIMEOUT,
    EndKind.FAILED: EndReason.FAILED,
    EndKind.SCRIPT_FAILED: EndReason.SCRIPT_FAILED,
    EndKind.UNTRAINED: EndReason.UNTRAINED,
    EndKind.UNEQUAL: EndReason.UNEQUAL,
}


class AgentCore:
    """One worker's agent: no I/O, no clock, no threads."""

    def __init__(self, policy: AgentPolicy, now: float) -> None:
        self._policy = policy
        self._now = now
        self._ready = AgentReady()
        self.job = ""
        self.incarnation = 0
        self._sender = Credential("", policy.node, policy.session, 0)  # of these two
        self.term = 0
        self.activity = Activity.SEATED
        self.generation = 0
        self.step_count = 0
        self._progress: Progress | None = None  # where the process stands still
        self._is_told_still = False  # of it
        self.slot: int | None = None  # None: a spare's
        self.offered_place: Place | None = None  # by the last round
        self._full_place: Place | None = None  # in a world of full size, as admitted
        self._started: GenerationStarted | None = None  # the last
        self._final: Point | None = None
        self._joined: RoundId | None = None
        self._offered: RoundId | None = None
        self._must_look = False  # that round wants to know what the disk holds
        self._committed: Point | None = None  # as that round was told
        self._is_gentle = False  # that round lets the generation go on to its next commit
        self._entered: Entered | None = None
        self._asked: tuple[RoundId, Place | None, bool] | None = None  # what it was asked last to enter again for
        self._is_asked = False  # and has not yet
        self._blob: bytes | None = None
        self._saved: tuple[Point, ...] = ()  # what its disk holds
        self._digests: tuple[Digest, ...] = ()  # of its commits
        self._to_explain: tuple[Point, int] | None = None  # which of them is wanted with its parts
        self._connected = False
        self._registered = False  # on this connection
        self._away_since = now
        self._refused_since: float | None = None
        self._refusal = Refusal.ALIVE  # since then
        self._ask_at = now
        self._beat_at = now
        self._waits_for = ""
        self._told_to_end = False
        self._ended = False

    @property
    def seated(self) -> bool:
        """Whether the process was ever admitted."""
        return self.incarnation > 0

    def step(self, event: AgentEvent, now: float) -> AgentReady:
        """Take one event into account."""
        self._now = now
        if not self._ended:
            self._dispatch(event)
        ready, self._ready = self._ready, AgentReady()
        ready.wake_at = self._wake_at()
        return ready

    # ---- the process

    def _dispatch(self, event: AgentEvent) -> None:
        match event:
            case Passed():
                if self.activity is not Activity.DONE:  # there the step is that of the durable commit
                    self.step_count = event.step
                self._progress = event.progress
                self._pass()
            case Heard():
                self._hear(event.message)
            case Saved():
                self._saved = event.points
                self._report_saved()
            case Compared():
                self._digests = event.digests
                self._report_digests()
            case Connected():
                self._connected, self._registered = True, False
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
                    self._report_saved()
            case Completed(generation, step):
                self.step_count = step
                if generation == self.generation and self.activity is Activity.TRAINING:
                    self._become(Activity.DONE)
                    if self._is_invited() and self._is_gentle:  # there was no commit at which it could leave
                        self._ready.notices.append(BreakGroup(self._waits_for))
            case Spoke(text):
                if self.seated:
                    self._send(LastWords(self._sender, text, self.step_count))
            case SawDeath(session):
                if self._registered:  # else the scheduler finds out by itself
                    self._send(PeerGone(self._sender, session))
            case Leaving(on_purpose, text):
                if self.seated:
                    self._send(Leave(self._sender, on_purpose, text))
                self._ended = True

    def _become(self, activity: Activity) -> None:
        self.activity = activity
        if activity is not Activity.FORMING:
            self._blob = None
        self._heartbeat()

    def _enter(self, event: Entered) -> None:
        if event.seen is not None and event.seen < self.generation:
            return  # said before the process heard that its last entry has led to a generation
        self._entered, self._is_asked = event, False
        if self.activity is not Activity.FINISHED:
            self.activity, self._blob = Activity.WAITING, None
            self._join()
            if self._is_invited():  # else only this tells that its collective has failed
                self._beat_at = self._now + self._policy.first_beat_s
            else:
                self._heartbeat()

    def _is_invited(self) -> bool:
        """Whether a round was offered that has not become this process's generation: its join then says it all."""
        return self._offered is not None and (self._started is None or self._offered > self._started.round)

    def _join(self) -> None:
        if self._entered is None or self._offered is None or not self._registered:
            return
        entered = self._entered
        if self._must_look and not entered.looked:
            self._ask(self.offered_place or entered.place)
            return
        self._joined = self._offered
        self._send(
            Join(
                sender=self._sender,
                round=self._offered,
                points=entered.points,
                own_parts=entered.own_parts,
                numerics=entered.numerics,
                blob=entered.blob,
                place=entered.place,
                live=entered.live,
                looked=entered.looked,
                commits=entered.commits,
                copies=entered.copies,
                page=entered.page,
                live_step=entered.live_step,
                orphaned_pages=entered.orphaned_pages,
            )
        )

    def _ask(self, place: Place | None) -> None:
        """What was brought does not fit the round: let the process enter again, once for the same."""
        assert self._entered is not None and self._offered is not None
        asked = (self._offered, place, self._must_look and not self._entered.looked)
        if asked != self._asked or not self._is_asked:
            self._ready.notices.append(EnterAgain(place, look=asked[2], committed=self._committed))
        self._asked, self._is_asked = asked, True

    def _publish(self) -> None:
        if self._blob is not None and self._registered:
            self._send(Publish(self._sender, self.generation, self._blob))

    def _report_still(self) -> None:
        progress = self._progress if self.activity is Activity.TRAINING else None
        if progress is not None or self._is_told_still:
            self._send(Still(self._sender, self.generation, self.step_count, progress))
        self._is_told_still = progress is not None

    def _report_saved(self) -> None:
        if self._saved and self._registered:
            self._send(SavedPoints(self._sender, self._saved[-MAX_SAVED_POINTS:]))

    def _report_digests(self) -> None:
        if not (self._digests and self._registered):
            return
        told = [
            replace(one, parts=one.parts[:MAX_PARTS] if (one.point, one.commits) == self._to_explain else ())
            for one in self._digests[-MAX_DIGESTS:]
        ]
        self._send(Digests(self._sender, tuple(told)))

    # ---- time

    def _pass(self) -> None:
        if self._connected and not self._registered and self._ask_at <= self._now:
            self._register()
        if self._registered and self._beat_at <= self._now:
            self._heartbeat()
            self._beat_at = self._now + self._policy.heartbeat_interval_s
            self._publish()
            self._report_still()
            if self.activity is Activity.DONE:
                self._report_digests()
        deadline = self._patience_ends_at()
        if deadline is not None and deadline <= self._now:
            self._lose_patience()

    def _patience_ends_at(self) -> float | None:
        if self.activity is Activity.FINISHED or self._told_to_end:
            return None
        if self._refused_since is not None:
            return self._refused_since + self._policy.topo_timeout_s
        if not self._registered and self.activity is not Activity.TRAINING:
            return self._away_since + self._policy.topo_timeout_s
        return None

    def _lose_patience(self) -> None:
        waited = f"after {self._policy.topo_timeout_s:g} s (TOPO_TIMEOUT)"
        if self._refused_since is not None and self._refusal is Refusal.FULL:
            self._end(EndReason.REFUSED, f"worker {self._policy.node}: every seat is still held {waited}")
        elif self._refused_since is not None:
            self._end(EndReason.DUPLICATE, f"worker {self._policy.node}: its seat is still held {waited}")
        else:
            self._end(EndReason.UNREACHABLE, f"worker {self._policy.node}: no scheduler answered {waited}")

    def _wake_at(self) -> float | None:
        if self._ended:
            return None
        patience_ends_at = self._patience_ends_at()
        if not self._connected:
            return patience_ends_at
        speak_at = self._beat_at if self._registered else self._ask_at
        return speak_at if patience_ends_at is None else min(speak_at, patience_ends_at)

    # ---- the connection

    def _disconnected(self) -> None:
        if self._registered:
            self._away_since = self._now
            self._ready.notices.append(SchedulerAway())
        self._connected = self._registered = False

    def _register(self) -> None:
        policy = self._policy
        self._ask_at = self._now + policy.heartbeat_interval_s
        self._ready.sends.append(
            Register(
                protocol=PROTOCOL,
                job=self.job,
                job_name=policy.job_name,
                node=policy.node,
                session=policy.session,
                incarnation=self.incarnation,
                process=policy.process,
                settings=policy.settings,
                standing=self._standing(),
                proof=policy.proof,
            )
        )

    def _standing(self) -> Standing | None:
        started = self._started
        if started is None:
            return None
        return Standing(
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
        if self._registered:
            self._send(
                Heartbeat(
                    sender=self._sender,
                    term=self.term,
                    activity=self.activity,
                    generation=self.generation,
                    round=self._joined,
                    step=self.step_count,
                )
            )

    def _send(self, message: FromWorker) -> None:
        self._ready.sends.append(message)

    # ---- the scheduler

    def _hear(self, message: FromScheduler) -> None:
        match message:
            case Admitted():
                self._admitted(message)
            case Pending():
                if message.session == self._policy.session and not self.seated:
                    self._away_since = self._now
                    text = f"{message.registered}/{message.world_size} registered; waiting for the others"
                    self._ready.notices.append(ToldToWait(text, 0.0))
            case Refused():
                self._refused(message)
            case Fenced():
                if message.session == self._policy.session and (not self.seated or message.job == self.job):
                    self._end(EndReason.FENCED, message.text, may_return=message.may_return)
            case RoundOpened():
                if self._is_for_me(message):
                    self._round_opened(message)
            case GenerationStarted():
                if self._is_for_me(message):
                    self._generation_started(message)
            case AddressMap():
                if self._is_of_my_job(message) and message.generation == self.generation:
                    self._ready.notices.append(Mapped(message.generation, message.blobs))
            case CommittedPoint():
                if self._is_of_my_job(message) and message.generation >= self.generation:
                    self._ready.notices.append(CommittedByAll(message.point))
            case Explain():
                if self._is_of_my_job(message):
                    self._to_explain = (message.point, message.commits)
                    self._report_digests()
            case GiveUp():
                if self._is_for_me(message):
                    self._end(EndReason.STUCK, message.text)
            case Finished():
                if self.seated and message.job == self.job:  # true in whatever term it was said
                    self._finished(message.point)
            case EndJob():
                self._end_job(message)

    def _is_for_me(self, message: RoundOpened | GenerationStarted | GiveUp) -> bool:
        return self._is_of_my_job(message) and message.incarnation == self.incarnation

    def _is_of_my_job(
        self, message: RoundOpened | GenerationStarted | AddressMap | CommittedPoint | Explain | GiveUp
    ) -> bool:
        """Not the late word of a scheduler that was replaced, nor of another job's, which counts from 1 as well."""
        return self.seated and message.job == self.job and message.term >= self.term

    def _admitted(self, message: Admitted) -> None:
        if message.session != self._policy.session or message.term < self.term or not self._connected:
            return  # over a connection that is gone it is the word of a scheduler that may be gone, too
        if self.seated and (message.job, message.incarnation) != (self.job, self.incarnation):
            return  # a late word of another job's scheduler must not take this process away from its own
        first, resumed = not self.seated, self.seated and not self._registered
        self.slot = slot = message.slot
        self._full_place = None if slot is None else Place(slot, slot, message.world_size)
        self.job, self.term, self.incarnation = message.job, message.term, message.incarnation
        self._sender = Credential(self.job, self._policy.node, self._policy.session, self.incarnation)
        self._registered, self._refused_since = True, None
        if first:
            self._ready.notices.append(Seated(message))
        elif resumed:
            self._ready.notices.append(SchedulerBack(message.term, self._now - self._away_since))
        if message.finished is not None:
            self._finished(message.finished)
        if first:  # its registration said it all
            self._beat_at = self._now + self._policy.first_beat_s
        else:
            self._heartbeat()
            self._publish()
            self._report_saved()
            self._report_digests()

    def _refused(self, message: Refused) -> None:
        if message.session != self._policy.session:
            return
        if message.refusal is Refusal.NUMERICS:
            self._end(EndReason.NUMERICS, message.text)
        elif self.activity is Activity.TRAINING:
            # A scheduler that does not know this job must not stop its training.
            self._ask_at = self._now + self._policy.stranger_retry_s
            self._ready.notices.append(ToldToWait(message.text, self._policy.stranger_retry_s))
        elif message.retry_after_s <= 0:
            self._end(EndReason.REFUSED, message.text)
        elif not self._registered:
            self._ask_at = self._now + message.retry_after_s
            if message.refusal is Refusal.COOLING_DOWN:
                self._refused_since = None
            elif self._refused_since is None or message.refusal is not self._refusal:
                self._refused_since, self._refusal = self._now, message.refusal
            self._away_since = self._now + message.retry_after_s
            self._ready.notices.append(ToldToWait(message.text, message.retry_after_s))

    def _round_opened(self, message: RoundOpened) -> None:
        self.term = message.term
        if self.activity is Activity.FINISHED or (self._offered is not None and message.round < self._offered):
            return
        is_new = message.round != self._offered
        hardens = self._is_gentle and not message.gently
        self._offered, self._must_look, self._is_gentle = message.round, message.look, message.gently
        self._committed = message.committed
        if message.place is not None:
            self.slot, self.offered_place = message.place.slot, message.place
        text = message.text + (f"; waiting for {message.missing}" if message.missing else "")
        if (is_new or hardens) and self.activity in (Activity.FORMING, Activity.TRAINING, Activity.DONE):
            leave = LeaveGently if message.gently and self.activity is Activity.TRAINING else BreakGroup
            self._ready.notices.append(leave(text))
        elif message.missing and self.activity is Activity.WAITING and text != self._waits_for:
            self._ready.notices.append(Waits(text))
        self._waits_for = text
        if self.activity is not Activity.WAITING or self._entered is None:
            return
        if message.place is None or self._is_ready_for(message.place) or self._was_asked_for(message.place):
            self._join()
        else:
            self._ask(message.place)

    def _is_ready_for(self, place: Place) -> bool:
        """Whether what it brought was made for this place; where it did not say for which, for a full world's."""
        return self._entered is not None and (self._entered.place or self._full_place) == place

    def _was_asked_for(self, place: Place) -> bool:
        """Whether it has entered again for this round and place already, whatever it has brought."""
        asked = None if self._is_asked or self._asked is None else self._asked[:2]
        return asked == (self._offered, place)

    def _generation_started(self, message: GenerationStarted) -> None:
        self.term = message.term
        if self._entered is None or message.generation <= self.generation or message.round != self._joined:
            return
        if self._offered is not None and message.round < self._offered:
            return  # it is over already: the round that replaces it was told first, and would not be told as new again
        is_ready = self._is_ready_for(Place(message.slot, message.rank, message.world_size))
        blob = self._entered.blob if is_ready else b""
        self.generation, self._blob, self._entered = message.generation, blob or None, None
        self._started, self._must_look, self.slot = message, False, message.slot
        self._ready.notices.append(Began(message, is_addressed=is_ready))
        self._become(Activity.FORMING)

    def _finished(self, point: Point) -> None:
        if self.activity is not Activity.FINISHED:
            self._entered, self._final = None, point
            self._ready.notices.append(Over(point))
            self._become(Activity.FINISHED)

    def _end_job(self, message: EndJob) -> None:
        if message.term < self.term or (self.seated and message.job != self.job):
            return
        if message.kind is EndKind.FINISHED:
            if not self.seated:
                self._end(EndReason.REFUSED, "the job is finished: there is nothing left to do")
        else:
            self._end(_END_REASONS[message.kind], message.text)

    def _end(self, reason: EndReason, text: str, *, may_return: bool = False) -> None:
        if not self._told_to_end:
            self._told_to_end = True
            self._ready.notices.append(MustEnd(reason, text, may_return))
            # The seat stays held until the process really leaves; whoever holds none must not say another word.
            self._ended = reason in (EndReason.FENCED, EndReason.REFUSED, EndReason.NUMERICS, EndReason.DUPLICATE)
