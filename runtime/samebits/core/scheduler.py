"""The scheduler's decisions: ``step(event, now) -> Ready`` (docs/contributors/architecture.md).

The caller passes in events and carries out the result: first records to disk, then messages, then notes. This module
makes the decisions that concern several parts, such as when a round must open and when training is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from samebits.core.causes.table import CauseClass, LossDetection, Means, Observation, Retry, Row, judged
from samebits.core.end_kinds import EndKind
from samebits.core.hangs import ProcessState
from samebits.core.job_end import Ending, JointStop
from samebits.core.keys.key_store import CALLERS_A_SEAT, FEW_CALLERS, KeyRecord, KeyStore, replay
from samebits.core.ledger import Ledger, Liveness, Policy, ask_to_leave
from samebits.core.membership.admission import Admission
from samebits.core.membership.leases import Leases, Repeats
from samebits.core.membership.rebuild import Rebuild
from samebits.core.membership.world import World
from samebits.core.messages import (
    Activity,
    Credential,
    Finished,
    FromWorker,
    Heartbeat,
    Join,
    KeyCall,
    Leave,
    OperatorDecision,
    Process,
    ProcessEnded,
    ProcessSeen,
    Publish,
    Register,
    ReportEnvelope,
    Restarting,
    StopJob,
)
from samebits.core.point import Point
from samebits.core.ready import Ready, Severity
from samebits.core.records import CauseFound, JobCreated, TermStarted, TrainingFinished
from samebits.core.reports import (
    Anomaly,
    Digests,
    Figures,
    HealthReport,
    LastWords,
    PeerGone,
    Report,
    SavedPoints,
    StallReport,
    StepTiming,
    StopsAfter,
)
from samebits.core.rounds.durable_points import DurablePoints
from samebits.core.rounds.first_losses import observed
from samebits.core.rounds.rendezvous import SHARDED_FIX, Rendezvous, told_more
from samebits.core.state import JobState, Seat
from samebits.core.watch.consistency import ConsistencyJudge
from samebits.core.watch.equality import Equality
from samebits.core.watch.hang_culprits import Standstill
from samebits.core.watch.hang_judge import HangJudge
from samebits.core.watch.health_judge import HostHealth
from samebits.core.watch.stragglers import Stragglers

MAX_FENCED = 1000
STATUS_WAIT_S = 30.0  # how long a script that left may take to exit and its launcher to report the status


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived over this session's connection."""

    session: str
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Closed:
    """Event: the session's connection was closed. ``gone``: its process was seen dead on this host."""

    session: str
    gone: bool


