"""The ways in which a job ends (finished, stopped, given up), and their time limits.

The scheduler decides when to ask; this module says what an end means for every process, and judges the two cases that
need patience: no worker came to fill the job, and no worker is left. An end is journaled first, then sent to all, and
the scheduler leaves when they have left or a grace is over.

Training is finished when every rank's last commit is durable. The job is finished only once every rank has also reached
the end of its script: whatever runs after ``train(state)`` may save, evaluate or upload, and may take hours.
"""

from __future__ import annotations

from samebits.core.causes.restarts import NO_WORKER_LEFT
from samebits.core.causes.table import WRONG_GRADIENT, Observation, Retry, Row
from samebits.core.ends import EndKind
from samebits.core.ledger import NAMED, Ledger
from samebits.core.membership.admission import Admission
from samebits.core.membership.world import World
from samebits.core.messages import EndJob
from samebits.core.ready import Ended, Level
from samebits.core.records import CauseFound, JobFinished, JobInterrupted
from samebits.core.rounds.first_losses import Causes
from samebits.core.rounds.rendezvous import Rendezvous
from samebits.core.state import Seat

END_GRACE_S = 10.0  # how long the job's end waits for its workers to leave


class Ending:
    """Judges and carries out the job's end.

    Attributes:
        ended: how the job ended, as soon as that is decided.
    """

    def __init__(self, ledger: Ledger, world: World, admission: Admission, rendezvous: Rendezvous) -> None:
        self._ledger = ledger
        self._world = world
        self._admission = admission
        self._rendezvous = rendezvous
        self._first_heard_at: float | None = None
        self._filling_since = ledger.now
        self._empty_since: float | None = None
        self._deserted_at = 0.0  # when the last worker was gone, however many are said to start since
        self._leave_by: float | None = None  # who is told of the end, or a spare of a job that is through
        self.ended: Ended | None = None
        self._left_with = ""
        self._causes = Causes(ledger.state.causes)

    def hear_somebody(self) -> None:
        """Somebody of this job, not a stranger who will never be let in, has spoken to this scheduler start."""
        if self._first_heard_at is None:
            self._first_heard_at = self._filling_since = self._ledger.now

    @property
    def first_cause(self) -> str:
        """The first loss since the job trained last, for whoever asks why; empty where it trains."""
        return self._causes.first

    def blame(self, cause: str) -> None:
        """What keeps the job from going on, where it is no member's loss."""
        self._causes.blame(self._ledger.state.generation_number, cause)

    def lost(self, cause: CauseFound, *, spoke: bool, is_echo: bool) -> bool:
        """Whether a member's loss, or that it dies, is a cause, and a new one; else as ``Causes.take`` has it."""
        is_cause = self._causes.take(cause, spoke=spoke, is_echo=is_echo)
        if is_cause:
            self._ledger.write(cause)
        return is_cause

    def explain(self, seat: Seat, text: str) -> bool:
        """More is known of how a lost member ended; whether it is a cause, and that news."""
        cause = self._causes.explain(seat.node, seat.process, text)
        if cause is not None:
            self._ledger.write(cause)
        return cause is not None

    def left(self, text: str) -> None:
        """A worker gave its seat up on purpose, saying this; the first one counts."""
        self._left_with = self._left_with or text

    def trains(self, generation: int) -> None:
        """A member trains in this generation: what ended those before it is made good."""
        self._causes.made_good(generation)

    def answer(self, session: str) -> bool:
        """Whether the job has ended; then the session is told how."""
        if self.ended is None:
            return False
        self._ledger.ready.send(session, self._last_word(self.ended))
        return True

    def _last_word(self, ended: Ended) -> EndJob:
        state = self._ledger.state
        return EndJob(state.job, state.term, ended.kind, ended.text)

    def shift(self, gap_s: float) -> None:
        """The scheduler stood still: every patience is longer by that."""
        now = self._ledger.now
        if self._empty_since is not None:
            self._empty_since = min(self._empty_since + gap_s, now)
        if self._leave_by is not None:
            self._leave_by = min(self._leave_by + gap_s, now + END_GRACE_S)
        self._filling_since = min(self._filling_since + gap_s, now)

    def filling_since(self) -> float | None:
        """When the first one was heard; None before."""
        return None if self._first_heard_at is None else self._filling_since

    def deadline(self) -> float | None:
        """When one of the judgements is worth asking again."""
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
        """When a first generation has been waited for long enough."""
        if self._ledger.state.generation is not None or self._rendezvous.round is not None or self.ended is not None:
            return None
        return self._filling_since + self._ledger.policy.topo_timeout_s

    def judge_emptiness(self) -> None:
        """Give the job up if no worker is left and none has asked for a seat for long enough."""
        ledger = self._ledger
        is_trained = ledger.state.final is not None
        if not self._is_through():
            self._leave_by = None
        elif self._leave_by is not None and self._leave_by <= ledger.now:
            self._all_are_through()
            return
        elif self._leave_by is None and is_trained:  # the wait for an exit status is over
            self.if_everybody_left()
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
        """Restart the wait for workers: a supervisor says that replacements are starting.

        Anybody who can connect can say so. A job that has trained still ends when its round times out (TOPO_TIMEOUT);
        so does the wait for what is left of the scripts, once training is finished.
        """
        ledger = self._ledger
        if self._empty_since is None:
            return
        if ledger.state.final is None or ledger.now < self._deserted_at + ledger.policy.topo_timeout_s:
            self._empty_since = ledger.now

    def stop(self, by: str) -> None:
        """End the job now; if an error of its script has ended it already, that stays its end."""
        failed = self._failed_scripts() if self._ledger.state.final is not None else self._own_errors()
        if self._ledger.policy.recovery and failed:
            self._give_up()
        else:
            self.end_job(EndKind.STOPPED, f"stopped by {by}")

    def _give_up(self) -> None:
        if self._ledger.state.final is not None:
            self._all_are_through()
            return
        errors = self._own_errors()
        kind = EndKind.SCRIPT_FAILED if errors else EndKind.INTERRUPTED
        if WRONG_GRADIENT in errors:  # no script is to be corrected, and what was saved is in doubt
            kind = EndKind.UNEQUAL
        left = "most workers failed" if self._is_occupied() else NO_WORKER_LEFT
        self.end_job(kind, f"{left}; first cause: {self.first_cause or 'unknown'}")

    def _is_occupied(self) -> bool:
        """Whether somebody is here for whom the job goes on: a spare only waits while the house fills."""
        ledger = self._ledger
        return ledger.present() > 0 or (ledger.state.generation is None and bool(ledger.state.spares))

    def _own_errors(self) -> list[Row]:
        """What the missing have died of, where they are half of the job or more, and each has an error of its own.

        Then the program is broken, not a machine; the few who were torn out of a collective before they came upon the
        same error would wait for nobody. What a program runs into and does not do again (a device, a disk, a network)
        is no error of its own.
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
        """Return for how long no worker may be here.

        A term that has heard nobody waits longer, for the processes that are started again. So does a finished
        training: a process that does what is left of a killed one's script may have the cool-down to wait out first.
        """
        policy = self._ledger.policy
        if self._first_heard_at is None:
            return policy.topo_timeout_s
        cool_down_s = 0.0 if self._ledger.state.final is None else policy.cool_down_s
        return 2 * policy.node_timeout_s + cool_down_s

    def if_everybody_left(self) -> None:
        """Where nobody is left, the job that was ended is over, or the one that is through is finished."""
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
        """End the job: every worker's script has ended, and with recovery on they must also have trained."""
        ledger = self._ledger
        if ledger.policy.recovery and ledger.state.final is None:
            self.end_job(EndKind.UNTRAINED, f"every worker left before training began: {self._left_with}")
        elif self._unfinished_scripts():
            self._end_with_unfinished_scripts()
        else:
            self._job_finished()

    def _is_through(self) -> bool:
        """Return whether every slot's script has ended and nothing is left to be trained."""
        ledger, state = self._ledger, self._ledger.state
        if ledger.present():
            return False
        if ledger.policy.recovery and state.generation is not None and state.final is None:
            return False  # stopped, not finished: recover.sh goes on from here
        unfinished = self._unfinished_scripts()
        if (state.final is None or unfinished) and (self._admission.pending or self._admission.refused):
            return False  # a process that asks for a seat may still do what is left
        if len(state.by_slot) < self._world.size():
            return False
        if self._status_by() is not None:
            return False
        return all(state.final is not None and seat.status for seat in unfinished)

    def _status_by(self) -> float | None:
        """Return until when a launcher may still tell a script's exit status; None if none is waited for."""
        ledger = self._ledger
        times = [ledger.presences[node].status_by for node in ledger.state.by_slot.values()]
        return max((at for at in times if at is not None and at > ledger.now), default=None)

    def _unfinished_scripts(self) -> list[Seat]:
        """Return the seats, by slot, whose script has not reached its end."""
        state = self._ledger.state
        seats = (state.seats[node] for _, node in sorted(state.by_slot.items()))
        return [seat for seat in seats if not seat.has_left]

    def unfinished_slots(self) -> list[int]:
        """Return the slots whose script has not reached its end, rising."""
        return [seat.slot for seat in self._unfinished_scripts() if seat.slot is not None]

    def _failed_scripts(self) -> list[Seat]:
        """Return the seats whose script has ended itself with an error after training was finished."""
        return [seat for seat in self._unfinished_scripts() if self._ledger.state.final is not None and seat.status]

    def _end_with_unfinished_scripts(self) -> None:
        """End a trained job of which not every rank reached the end of its script; the exit code is the script's."""
        final, failed = self._ledger.state.final, self._failed_scripts()
        named = failed or self._unfinished_scripts()
        first = named[0]
        told = self._ledger.presences[first.node].ended  # its launcher knows more than that its connection closed
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
        self.ended = self._ledger.ready.ended = Ended(EndKind.FINISHED, "job finished")
        self._tell_those_who_wait()

    def end_job(self, kind: EndKind, text: str, status: int = 0) -> None:
        """End the job unfinished: tell every process, and leave when they have left.

        ``status`` is the exit status of the script that failed after training, if one did.
        """
        ledger = self._ledger
        if self.ended is not None:
            return
        saved = [point.step for point in (ledger.state.committed_point, ledger.state.final) if point is not None]
        step = max((0, *saved, *(presence.step for presence in ledger.presences.values())))
        ledger.write(JobInterrupted(kind, step, text, ledger.state.generation_number, status))
        ledger.ready.say(f"the job ends: {text}", Level.WARNING)
        self.ended, self._leave_by = Ended(kind, text), ledger.now + END_GRACE_S
        message = self._last_word(self.ended)
        for seat in ledger.everybody():
            ledger.tell(seat.node, message)
        self._tell_those_who_wait()
        self.if_everybody_left()

    def _tell_those_who_wait(self) -> None:
        """Processes without a seat learn that there will be none."""
        assert self.ended is not None
        message = self._last_word(self.ended)
        for session in (*self._admission.pending, *self._admission.refused):
            self._ledger.ready.send(session, message)
