"""The ways in which a job ends (finished, stopped, given up), their stages and time limits.

The scheduler calls this module to end the job for every process, or to give the job up after a delay if too few workers
arrive or none is left. The end is written to the journal first, then sent to all processes. The scheduler exits once
they have left or a grace period is over.

Training is finished when every rank's last commit is durable. The job is finished only once every rank has also reached
the end of its script, because code after ``train(state)`` may save, evaluate or upload for hours.
"""

from __future__ import annotations

from samebits.core.causes.restarts import NO_WORKER_LEFT
from samebits.core.causes.table import WRONG_GRADIENT, Observation, Retry, Row
from samebits.core.end_kinds import EndKind
from samebits.core.ledger import NAMED, Ledger
from samebits.core.membership.admission import Admission
from samebits.core.membership.world import World
from samebits.core.messages import EndJob, ReportEnvelope, StopAt
from samebits.core.ready import JobEnded, Severity
from samebits.core.records import CauseFound, GenerationCommitted, JobFinished, JobInterrupted, StopPlanned
from samebits.core.reports import StopsAfter
from samebits.core.rounds.first_losses import Causes
from samebits.core.rounds.rendezvous import Rendezvous
from samebits.core.state import Seat

END_GRACE_S = 10.0  # how long the scheduler waits for workers to leave when the job ends