@dataclass(frozen=True, slots=True)
class SchedulerPaused:
    """Event: the scheduler itself was paused for this long."""

    gap_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Event: the state of a silent session's process was observed on its host."""

    session: str
    process_state: ProcessState


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed and the socket is drained, so deadlines can be checked."""


FromAnyProcess = StopJob | OperatorDecision | ProcessEnded | ProcessSeen | Restarting
"""Messages from operators and launchers. Any process that can connect may send them."""
SchedulerEvent = Received | Closed | SchedulerPaused | Seen | FromAnyProcess | Tick


class SchedulerCore:
    """The scheduler of one job, without I/O, clock or random numbers.

    Args:
        policy: the job's settings.
        state: the journal's content (``JobState.replay``); an empty state begins a new job.
        now: seconds of the boot clock.
        boot_id: the boot that this clock belongs to.
        new_job_id: the job's id if ``state`` is empty.
        claimed_term: lower limit for this start's term.
    """

    def __init__(
        self, policy: Policy, state: JobState, *, now: float, boot_id: str, new_job_id: str, claimed_term: int = 0
    ) -> None:
        self._ledger = ledger = Ledger(policy, state, boot_id, loaded_at=now, now=now)
        self._leases = Leases(ledger)
        self._watch = HangJudge(ledger)
        self._repeats = Repeats(ledger)
        self._host_health = HostHealth(ledger)
        self._world = World(ledger, self._host_health.is_to_leave)
        self._admission = Admission(ledger, self._leases, self._world, self._give_slots)
        self._rendezvous = Rendezvous(ledger, self._world)
        self._equality = Equality(ledger)
        self._consistency = ConsistencyJudge(ledger)
        self._durable_points = DurablePoints(ledger, self._equality)
        self._rebuild = Rebuild(ledger)
        self._new_job_id = new_job_id
        self._claimed_term = claimed_term
        self._broken: list[str] = []  # why the last generation cannot continue
        self._failed_collective = ""  # why it cannot continue, while no member is known to be lost
        self._newcomers: list[str] = []  # nodes that are ready to join a generation that can continue
        self._accepted: Seat | None = None  # the sender of this step's heartbeat
        self._fenced: set[str] = set()  # sessions that were already logged as fenced
        self._is_journal_doubted = False
        self._done: dict[str, int] = {}  # node → its final step, in the last generation
        self._keys = KeyStore(term=0)
        self._stragglers = Stragglers(ledger)
        self._ending = Ending(ledger, self._world, self._admission, self._rendezvous)
        self._joint_stop = JointStop(ledger)
        self._handlers: dict[type[FromWorker], Callable[[Seat, Any], None]] = {}
        self._judges: dict[type[Report], Callable[[Seat, Any, ReportEnvelope], None]] = {}

    # ---- the contract

    def start(self) -> Ready:
        """Begin this start's term, which is written to the journal, and all leases."""
        ledger, state = self._ledger, self._ledger.state
        if not state.job:
            ledger.write(JobCreated(self._new_job_id, ledger.policy.job_name, ledger.policy.settings))
        ledger.write(TermStarted(max(state.term + 1, self._claimed_term), ledger.boot_id, ledger.now))
        self._keys = KeyStore(state.term)
        self._register_judges()
        self._world.load()
        for seat in state.seats.values():
            ledger.sessions[seat.session] = seat.node
            if not seat.is_held or seat.is_retired:
                ledger.presences[seat.node] = Liveness(ledger.now)
            else:
                self._leases.begin(seat, heard=False)
        self._compare_with_generation()
        if state.final is not None:  # the last worker may have left just before the scheduler died
            self._ending.finish_if_all_left()
            if self._ending.ended is None:
                self._ending.judge_emptiness()
        return self._finish_step()

    def step(self, event: SchedulerEvent, now: float) -> Ready:
        """Process one event. After all pending events, send a Tick, at the latest at ``wake_at``."""
        self._ledger.now = now
        match event:
            case Received():
                if self._repeats.take(event.session, event.message):
                    return Ready()
                self._receive(event.session, event.message)
            case Tick():
                self._tick()
            case Closed(session, gone):
                self._closed(session, gone)
            case SchedulerPaused(gap_s):
                self._stalled(gap_s)
            case Seen(session, process_state):
                self._seen(session, process_state)
            case StopJob():
                self._stop(event)
            case OperatorDecision(text, drain):
                ask_to_leave(self._ledger, drain, text)
            case ProcessEnded():
                self._hear_of_end(event)
            case ProcessSeen():
                self._hear_of_process_state(event)
            case Restarting():
                self._ending.await_replacements()
        ready = self._finish_step()
        self._remember(event, ready)
        return ready

    def repeats(self, session: str, message: object, now: float) -> bool:
        """Process a message if it repeats one that had no effect, and return whether it does.

        ``step`` would do the same and return an empty ``Ready``. This is faster for ten thousand heartbeats.
        """
        self._ledger.now = now
        return self._repeats.take(session, message)

    def load_keys(self, records: Iterable[KeyRecord]) -> None:
        """Load the keys' own journal. Call this before any session gets its seat."""
        self._keys = replay(records, self._ledger.state.term)

    @property
    def ailments(self) -> list[str]:
        """Return the problems of the workers' hosts, one sentence each."""
        return self._host_health.lines()

    @property
    def stragglers(self) -> list[str]:
        """Return the slow workers, one sentence each."""
        return self._stragglers.lines()

    @property
    def ready(self) -> int | None:
        """Return how many members have joined the open round, or None if no urgent round is open."""
        return self._rendezvous.joined if self._rendezvous.is_urgent() else None

    @property
    def notices(self) -> list[tuple[int, str]]:
        """Return the latest warnings for followers, each with its number in this term."""
        return list(self._ledger.notices)

    def show(self, text: str) -> None:
        """Show a warning once to each follower. The caller has already logged it."""
        self._ledger.show(text)

    @property
    def keys(self) -> KeyStore:
        """Return the keys stored for the workers."""
        return self._keys

    def wake_at(self) -> float | None:
        """Return when the next Tick is due even if no event arrives, or None."""
        ending, rendezvous = self._ending, self._rendezvous
        earliest = self._leases.next_deadline()
        others = [self._admission.check_at, self._rebuild.deadline, ending.deadline()]
        if self._is_round_due():
            others.append(self._ledger.now)
        if ending.ended is None:
            others += (self._equality.deadline, self._watch.deadline(), self._stragglers.deadline())
            if rendezvous.round is not None:
                others += (rendezvous.deadline(), rendezvous.refresh_at(), rendezvous.explains_at())
            if self._ledger.absent:
                others.append(self._world.shrink_deadline())
            if not self._world.has_begun:
                others.append(self._start_deadline())
        for deadline in others:
            if deadline is not None and (earliest is None or deadline < earliest):
                earliest = deadline
        return earliest

    @property
    def state(self) -> JobState:
        """Return the durable state; read-only."""
        return self._ledger.state

    @property
    def first_cause(self) -> str:
        """Return the first loss since the job last trained, or "" while it trains."""
        return self._ending.first_cause

    @property
    def standstill(self) -> str:
        """Return which workers block the others, or "" while the job makes progress."""
        return self._watch.said

    @property
    def found(self) -> Standstill | None:
        """Return the facts on which ``standstill`` is based, or None while the job makes progress."""
        return self._watch.found

    def silent(self, now: float) -> list[Seat]:
        """Return the seats that the next Tick will report as silent, so that the caller can inspect their processes."""
        self._ledger.now = now
        seats = {seat.node: seat for seat in (*self._leases.silent(), *self._watch.silent())}
        return list(seats.values())

    @property
    def policy(self) -> Policy:
        """Return the job's settings."""
        return self._ledger.policy

    def presence(self, node: str) -> Liveness | None:
        """Return what is known, but not durable, about a node's current session. Read-only."""
        return self._ledger.presences.get(node)

    def waiting_sessions(self) -> list[str]:
        """Return the connected sessions without a seat."""
        return self._admission.sessions()

    def seat_free_in_s(self) -> float | None:
        """Return the longest time in seconds that a refused process must still wait, or None."""
        return self._admission.longest_wait_s()

    def process_of_session(self, session: str) -> Process | None:
        """Return the process of a session that holds a seat, or None."""
        node = self._ledger.sessions.get(session)
        return self._ledger.process_of(node) if node is not None else None

    def phase(self) -> str:
        """Return the job's phase and the nodes that it waits for."""
        state = self._ledger.state
        if self._ending.ended:
            return "ending"
        if state.final:
            left = self._ending.unfinished_slots()
            is_partly_done = 0 < len(left) < len(state.by_slot)
            return f"finished; the script still runs on {self._ledger.names_of(left)}" if is_partly_done else "finished"
        if self._rendezvous.is_urgent():
            missing = self._ledger.names_of(self._ledger.absent)
            return _phase("forming", missing or self._rendezvous.waits_for())
        if state.generation is None:
            return _phase("filling", self._ledger.names_of(self._ledger.absent))
        return "training"

    def _finish_step(self) -> Ready:
        if self._ledger.absent:
            self._give_slots()
        ready, self._ledger.ready = self._ledger.ready, Ready()
        return ready

    def _remember(self, event: SchedulerEvent, ready: Ready) -> None:
        """Remember a heartbeat that had no effect, so that ``repeats`` recognizes its repetitions."""
        accepted, self._accepted = self._accepted, None
        if isinstance(event, Received) and isinstance(event.message, KeyCall) and ready.is_about_keys:
            return
        if isinstance(event, SchedulerPaused):  # only extends waits; a scheduler that is late has no time to start anew
            return
        if not ready.is_empty:
            self._repeats.forget()
        elif isinstance(event, Received) and isinstance(event.message, Heartbeat):
            if accepted is not None:
                self._repeats.remember(event.session, event.message, self._ledger.presences[accepted.node])
        elif not (
            isinstance(event, Tick | Seen | ProcessSeen | Restarting)
            or (
                isinstance(event, Received)
                and isinstance(event.message, ReportEnvelope)
                and event.message.body.is_aside
            )
        ):
            self._repeats.forget()

    # ---- events

    def _receive(self, session: str, message: FromWorker) -> None:
        if isinstance(message, Register):
            self._register(message)
            return
        seat = self._holder(session, message.sender)
        if seat is None or self._ledger.presences[seat.node].is_gone:
            return
        self._ending.note_contact()
        was_lost = seat.is_lost
        if self._leases.renew(seat) and was_lost:
            self._ledger.ready.say(f"{seat.title} is back ({seat.process}), same incarnation {seat.incarnation}")
        self._handlers[type(message)](seat, message)

    def _register_judges(self) -> None:
        """Register a handler for each message type and each report type."""
        self._handlers = {
            Heartbeat: self._heartbeat,
            Join: self._join,
            Publish: self._rendezvous.publish,
            Leave: self._leave,
            KeyCall: self._call_keys,
            ReportEnvelope: self._hear,
        }
        self._judges = {
            StallReport: self._watch.take,
            HealthReport: self._host_health.take,
            Anomaly: self._note_anomaly,
            StepTiming: self._take_timing,
            Figures: self._take_figures,
            SavedPoints: self._durable_points.take,
            Digests: self._take_digests,
            LastWords: self._hear_last_words,
            PeerGone: self._peer_gone,
            StopsAfter: self._take_stop,
        }

    def _hear(self, seat: Seat, said: ReportEnvelope) -> None:
        """Pass a worker's report to the handler of its type."""
        self._judges[type(said.body)](seat, said.body, said)

    def _take_digests(self, seat: Seat, body: Digests, said: ReportEnvelope) -> None:
        self._equality.take(seat, body, said)
        self._durable_points.commit_newest({digest.point for digest in body.digests})
        self._judge_equality()

    def _take_timing(self, seat: Seat, body: StepTiming, said: ReportEnvelope) -> None:
        self._stragglers.take(seat, body, said)
        self._host_health.remind(seat)

    def _take_figures(self, seat: Seat, body: Figures, _said: ReportEnvelope) -> None:
        self._ledger.presences[seat.node].figures = body.figures

    def _note_anomaly(self, seat: Seat, body: Anomaly, _said: ReportEnvelope) -> None:
        self._host_health.note(seat, body, self._rendezvous.rank_of(seat))

    def _stop(self, asked: StopJob) -> None:
        """End the job. If requested, and if members train, first stop all of them after the same commit."""
        state = self._ledger.state
        if asked.at_commit and self._ending.ended is None and state.generation is not None and state.final is None:
            self._joint_stop.ask(asked.by)
        else:
            self._ending.stop(asked.by, asked.status)

    def _take_stop(self, seat: Seat, body: StopsAfter, said: ReportEnvelope) -> None:
        if self._ending.ended is not None:
            return
        self._joint_stop.take(seat, body, said)
        if (by := self._joint_stop.stopped_by) and self._rendezvous.round is None:
            self._ending.stop(by)

    def _call_keys(self, _seat: Seat, call: KeyCall) -> None:
        seats = self._ledger.state.seats
        if self._keys.callers >= CALLERS_A_SEAT * len(seats) + FEW_CALLERS:
            self._keys.forget_callers_but({seat.session for seat in seats.values()})
        done = self._keys.take(call)
        self._ledger.ready.key_records += done.records
        for answer in done.answers:
            self._ledger.ready.send(answer.session, answer)

    def _register(self, message: Register) -> None:
        if self._ending.answer(message.session):
            return
        if self._admission.difference(message) is None and self._rebuild.takes(message):
            return
        self._doubt_journal(message)
        before = self._ledger.state.seats.get(message.node)
        old_incarnation = before.incarnation if before else 0
        seat = self._admission.register(message)
        if seat is not None or message.session in self._admission.pending or message.session in self._admission.refused:
            self._ending.note_contact()
        if seat is None:
            return
        if seat.slot is not None and seat.incarnation != old_incarnation:
            self._rendezvous.forget(seat.node)
            self._done.pop(seat.node, None)
            if self._world.is_new(seat.slot):
                self._world.expect_later(seat.slot)
            elif self._ledger.state.generation is not None:
                what = "was started again" if old_incarnation else "takes the place of a lost one"
                self._break(f"worker {seat.node} {what} ({seat.process})")
        self._rendezvous.invite(seat)

    def _doubt_journal(self, message: Register) -> None:
        """Announce, once, that a worker knows of more than the journal contains."""
        lost = "" if self._is_journal_doubted else told_more(message, self._ledger.state)
        if lost:
            self._is_journal_doubted = True
            self._ledger.announce(lost)

    def _judge_reports(self) -> None:
        """Begin a rebuilt job as if it had been loaded. Workers that reported count as alive."""
        reporters = self._rebuild.judge()
        if reporters is None:
            return
        ledger, state = self._ledger, self._ledger.state
        self._ending.note_contact()
        self._admission.forget_pending()
        self._world.load()
        heard = {message.session for message in reporters}
        for seat in state.seats.values():
            self._leases.begin(seat, heard=seat.session in heard)
            if seat.session in heard:
                ledger.sessions[seat.session] = seat.node
                self._admission.welcome(seat)
        self._compare_with_generation()

    def _holder(self, session: str, sender: Credential) -> Seat | None:
        """Return the sender's seat. A sender without a seat is fenced and changes nothing (S6)."""
        state = self._ledger.state
        seat = state.seats.get(sender.node)
        if (
            seat is not None
            and sender.job == state.job
            and sender.session == seat.session
            and sender.incarnation == seat.incarnation
            and not seat.is_retired
        ):
            return None if seat.has_left else seat
        if sender.job == state.job:
            fenced = self._admission.fenced(sender, seat)
            self._ledger.ready.send(session, fenced)
            if session not in self._fenced and len(self._fenced) < MAX_FENCED:
                self._fenced.add(session)
                self._ledger.ready.say(f"fenced: {fenced.text}", Severity.WARNING)
        return None

    def _join(self, seat: Seat, message: Join) -> None:
        presence = self._ledger.presences[seat.node]
        presence.activity, presence.round = Activity.WAITING, message.round
        was_in_it = presence.generation == self._ledger.state.generation_number
        if self._rendezvous.is_urgent() and was_in_it and self._rendezvous.rank_of(seat) is not None:
            self._corroborate()
        self._rendezvous.join(seat, message)
        self._judge_way_back()

    def _judge_way_back(self) -> None:
        """End the job if all steps would be lost, if no point is left, or if retries cannot help."""
        if (lost := self._rendezvous.points_lost) and self._ending.ended is None:
            self._ending.blame(lost)
            self._ending.end_job(EndKind.POINTS_LOST, lost)
        back = self._ledger.state.rolled_back
        if self._rendezvous.has_no_way_back and back is not None and self._ending.ended is None:
            self._end_unequal(f"{back.text}: no rank's memory or disk holds a point from that step or an earlier one")
        if self._rendezvous.in_vain and self._ending.ended is None:
            self._ending.end_job(EndKind.INTERRUPTED, self._rendezvous.in_vain)

    def _heartbeat(self, seat: Seat, message: Heartbeat) -> None:
        self._accepted, ledger = seat, self._ledger
        presence = ledger.presences[seat.node]
        presence.activity, presence.generation = message.activity, message.generation
        presence.round, presence.step = message.round, message.step
        was_in_it = message.generation == ledger.state.generation_number and self._rendezvous.rank_of(seat) is not None
        if seat.slot is not None and message.activity is not Activity.SEATED:
            self._world.expect_now(seat.slot)
        if message.activity is Activity.TRAINING and was_in_it:
            self._ending.trains(message.generation)
        elif message.activity is Activity.WAITING and was_in_it:  # no collective of a newcomer can have failed
            self._member_waits(seat)
        if self._ending.answer(seat.session):
            return
        if message.term < ledger.state.term:  # it mistook a late message of an earlier scheduler for one of this term
            self._admission.welcome(seat)
        if ledger.state.final is not None:
            if message.activity is not Activity.FINISHED:
                ledger.tell(seat.node, self._finished(ledger.state.final))
        elif self._rendezvous.round is not None:
            has_missed_it = seat.node not in self._rendezvous.round.joined and message.activity is not Activity.SEATED
            if has_missed_it and not self._rendezvous.remind(seat):
                self._accepted = None  # judge its repetition again: by then a reminder may be due
        elif self._rendezvous.rank_of(seat) is not None:
            self._compare_member(seat, message)
        elif self._is_ready_to_join(seat) and message.activity is Activity.WAITING:
            self._newcomers.append(seat.node)

    def _is_ready_to_join(self, seat: Seat) -> bool:
        """Return whether the seat adds a slot to a job that is not about to stop."""
        return seat.slot is not None and self._world.may_join(seat.slot) and not self._joint_stop.is_planned

    def _member_waits(self, seat: Seat) -> None:
        """Handle a member that has left its generation, because a collective failed or the members change."""
        round_ = self._rendezvous.round
        if round_ is None or not round_.gently:
            self._corroborate()
        elif seat.node not in round_.came:
            number = self._ledger.state.generation_number
            self._rendezvous.harden(self._why_left(seat, number))
            self._corroborate()

    def _why_left(self, seat: Seat, generation: int) -> str:
        failed = f"a collective of generation {generation} failed at worker {seat.node}"
        return self._host_health.computed_again() or failed

    def _compare_member(self, seat: Seat, message: Heartbeat) -> None:
        """Compare a member's heartbeat with the last generation, and resend what the member has missed."""
        committed = self._ledger.state.generation_number
        if message.generation < committed:
            if self._rendezvous.can_tell():
                self._rendezvous.start(seat)
            elif message.term == self._ledger.state.term:  # otherwise it is a late message to an earlier scheduler
                self._break(f"worker {seat.node} did not receive generation {committed} before the scheduler died")
        elif message.generation == committed and message.activity is Activity.WAITING:
            self._failed_collective = self._why_left(seat, committed)
        elif message.generation == committed:
            if message.activity is Activity.DONE:
                self._member_done(seat, message.step)
            self._joint_stop.remind(seat)

    def _member_done(self, seat: Seat, step: int) -> None:
        self._done[seat.node] = step
        self._finish_if_equal()

    def _judge_equality(self) -> None:
        """If ranks differ, roll back or end the job.

        If they do not, finish training if all final states are equal.
        """
        is_open = self._ending.ended is None and self._ledger.state.final is None
        found = self._equality.difference() if is_open else None
        if found is None:
            self._rendezvous.is_held = self._equality.is_in_question
            self._finish_if_equal()
        else:
            self._roll_back_or_end(self._consistency.judge(found, self._host_health.hidden_state))

    def _roll_back_or_end(self, text: str) -> None:
        """Open a round from the point of the rollback in the journal, or end the job if the text says why."""
        back = self._ledger.state.rolled_back
        if text or back is None:
            self._end_unequal(text)
            return
        self._equality.settle()
        self._done.clear()
        self._rendezvous.is_held = False
        self._rendezvous.begin_again(back.reason)
        self._break(back.reason)

    def _end_unequal(self, text: str) -> None:
        if odd := self._equality.odd_values:
            what, mark, fix = text.rpartition(" Fix: ")
            text = (
                f"{(what or fix).rstrip('.')}. Before that, {odd}, which may be the cause.{mark}{fix if what else ''}"
            )
        self._ending.blame(text)
        self._ending.end_job(EndKind.UNEQUAL, text)

    def _judge_progress(self) -> None:
        """End members that block the others. If none can be named, form the group again."""
        round_ = self._rendezvous.round
        if self._ending.ended is not None or self._ledger.state.final is not None:
            self._watch.end()
        elif self._broken or self._rendezvous.is_urgent():
            self._watch.tick_in_round(round_.came if round_ is not None else ())
        elif why := self._watch.tick():
            if self._watch.in_vain:
                self._ending.end_job(EndKind.SCRIPT_FAILED, self._watch.in_vain)
            elif self._watch.mismatch and (equal := self._equality.last_equal()) is not None:
                self._roll_back_or_end(self._consistency.distrust(why, equal))
            elif round_ is None:
                self._failed_collective = why
            else:
                self._rendezvous.harden(why)

    def _finish_if_equal(self) -> None:
        """Finish training if every member is done, all with the same state."""
        ledger, committed = self._ledger, self._ledger.state.generation
        if committed is None or ledger.state.final is not None or self._ending.ended is not None:
            return
        if len(self._done) < len(committed.members) or ledger.absent or not self._equality.is_final_equal:
            return
        point = Point(max(self._done.values()), committed.generation)
        ledger.write(TrainingFinished(point))
        ledger.ready.say(
            f"training is finished at step {point.step}: every worker's last commit is durable, and all are equal"
        )
        for member in ledger.live_seats_and_spares():
            ledger.tell(member.node, self._finished(point))

    def _finished(self, point: Point) -> Finished:
        return Finished(self._ledger.state.job, self._ledger.state.term, point)

    def _leave(self, seat: Seat, message: Leave) -> None:
        presence = self._ledger.presences[seat.node]
        presence.step = max(presence.step, message.step)
        is_trained = self._ledger.state.final is not None
        if message.on_purpose and not (is_trained and message.status):
            if is_trained and message.status is None and self._ledger.policy.token:
                presence.status_by = self._ledger.now + STATUS_WAIT_S
            self._leases.leave(seat)
            self._forget_condition(seat.node)
            self._ledger.ready.say(f"{seat.title} left: {message.text}")
            self._ending.left(message.text)
            self._gone(seat, f"worker {seat.node} left before training was finished: {message.text}")
        else:  # also for a worker that was asked to leave, or stopped, before the end of its script
            presence.is_gone = True
            is_own = is_trained and not message.on_purpose
            self._lose(seat, message.text, spoke=True, status=message.status or 0 if is_own else 0)
        self._ending.finish_if_all_left()

    def _hear_last_words(self, seat: Seat, body: LastWords, said: ReportEnvelope) -> None:
        """Record a worker's fatal error; its seat is lost when it leaves."""
        presence = self._ledger.presences[seat.node]
        presence.last_words, presence.step = body.text, said.step
        if self._ends_job(seat, body.text, body.status):
            return
        if seat.is_held and self._blame_member(seat, body.text, spoke=True):
            self._ledger.ready.say(f"{seat.title} ({seat.process}) ends: {body.text}", Severity.WARNING)

    def _ends_job(self, seat: Seat, text: str, status: int) -> bool:
        """End the job if a retry would run into the same error, and return whether the job has ended."""
        if self._ending.ended is not None:
            return True
        policy = self._ledger.policy
        is_member = seat.is_held and self._rendezvous.rank_of(seat) is not None
        if not (status and is_member and policy.recovery) or self._ledger.state.final is not None:
            return False
        if status == EndKind.UNEQUAL.exit_code:
            self._ending.end_job(EndKind.UNEQUAL, f"worker {seat.node}: {text}")
        elif policy.causes.of(Observation(status, error=text)).retry is Retry.NO:
            self._ending.end_job(EndKind.SCRIPT_FAILED, f"worker {seat.node}: {text}", status)
        return self._ending.ended is not None

    def _hear_of_end(self, end: ProcessEnded) -> None:
        """Process a launcher's report of an ended process.

        Any process that can connect may send this report. It therefore only changes messages, and only if the process
        itself sent no error. The exception is a process that, after training, can no longer report its own exit status.
        """
        seat, presence = self._ledger.state.seats.get(end.node), self._ledger.presences.get(end.node)
        if seat is None or presence is None or seat.process[:3] != (end.host, end.pid, end.started_at):
            return
        if self._ledger.state.final is not None and end.status is not None and self._is_status_wanted(seat):
            self._learn_status(seat, end.status)
            return
        if presence.last_words:
            return
        if seat.is_held:
            presence.ended = end
        elif presence.noticed_by in (LossDetection.GONE, LossDetection.CLOSED):
            presence.ended = end
            text = f"{end.text} ({self._judged(seat, '')[1]})"
            if self._ending.explain(seat, text):
                self._ledger.ready.say(f"{seat.title} ({seat.process}) {text}", Severity.WARNING)

    def _is_status_wanted(self, seat: Seat) -> bool:
        """Return whether a finished script's exit status is unknown and its process cannot report it."""
        presence = self._ledger.presences[seat.node]
        if seat.slot is None or self._ending.ended is not None:
            return False
        if seat.has_left:
            return presence.status_by is not None
        return (seat.is_lost and not seat.status) or presence.heard_at is None

    def _learn_status(self, seat: Seat, status: int) -> None:
        self._ledger.presences[seat.node].status_by = None
        text = f"its program ended with status {status}"
        if status:
            self._lose(seat, text, spoke=True, status=status)
        elif not seat.has_left:
            self._leases.leave(seat)
            self._ledger.ready.say(f"{seat.title} left: {text}, according to its launcher")
        self._ending.finish_if_all_left()

    def _hear_of_process_state(self, told: ProcessSeen) -> None:
        """Record the state of a process on another host. The process's own messages take precedence."""
        seat, presence = self._ledger.state.seats.get(told.node), self._ledger.presences.get(told.node)
        if seat is not None and presence is not None and seat.process[:3] == (told.host, told.pid, told.started_at):
            presence.process_state, presence.seen_at = ProcessState(told.doing, told.quiet_s), self._ledger.now

    def _peer_gone(self, witness: Seat, body: PeerGone, _said: ReportEnvelope) -> None:
        """Process a worker's report that a process on its host has died, often before its connection closes."""
        session = body.session
        process = self.process_of_session(session)
        if process is not None and process.host == witness.process.host and session != witness.session:
            self._closed(session, gone=True, witness=witness)

    def _closed(self, session: str, gone: bool, witness: Seat | None = None) -> None:
        self._admission.forget(session)
        self._rebuild.forget(session)
        node = self._ledger.sessions.get(session)
        seat = self._ledger.state.seats.get(node) if node is not None else None
        if seat is None or seat.session != session or seat.is_retired:
            return
        reason, round_ = self._leases.close(seat, gone=gone, witness=witness), self._rendezvous.round
        is_close = witness is None  # a reported death may be known already, and implies nothing about others
        if reason is not None:
            self._lose(seat, reason)
        elif is_close:
            if seat.is_held:  # its message may have overtaken the close: an answer shows that it is back
                self._admission.welcome(seat)
            if round_ is not None and round_.joined and self._rendezvous.is_urgent():
                self._corroborate()
        self._ending.finish_if_all_left()

    def _corroborate(self) -> None:
        """Count members with closed connections as lost at once, because a collective has failed."""
        round_ = self._rendezvous.round
        for seat in self._leases.closing():
            if self._rendezvous.rank_of(seat) is not None and (round_ is None or seat.node not in round_.came):
                self._lose(seat, "its connection closed and a collective with it failed")

    def _seen(self, session: str, process_state: ProcessState) -> None:
        """Record the state of a silent process, for messages only."""
        node = self._ledger.sessions.get(session)
        presence = self._ledger.presences.get(node) if node is not None else None
        if presence is not None:
            presence.process_state, presence.seen_at = process_state, self._ledger.now

    def _stalled(self, gap_s: float) -> None:
        self._leases.shift(gap_s)
        self._watch.shift(gap_s)
        self._admission.shift(gap_s)
        self._rebuild.shift(gap_s)
        self._rendezvous.shift(gap_s)
        self._ending.shift(gap_s)
        self._equality.shift(gap_s)
        self._world.shift(gap_s)
        text = f"this scheduler was paused for {gap_s:.1f} s; no lease expires because of it"
        self._ledger.ready.say(text, Severity.WARNING)

    def _tick(self) -> None:
        ledger = self._ledger
        for seat, reason in self._leases.expired():
            self._lose(seat, reason)
        self._admission.forget_silent()
        self._judge_reports()
        self._judge_equality()
        self._judge_progress()
        self._stragglers.tick()
        if self._ending.ended is not None:
            self._ending.finish_if_all_left()
            return
        self._give_slots()
        if (start_at := self._start_deadline()) is not None and start_at <= ledger.now:
            self._admission.seat_pending()
            self._world.begin_without_absent()
        self._open_round_if_due()  # before the world shrinks, which may close a round
        self._world.shrink()
        self._rendezvous.harden_if_stuck()
        self._rendezvous.refresh()
        self._rendezvous.explain()
        self._judge_way_back()
        if self._rendezvous.timed_out():
            waited = f"the round waited {ledger.policy.topo_timeout_s:g} s (TOPO_TIMEOUT)"
            missing = self._rendezvous.waits_for() + self._world.shortage()
            fix = f". {SHARDED_FIX}" if self._rendezvous.is_sharded else ""
            self._ending.end_job(EndKind.FORMATION_TIMEOUT, f"{waited} for worker {missing}{fix}")
        elif (deadline := self._ending.fill_deadline()) is not None and deadline <= ledger.now:
            waited = f"waited {ledger.policy.topo_timeout_s:g} s (TOPO_TIMEOUT)"
            missing = ledger.names_of(ledger.absent) + self._world.shortage()
            self._ending.end_job(EndKind.FORMATION_TIMEOUT, f"{waited} for worker {missing}")
        else:
            self._ending.judge_emptiness()
            if ledger.policy.recovery and ledger.state.final is None and self._rendezvous.round is None:
                self._host_health.judge(self._stragglers.slow() if ledger.policy.swaps_stragglers else {})

    # ---- losses, rounds

    def _forget_condition(self, node: str) -> None:
        """Forget the health and speed of a node whose process is gone."""
        self._host_health.forget(node)
        self._stragglers.forget(node)

    def _give_slots(self, admitted: Seat | None = None) -> None:
        """Give lost slots to spares and invite them, except ``admitted``, which is invited later."""
        given = self._world.give_slots() + self._world.complete_groups() if self._ending.ended is None else []
        for seat in given:
            # With an incomplete shard group, this step may close the round; otherwise ``refresh`` invites the seat.
            has_place = seat.slot is not None and self._world.place_of(seat.slot) is not None
            if seat is not admitted and has_place:
                self._rendezvous.invite(seat)

    def _start_deadline(self) -> float | None:
        if self._rebuild.deadline is not None:
            return None  # until then it is unknown whether this is a new job
        return self._world.start_deadline(self._ending.filling_since(), len(self._admission.pending))

    def _lose(self, seat: Seat, reason: str, *, spoke: bool = False, status: int = 0) -> None:
        self._leases.end(seat, reason, status)
        self._forget_condition(seat.node)
        if seat.slot is None:
            return  # a spare: the job is not affected
        if self._rendezvous.rank_of(seat) is None:
            self._ending.blame(f"worker {seat.node} ({seat.process}): {seat.reason}")
        else:
            self._blame_member(seat, seat.reason, spoke=spoke or bool(self._ledger.presences[seat.node].last_words))
        self._gone(seat, f"worker {seat.node} ({seat.process}) is lost: {seat.reason}")

    def _blame_member(self, seat: Seat, reason: str, *, spoke: bool) -> bool:
        """Record a member's loss or fatal error; return whether it is a new cause."""
        committed, rank = self._ledger.state.generation, self._rendezvous.rank_of(seat)
        if committed is None or rank is None:
            return False
        presence = self._ledger.presences[seat.node]
        row, judgement = self._judged(seat, reason if spoke else "")
        number, now = committed.generation, self._ledger.now
        cause = CauseFound(number, rank, seat.node, seat.process, presence.step, now, f"{reason} ({judgement})")
        return self._ending.lost(cause, spoke=spoke, is_echo=spoke and row.cause is CauseClass.NETWORK)

    def _judged(self, seat: Seat, words: str) -> tuple[Row, str]:
        """Return the row of the cause table for a member's loss, and its class and remedy as text.

        ``words`` is the member's own error message, or "".
        """
        ledger, policy = self._ledger, self._ledger.policy
        presence = ledger.presences[seat.node]
        seen = observed(presence, words, policy.node_timeout_s)
        presence.noticed_by, row = seen.notice, policy.causes.of(seen)
        presence.avoids_host |= row.avoids_host
        left = self._world.present(without=seat.slot)
        means = Means(
            goes_on=policy.recovery,
            spare=self._world.spare_said(seat),
            has_launcher=bool(policy.token) and policy.restarts,
            shrinks_after_s=policy.shrink_grace_s if left >= policy.min_world_size else None,
        )
        return row, judged(row, means)

    def _gone(self, seat: Seat, why: str) -> None:
        """Handle a seat that has lost its holder, for whatever reason."""
        if seat.slot is None:
            return
        self._world.expect_now(seat.slot)
        self._rendezvous.forget(seat.node)
        self._rendezvous.blame(why, breaks=self._rendezvous.rank_of(seat) is not None)
        if self._ledger.state.final is not None or self._ending.ended is not None:
            return
        self._done.pop(seat.node, None)
        if not self._ledger.policy.recovery and seat.is_lost:
            self._ending.end_job(EndKind.FAILED, f"{why} (ENABLE_RECOVERY=0)")
        elif self._rendezvous.rank_of(seat) is not None:
            self._break(why)

    def _break(self, why: str) -> None:
        """Record why the last generation cannot continue, unless a round is already open."""
        if self._rendezvous.round is None:
            self._broken.append(why)

    def _compare_with_generation(self) -> None:
        """Check after loading whether lost, departed or replaced members end the last generation."""
        committed = self._ledger.state.generation
        if committed is None or self._ledger.state.final is not None:
            return
        if (back := self._ledger.state.rolled_back) is not None:
            self._break(back.reason)
        if not committed.members:  # the job was rebuilt by members of an earlier generation
            self._break(f"generation {committed.generation} was lost with the journal")
        for node, incarnation in committed.members:
            seat = self._ledger.state.seats[node]
            if not seat.is_held or seat.slot is None or seat.incarnation != incarnation:
                why = f"is lost: {seat.reason}" if seat.is_lost else "left" if seat.has_left else "was replaced"
                self._break(f"worker {node} of generation {committed.generation} {why}")

    def _is_round_due(self) -> bool:
        """Return whether a round may have to open.

        This is checked at a Tick, so that simultaneous events lead to one round with one reason.
        """
        if self._ending.ended is not None:
            return False
        if self._ledger.state.generation is None:
            return self._rendezvous.round is None and self._world.may_begin()
        return bool(self._broken or self._failed_collective or self._newcomers)

    def _open_round_if_due(self) -> None:
        if not self._is_round_due():
            return
        ledger, state = self._ledger, self._ledger.state
        reasons, self._broken = self._broken, []
        failed, self._failed_collective = self._failed_collective, ""
        newcomers, self._newcomers = self._newcomers, []
        if self._rendezvous.round is not None or state.final is not None:
            return
        if state.generation is None:
            self._world.begin_without_absent()
            here, size = ledger.present(), ledger.policy.world_size
            few = f"{here} of {size} workers are registered after {ledger.policy.start_grace_s:g} s (start in GRACE)"
            self._rendezvous.open(
                few if here < size else f"all {here} workers are registered" if here > 1 else "the worker is registered"
            )
        elif (reasons or failed) and ledger.policy.recovery:
            self._done.clear()
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            reason = reasons[0] + more if reasons else failed
            if self._world.has_resets_left():
                self._rendezvous.open(reason, blames_nobody=not reasons)
            else:
                limit = f"training restarted {ledger.policy.reset_limit} times (RESET_LIMIT)"
                self._ending.end_job(EndKind.INTERRUPTED, f"{limit}; now {reason}")
        elif (node := next(filter(ledger.is_present, newcomers), None)) and self._world.has_resets_left():
            self._done.clear()
            self._rendezvous.open(f"worker {node} ({ledger.process_of(node)}) joins", gently=True)


def _phase(word: str, names: str) -> str:
    return f"{word}; waiting for {names}" if names else f"{word}; all are here"