class Ending:
    """Decides when the job ends, and carries it out.

    Attributes:
        ended: how the job ended; None until that is decided.
    """

    def __init__(self, ledger: Ledger, world: World, admission: Admission, rendezvous: Rendezvous) -> None:
        self._ledger = ledger
        self._world = world
        self._admission = admission
        self._rendezvous = rendezvous
        self._first_heard_at: float | None = None
        self._filling_since = ledger.now
        self._empty_since: float | None = None
        self._deserted_at = 0.0  # when the last worker left; announcing replacements does not change it
        self._leave_by: float | None = None  # deadline for processes told to leave, and for a finished job's spares
        self.ended: JobEnded | None = None
        self._left_with = ""
        self._causes = Causes(ledger.state.causes)

    def note_contact(self) -> None:
        """Record that a process of this job has sent a message in this term."""
        if self._first_heard_at is None:
            self._first_heard_at = self._filling_since = self._ledger.now

    @property
    def first_cause(self) -> str:
        """Return the first loss since the job last trained, or "" while it trains."""
        return self._causes.first

    def blame(self, cause: str) -> None:
        """Record a cause other than a member's loss that stops the job from continuing."""
        self._causes.blame(self._ledger.state.generation_number, cause)

    def lost(self, cause: CauseFound, *, spoke: bool, is_echo: bool) -> bool:
        """Record a member's loss or announced death, and return whether it is a new cause.

        The arguments are those of ``Causes.take``.
        """
        is_cause = self._causes.take(cause, spoke=spoke, is_echo=is_echo)
        if is_cause:
            self._ledger.write(cause)
        return is_cause

    def explain(self, seat: Seat, text: str) -> bool:
        """Add details about how a lost member ended, and return whether they changed a cause."""
        cause = self._causes.explain(seat.node, seat.process, text)
        if cause is not None:
            self._ledger.write(cause)
        return cause is not None

    def left(self, text: str) -> None:
        """Record why a worker left the job on purpose. The first reason is kept."""
        self._left_with = self._left_with or text

    def trains(self, generation: int) -> None:
        """Record that a member trains in this generation, so that earlier causes are resolved."""
        self._causes.made_good(generation)

    def answer(self, session: str) -> bool:
        """Tell this session how the job ended, if it has, and return whether it has."""
        if self.ended is None:
            return False
        self._ledger.ready.send(session, self._last_word(self.ended))
        return True

    def _last_word(self, ended: JobEnded) -> EndJob:
        state = self._ledger.state
        return EndJob(state.job, state.term, ended.kind, ended.text)

    def shift(self, gap_s: float) -> None:
        """Extend all deadlines by the length of a pause of the scheduler."""
        now = self._ledger.now
        if self._empty_since is not None:
            self._empty_since = min(self._empty_since + gap_s, now)
        if self._leave_by is not None:
            self._leave_by = min(self._leave_by + gap_s, now + END_GRACE_S)
        self._filling_since = min(self._filling_since + gap_s, now)

    def filling_since(self) -> float | None:
        """Return when the first process of the job sent a message, or None."""
        return None if self._first_heard_at is None else self._filling_since

    def deadline(self) -> float | None:
        """Return the time of the next decision that depends on time, or None."""
        if self.ended is not None:
            return self._leave_by
        is_trained = self._ledger.state.final is not None
        if self._empty_since is None and self._ledger.state.generation is not None and not is_trained:
            return self._leave_by
        empty = None if self._empty_since is None else self._empty_since + self._emptiness_s()
        status_by = self._status_by() if is_trained else None
        candidates = (self.fill_deadline(), empty, self._leave_by, status_by)
        return min((at for at in candidates if at is not None), default=None)

    def fill_deadline(self) -> float | None:
        """Return when the wait for the first generation ends, or None if there is no wait."""
        if self._ledger.state.generation is not None or self._rendezvous.round is not None or self.ended is not None:
            return None
        return self._filling_since + self._ledger.policy.topo_timeout_s

    def judge_emptiness(self) -> None:
        """Give the job up if it has had no worker and no request for a seat for too long."""
        ledger = self._ledger
        is_trained = ledger.state.final is not None
        if not self._is_through():
            self._leave_by = None
        elif self._leave_by is not None and self._leave_by <= ledger.now:
            self._all_are_through()
            return
        elif self._leave_by is None and is_trained:  # the wait for an exit status is over
            self.finish_if_all_left()
            return
        occupied = self._is_occupied() and (is_trained or not self._own_errors())
        awaited = self._first_heard_at is None and not is_trained
        awaited = awaited or (is_trained and self._status_by() is not None)
        if occupied or self._admission.pending or self._admission.refused or awaited:
            self._empty_since = None
            return
        if self._empty_since is None:
            self._empty_since = self._deserted_at = ledger.now
        elif ledger.now - self._empty_since >= self._emptiness_s():
            self._give_up()

    def await_replacements(self) -> None:
        """Restart the wait for workers, because a supervisor is starting replacements.

        Any process that can connect may report this, so the report cannot keep a job alive indefinitely. A round still
        times out (TOPO_TIMEOUT), and after training the wait for unfinished scripts is limited too.
        """
        ledger = self._ledger
        if self._empty_since is None:
            return
        if ledger.state.final is None or ledger.now < self._deserted_at + ledger.policy.topo_timeout_s:
            self._empty_since = ledger.now

    def stop(self, by: str, status: int = 0) -> None:
        """End the job now. If errors in its scripts caused the end, report those instead of the request.

        Args:
                by: the requester, or the error if ``status`` is set.
                status: exit code of a process whose error every retry would repeat; else 0.
        """
        failed = self._failed_scripts() if self._ledger.state.final is not None else self._own_errors()
        if self._ledger.policy.recovery and failed:
            self._give_up()
        elif EndKind.SCRIPT_FAILED.is_permanent(status):
            self.end_job(EndKind.SCRIPT_FAILED, by, status)
        else:
            is_told = not self.first_cause or "first cause: " in by or self._causes.is_named_in(by)
            cause = "" if is_told else f"; first cause: {self._causes.first_at_end}"
            self.end_job(EndKind.STOPPED, f"stopped by {by}{cause}")

    def _give_up(self) -> None:
        ledger = self._ledger
        if ledger.state.final is not None:
            self._all_are_through()
            return
        errors = self._own_errors()
        kind = EndKind.SCRIPT_FAILED if errors else EndKind.INTERRUPTED
        if WRONG_GRADIENT in errors:  # no script needs a correction, and the saved state is in doubt
            kind = EndKind.UNEQUAL
        failed = f"{len(ledger.absent)} of {self._world.size()} workers failed"
        left = failed if self._is_occupied() else NO_WORKER_LEFT
        self.end_job(kind, f"{left}; first cause: {self._causes.first_at_end or 'unknown'}")

    def _is_occupied(self) -> bool:
        """Return whether the job has workers; spares count only before the first generation."""
        ledger = self._ledger
        return ledger.present() > 0 or (ledger.state.generation is None and bool(ledger.state.spares))

    def _own_errors(self) -> list[Row]:
        """Return the errors of missing members, if at least half of the job failed and each has its own error.

        In that case the program is at fault, not a machine. The few ranks that left a collective before they ran into
        the same error would wait in vain. If any error may not recur (device, disk, network), the list is empty.
        """
        ledger = self._ledger
        if 2 * len(ledger.absent) < self._world.size():
            return []
        found = []
        for seat in (ledger.state.seat_of_slot(slot) for slot in ledger.absent):
            words = "" if seat is None else ledger.presences[seat.node].last_words
            row = ledger.policy.causes.of(Observation(error=words, is_failure=True))
            if not words or row.retry is Retry.YES:
                return []
            found.append(row)
        return found

    def _emptiness_s(self) -> float:
        """Return how long the job may be without workers, in seconds.

        The limit is higher in a term without a message from any worker, because workers may be restarting. It is also
        higher once training is finished, because the process that runs the rest of a killed worker's script may have to
        wait for the cool-down first.
        """
        policy = self._ledger.policy
        if self._first_heard_at is None:
            return policy.topo_timeout_s
        cool_down_s = 0.0 if self._ledger.state.final is None else policy.cool_down_s
        return 2 * policy.node_timeout_s + cool_down_s

    def finish_if_all_left(self) -> None:
        """Complete the job's end if all processes have left."""
        ledger, state = self._ledger, self._ledger.state
        if self.ended is not None:
            overdue = self._leave_by is not None and self._leave_by <= ledger.now
            if overdue or not (ledger.present() or state.spares):
                ledger.ready.ended = self.ended
        elif not self._is_through():
            self._leave_by = None
        elif not state.spares:
            self._all_are_through()
        elif self._leave_by is None:
            self._leave_by = ledger.now + END_GRACE_S

    def _all_are_through(self) -> None:
        """End a job whose scripts have all ended. With recovery on, it must also have trained."""
        ledger = self._ledger
        if ledger.policy.recovery and ledger.state.final is None:
            self.end_job(EndKind.UNTRAINED, f"every worker left before training began: {self._left_with}")
        elif self._unfinished_scripts():
            self._end_with_unfinished_scripts()
        else:
            self._job_finished()

    def _is_through(self) -> bool:
        """Return whether every slot's script has ended and no training is left."""
        ledger, state = self._ledger, self._ledger.state
        if ledger.present():
            return False
        if ledger.policy.recovery and state.generation is not None and state.final is None:
            return False  # stopped, not finished: a recovery resumes it
        unfinished = self._unfinished_scripts()
        if (state.final is None or unfinished) and (self._admission.pending or self._admission.refused):
            return False  # a process that asks for a seat may still run the rest of the script
        if len(state.by_slot) < self._world.size():
            return False
        if self._status_by() is not None:
            return False
        return all(state.final is not None and seat.status for seat in unfinished)

    def _status_by(self) -> float | None:
        """Return the deadline for launchers to report exit statuses, or None."""
        ledger = self._ledger
        times = [ledger.presences[node].status_by for node in ledger.state.by_slot.values()]
        return max((at for at in times if at is not None and at > ledger.now), default=None)

    def _unfinished_scripts(self) -> list[Seat]:
        """Return the seats whose script has not reached its end, in slot order."""
        state = self._ledger.state
        seats = (state.seats[node] for _, node in sorted(state.by_slot.items()))
        return [seat for seat in seats if not seat.has_left]

    def unfinished_slots(self) -> list[int]:
        """Return the slots, ascending, whose script has not reached its end."""
        return [seat.slot for seat in self._unfinished_scripts() if seat.slot is not None]

    def _failed_scripts(self) -> list[Seat]:
        """Return the seats whose script failed after training was finished."""
        return [seat for seat in self._unfinished_scripts() if self._ledger.state.final is not None and seat.status]

    def _end_with_unfinished_scripts(self) -> None:
        """End a trained job with unfinished scripts. A failed script's exit code becomes the job's."""
        final, failed = self._ledger.state.final, self._failed_scripts()
        named = failed or self._unfinished_scripts()
        first = named[0]
        told = self._ledger.presences[first.node].ended  # more precise than the closed connection
        reason = first.reason if told is None or first.status else told.text
        others = [seat.node for seat in named[1:]]
        also = f" (nor did worker {', '.join(others[:NAMED])}{' and others' if others[NAMED:] else ''})"
        self.end_job(
            EndKind.SCRIPT_FAILED if failed else EndKind.INTERRUPTED,
            f"training is finished at step {0 if final is None else final.step}, but worker {first.node} "
            f"({first.process}) did not reach the end of its script: {reason}{also if others else ''}",
            first.status,
        )

    def _job_finished(self) -> None:
        self._ledger.write(JobFinished())
        self._ledger.ready.say("job finished")
        self.ended = self._ledger.ready.ended = JobEnded(EndKind.FINISHED, "job finished")
        self._tell_waiting_sessions()

    def end_job(self, kind: EndKind, text: str, status: int = 0) -> None:
        """End an unfinished job: notify every process, and exit when all have left.

        Args:
            kind: how it ends.
            text: the reason, as shown to users.
            status: exit status of a script that failed after training; 0 if none did.
        """
        ledger = self._ledger
        if self.ended is not None:
            return
        saved = [point.step for point in (ledger.state.committed_point, ledger.state.final) if point is not None]
        step = max((0, *saved, *(presence.step for presence in ledger.presences.values())))
        ledger.write(JobInterrupted(kind, step, text, ledger.state.generation_number, status))
        ledger.ready.say(f"the job ends: {text}", Severity.WARNING)
        self.ended, self._leave_by = JobEnded(kind, text), ledger.now + END_GRACE_S
        message = self._last_word(self.ended)
        for seat in ledger.live_seats_and_spares():
            ledger.tell(seat.node, message)
        self._tell_waiting_sessions()
        self.finish_if_all_left()

    def _tell_waiting_sessions(self) -> None:
        """Tell processes that wait for a seat that the job is over."""
        assert self.ended is not None
        message = self._last_word(self.ended)
        for session in self._admission.sessions():
            self._ledger.ready.send(session, message)


class JointStop:
    """Agrees with the last generation's members on the commit after which all of them stop.

    No step is repeated when the job resumes. When asked, each member reports its next commit and does not train past
    it. Every member can still reach the latest of these commits, so that one is written to the journal and sent to all.
    Once every member waits after it, the job ends. ``service.agent`` pauses the main thread.

    Each generation counts its own commits. A loss before the stop therefore only delays it: the members of the next
    generation are asked again.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counted: GenerationCommitted | None = None  # the generation that the values below belong to
        self._incarnations: dict[str, int] = {}  # its members' incarnations, by node
        self._commits: dict[str, int] = {}  # node → the commit after which it stops
        self._there: set[str] = set()  # nodes that wait after the agreed commit

    @property
    def is_planned(self) -> bool:
        """Return whether a stop is planned."""
        return self._ledger.state.stop is not None

    @property
    def stopped_by(self) -> str:
        """Return who requested the stop once every member waits after the agreed commit, or "" before."""
        plan, committed = self._ledger.state.stop, self._ledger.state.generation
        if plan is None or committed is None or committed is not self._counted or not plan.commits:
            return ""
        return plan.by if len(self._there) == len(committed.members) else ""

    def ask(self, by: str) -> None:
        """Ask all members at which commit they can stop. Repeated requests have no effect."""
        ledger = self._ledger
        if self.is_planned:
            return
        ledger.write(StopPlanned(by))
        ledger.ready.say(f"every worker is to stop after the same commit: {by}")
        for seat in ledger.live_seats():
            self.remind(seat)

    def remind(self, seat: Seat) -> None:
        """Send the stop message again to a member of the last generation that has not acted on it."""
        state = self._ledger.state
        plan, committed = state.stop, state.generation
        if plan is None or committed is None or not self._is_member(seat, committed):
            return
        if seat.node not in self._there if plan.commits else seat.node not in self._commits:
            self._ledger.tell(seat.node, StopAt(state.job, state.term, committed.generation, plan.commits))

    def take(self, seat: Seat, body: StopsAfter, said: ReportEnvelope) -> None:
        """Record the commit after which a member stops."""
        ledger, committed = self._ledger, self._ledger.state.generation
        if committed is None or said.generation != committed.generation or not body.commits:
            return
        if not self._is_member(seat, committed) or ledger.state.final is not None:
            return
        if not self.is_planned:  # the plan was lost with the journal, and this member waits for the others
            self.ask("an operator")
        self._commits[seat.node] = body.commits
        if body.is_there:
            self._there.add(seat.node)
        self._agree(committed)

    def _agree(self, committed: GenerationCommitted) -> None:
        ledger, plan = self._ledger, self._ledger.state.stop
        if plan is None or plan.commits or len(self._commits) < len(committed.members):
            return
        ledger.write(StopPlanned(plan.by, max(self._commits.values())))
        for seat in ledger.live_seats():
            self.remind(seat)

    def _is_member(self, seat: Seat, committed: GenerationCommitted) -> bool:
        if committed is not self._counted:
            self._counted, self._incarnations = committed, dict(committed.members)
            self._commits.clear()
            self._there.clear()
        return self._incarnations.get(seat.node) == seat.incarnation
