"""Cores with one decision replaced.

A mutant is otherwise the real core, so it breaks visibly when that decision moves elsewhere.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from unittest import mock

from samebits.core.job_end import JointStop
from samebits.core.messages import (
    Admitted,
    FromWorker,
    GenerationStarted,
    Heartbeat,
    Holdings,
    Join,
    Refusal,
    Register,
    ReportEnvelope,
    RoundId,
)
from samebits.core.point import Point
from samebits.core.ready import Ready
from samebits.core.records import GenerationCommitted, Record, SeatGranted, TermStarted, TrainingFinished
from samebits.core.reports import PeerGone, StopsAfter
from samebits.core.restore import Restore, choose_restore_point
from samebits.core.scheduler import SchedulerCore, SchedulerEvent, SchedulerPaused
from samebits.core.state import Seat
from samebits.core.values import replace
from tests.simulation.mutants.mutant import Mutant


class SpeaksFirst(SchedulerCore):
    """Sends now what it writes at the next step."""

    def step(self, event: SchedulerEvent, now: float) -> Ready:
        ready = super().step(event, now)
        late = getattr(self, "_late", [])
        self._late, ready.records = ready.records, late
        return ready


class NoCoolDown(SchedulerCore):
    """A lost seat is free at once."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._leases.cool_down_left_s = lambda seat: 0.0  # type: ignore[method-assign]


class RefusalExtends(SchedulerCore):
    """The cool-down runs from the last refusal."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        refuse = self._admission._refuse

        def refuse_and_count(message: Register, refusal: Refusal, text: str, retry_after_s: float = 0.0) -> None:
            refuse(message, refusal, text, retry_after_s)
            if refusal is Refusal.COOLING_DOWN and message.node in self._ledger.presences:
                self._ledger.presences[message.node].heard_at = self._ledger.now

        self._admission._refuse = refuse_and_count  # type: ignore[method-assign]


class TakesAnyIncarnation(SchedulerCore):
    """Accepts any process that names the node."""

    def _holder(self, session: str, sender: Any) -> Seat | None:
        seat = self._ledger.state.seats.get(sender.node)
        return None if seat is None or seat.slot is None or seat.has_left else seat


class CountsRoundsAnew(SchedulerCore):
    """Round ids start at 1.1 at every start of the scheduler."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        open_round = self._rendezvous.open

        def open_as_in_term_one(reason: str, **how: Any) -> None:
            with mock.patch("samebits.core.rounds.rendezvous.RoundId", lambda term, number: RoundId(1, number)):
                open_round(reason, **how)

        self._rendezvous.open = open_as_in_term_one  # type: ignore[method-assign]


def _write_with(change: Callable[[Record], Record | None]) -> type[SchedulerCore]:
    """Return a core whose records pass through ``change`` on their way to the journal; None is not written."""

    class Changed(SchedulerCore):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            ledger = self._ledger

            def write(record: Record) -> None:
                changed = change(record)
                if changed is not None:
                    ledger.ready.records.append(changed)
                ledger.state.apply(changed or record)

            patcher = mock.patch.object(type(ledger), "write", lambda _, record: write(record))
            self.step = _under(patcher, super().step)  # type: ignore[method-assign]
            self.start = _under(patcher, super().start)  # type: ignore[method-assign]

    return Changed


def _under(patcher: Any, method: Callable[..., Ready]) -> Callable[..., Ready]:
    def run(*arguments: Any) -> Ready:
        with patcher:
            return method(*arguments)

    return run


def _unwritten_generation(record: Record) -> Record | None:
    return None if isinstance(record, GenerationCommitted) else record


def _same_incarnation(record: Record) -> Record:
    return replace(record, incarnation=1) if isinstance(record, SeatGranted) else record


class MovesRanks(SchedulerCore):
    """A returning node gets the next seat."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        admission, state = self._admission, self._ledger.state
        grant = admission._grant

        def grant_next(message: Register, slot: int) -> Seat:
            moves = message.node in state.seats and state.seats[message.node].slot is not None
            return grant(message, (slot + 1) % self.policy.world_size if moves else slot)

        admission._grant = grant_next  # type: ignore[method-assign]


def _worst(
    joined: Mapping[int, Holdings],
    committed: GenerationCommitted | None,
    slots: Sequence[int],
    suspects: Collection[int],
) -> Restore:
    """Return the smallest point that any member holds."""
    smallest: list[Point] = [min(member.points) for member in joined.values() if member.points]
    least = {
        rank: replace(member, points=tuple(point for point in member.points if point == min(smallest)))
        for rank, member in joined.items()
    }
    return choose_restore_point(least if smallest else joined, committed, slots, suspects)


class DeafToJoins(SchedulerCore):
    """A join does not renew the lease."""

    def _receive(self, session: str, message: FromWorker) -> None:
        renew = self._leases.renew
        seat = self._ledger.state.seats.get(message.sender.node) if isinstance(message, Join) else None
        if seat is not None and not seat.is_lost and self._ledger.presences[seat.node].heard_at is not None:
            self._leases.renew = lambda seat: False  # type: ignore[method-assign]
        super()._receive(session, message)
        self._leases.renew = renew  # type: ignore[method-assign]


class FinishesWithTheFirst(SchedulerCore):
    """One finished worker means that all are."""

    def _member_done(self, seat: Seat, step: int) -> None:
        committed = self._ledger.state.generation
        assert committed is not None
        if self._ledger.state.final is None:
            self._ledger.write(TrainingFinished(Point(step, committed.generation)))


class IgnoresStalls(SchedulerCore):
    """Time in which the scheduler was paused counts as the workers' silence."""

    def _stalled(self, gap_s: float) -> None:
        pass


class InvitesOnce(SchedulerCore):
    """A worker that missed the round is not invited again."""

    def _heartbeat(self, seat: Seat, message: Heartbeat) -> None:
        if self._rendezvous.round is None:
            super()._heartbeat(seat, message)


class KeepsJoinsOfTheLost(SchedulerCore):
    """A lost member's contribution to the round still counts after its restart."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._rendezvous.forget = lambda node: None  # type: ignore[method-assign]


class TellsNoZombie(SchedulerCore):
    """A superseded process receives nothing."""

    def _finish_step(self) -> Ready:
        ready = super()._finish_step()
        ready.sends = [send for send in ready.sends if type(send.message).__name__ != "Fenced"]
        return ready


class JudgesWhileItHears(SchedulerCore):
    """Leases are judged before the socket is drained."""

    def step(self, event: SchedulerEvent, now: float) -> Ready:
        if not isinstance(event, SchedulerPaused):
            for seat, reason in self._leases.expired():
                self._lose(seat, reason)
        return super().step(event, now)


class BelievesOldNews(SchedulerCore):
    """Messages to an earlier scheduler are taken for current ones."""

    def _compare_member(self, seat: Seat, message: Heartbeat) -> None:
        super()._compare_member(seat, replace(message, term=self._ledger.state.term))


class CorrectsNobody(SchedulerCore):
    """A worker that addresses an earlier scheduler, as if nothing had happened, is not told of this one."""

    def _heartbeat(self, seat: Seat, message: Heartbeat) -> None:
        super()._heartbeat(seat, message)
        ready = self._ledger.ready
        ready.sends = [send for send in ready.sends if not isinstance(send.message, Admitted)]


class RevivesTheDead(SchedulerCore):
    """A late message of a process known to be dead renews its lease."""

    def step(self, event: SchedulerEvent, now: float) -> Ready:
        for presence in self._ledger.presences.values():
            presence.is_gone = False
        return super().step(event, now)


class ForgetsWhoWaits(SchedulerCore):
    """After the cool-down the seat is never given back to its own node."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        left_s = self._leases.cool_down_left_s
        self._leases.cool_down_left_s = lambda seat: max(left_s(seat), 0.5 if seat.is_lost else 0.0)  # type: ignore[method-assign]


class TakesOneTooMany(SchedulerCore):
    """Adds a seat when all are taken."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        admission = self._admission
        admission._take_over = lambda message, holders: admission._grant(  # type: ignore[method-assign]
            message, self.policy.world_size
        )


class WelcomesStrangers(SchedulerCore):
    """Job name, settings and job are not compared."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._admission._is_stranger = lambda message: None  # type: ignore[method-assign]


class ForgetsWhomItLookedAt(SchedulerCore):
    """A silent worker that is being examined has no deadline any more."""

    def silent(self, now: float) -> list[Seat]:
        found, deadlines = super().silent(now), self._leases._deadlines
        while deadlines and deadlines[0][0] <= now:
            heapq.heappop(deadlines)
        return found


class PilesUpDeadlines(SchedulerCore):
    """Every message adds a deadline."""

    def _receive(self, session: str, message: FromWorker) -> None:
        super()._receive(session, message)
        for seat in self._ledger.state.seats.values():
            heapq.heappush(self._leases._deadlines, (self._ledger.now + 60.0, seat.node, seat.incarnation))


class NamesWrongSources(SchedulerCore):
    """A member that lacks the point is sent to the next rank, whatever that one holds."""

    def _finish_step(self) -> Ready:
        ready = super()._finish_step()
        ready.sends = [
            send._replace(message=replace(send.message, source=(send.message.rank + 1) % send.message.world_size))
            if isinstance(send.message, GenerationStarted)
            else send
            for send in ready.sends
        ]
        return ready


class ForgetsItsRank(SchedulerCore):
    """A member gets the rank after its own."""

    def _finish_step(self) -> Ready:
        ready = super()._finish_step()
        ready.sends = [
            send._replace(message=replace(send.message, rank=(send.message.rank + 1) % send.message.world_size))
            if isinstance(send.message, GenerationStarted)
            else send
            for send in ready.sends
        ]
        return ready


class CountsTheCoolDownFromTheLoss(SchedulerCore):
    """Starts the cool-down at the loss, after a whole lease of silence."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        left_s = self._leases.cool_down_left_s
        self._leases.cool_down_left_s = lambda seat: max(  # type: ignore[method-assign]
            0.0, left_s(seat) - self.policy.node_timeout_s
        )


class RestartsEveryWait(SchedulerCore):
    """A scheduler start restarts every cool-down, though the journal proves how much of it is over."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for seat in self.state.seats.values():
            seat.quiet_since = None


def _same_term(record: Record) -> Record:
    return replace(record, term=max(1, record.term - 1)) if isinstance(record, TermStarted) else record


class TellsGenerationsToNobodyTwice(SchedulerCore):
    """A member that missed the start of its generation is never told again."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._rendezvous.start = lambda seat: None  # type: ignore[method-assign]


class NeverJudgesAgain(SchedulerCore):
    """A heartbeat that once had no effect never has one again."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._repeats.forget = lambda: None  # type: ignore[method-assign]


class RenewsNothingRepeated(SchedulerCore):
    """A repeated heartbeat does not count as a sign of life."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        take = self._repeats.take

        def take_and_drop(session: str, message: object) -> bool:
            presences = self._ledger.presences
            known = self._ledger.sessions.get(session)
            before = dataclasses.replace(presences[known]) if known in presences else None
            if not take(session, message):
                return False
            if known is not None and before is not None:
                presences[known].heard_at, presences[known].lease_until = before.heard_at, before.lease_until
            return True

        self._repeats.take = take_and_drop  # type: ignore[method-assign]


class TakesAnOldDeathForANewOne(SchedulerCore):
    """The death of an earlier process of a node counts as that of the current one."""

    def _peer_gone(self, witness: Seat, body: PeerGone, _said: ReportEnvelope) -> None:
        seat = self.state.seats.get(body.session.partition("#")[0])
        if seat is not None and seat.node != witness.node:
            self._closed(seat.session, gone=True, witness=witness)


class AsksNobody(SchedulerCore):
    """A close is believed, whatever has been heard of the peer since."""

    def _closed(self, session: str, gone: bool, witness: Seat | None = None) -> None:
        with mock.patch.object(self._admission, "welcome"):
            super()._closed(session, gone, witness)


ROLLBACKS = {"has_own_parts": True, "saves_s": 3.0, "save_every": 1, "keep": 100, "cool_down_s": 0.0}
LATE_NEWS = {"is_ordered": False, "has_stragglers": True, "p_slow": 0.2, "slow_s": 10.0, "cool_down_s": 0.0}
LATE_NEWS |= {"rates_hz": {"scheduler killed": 1 / 8}}

FIXED_SIZE = {"min_world_size": 99, "max_world_size": 0, "spare_num": 0}  # the mix keeps them beside the world's size


def _is_there_at_once(stop: JointStop, seat: Seat, body: StopsAfter, said: ReportEnvelope) -> None:
    _TAKE(stop, seat, replace(body, is_there=True), said)


def _asks_once(stop: JointStop, seat: Seat) -> None:
    asked = stop.__dict__.setdefault("asked", set())
    if seat.node not in asked:
        asked.add(seat.node)
        _REMIND(stop, seat)


_TAKE, _REMIND = JointStop.take, JointStop.remind

ZOMBIES = {**FIXED_SIZE, "cool_down_s": 1.0, "chaos_s": 60.0, "target_step": 100}
ZOMBIES |= {"rates_hz": {"worker stopped": 0.15, "duplicate started": 0.15, "worker killed": 0.15}}

LATE_DEATHS = {"cool_down_s": 0.0, "chaos_s": 60.0, "target_step": 100}
LATE_DEATHS |= {"rates_hz": {"worker stopped": 0.3, "worker killed": 0.3}}

JOINT_STOPS = {"chaos_s": 25.0, "target_step": 100, "p_drop": 0.3}
JOINT_STOPS |= {"rates_hz": {"joint stop asked for": 0.2}}

LATE_CLOSES = {"is_ordered": True, "p_drop": 0.0, "p_slow": 0.0, "fsync_s": 0.0, "chaos_s": 60.0, "target_step": 100}
LATE_CLOSES |= {"rates_hz": {"connection broken": 1.0}}

MUTANTS: tuple[Mutant, ...] = (
    Mutant("sends before it persists", frozenset({"S7"}), 10, SpeaksFirst),
    Mutant("generation not persisted", frozenset({"S4", "S7"}), 10, _write_with(_unwritten_generation)),
    Mutant("no cool-down", frozenset({"S3"}), 50, NoCoolDown),
    Mutant("cool-down counted from the refusal", frozenset({"S3", "L2"}), 100, RefusalExtends),
    Mutant("a cool-down never ends", frozenset({"L1", "L2", "S3"}), 50, ForgetsWhoWaits),
    Mutant("incarnation not checked", frozenset({"S6", "S18"}), 100, TakesAnyIncarnation),
    Mutant("incarnation not raised", frozenset({"S5"}), 50, _write_with(_same_incarnation)),
    Mutant("the dead revived", frozenset({"S6", "S17"}), 100, RevivesTheDead),
    Mutant("fenced processes are not notified", frozenset({"L1", "L3", "L5"}), 300, TellsNoZombie, changes=ZOMBIES),
    Mutant("ranks move", frozenset({"S1", "S2"}), 50, MovesRanks),
    Mutant("round ids reused after a restart", frozenset({"S12"}), 50, CountsRoundsAnew),
    Mutant("a round's invitation is sent only once", frozenset({"L1", "L4"}), 200, InvitesOnce),
    Mutant("joins of lost members kept", frozenset({"S8", "S16", "L1", "crash"}), 100, KeepsJoinsOfTheLost),
    Mutant(
        "messages to an earlier scheduler are accepted", frozenset({"S17"}), 300, BelievesOldNews, changes=LATE_NEWS
    ),
    Mutant("lease not renewed by a join", frozenset({"S18", "S3"}), 200, DeafToJoins),
    Mutant("stalls ignored", frozenset({"S18"}), 100, IgnoresStalls),
    Mutant("leases judged before the socket is drained", frozenset({"S18", "S6"}), 200, JudgesWhileItHears),
    Mutant(
        "restore point not the greatest",
        frozenset({"S9"}),
        100,
        SchedulerCore,
        patches={"samebits.core.rounds.rendezvous.choose_restore_point": _worst},
    ),
    Mutant(
        "an abandoned line resumed",
        frozenset({"S10"}),
        200,
        SchedulerCore,
        patches={"samebits.core.restore.is_on_line": lambda point, committed: True},
        changes=ROLLBACKS,
    ),
    Mutant("finished when the first member is", frozenset({"S19"}), 50, FinishesWithTheFirst),
    Mutant("sources that do not hold the point", frozenset({"S9"}), 100, NamesWrongSources),
    Mutant("a rank sent to the wrong node", frozenset({"S14", "S8"}), 20, ForgetsItsRank),
    Mutant("one seat too many", frozenset({"S14"}), 300, TakesOneTooMany),
    Mutant("other jobs' workers admitted", frozenset({"S15"}), 100, WelcomesStrangers),
    Mutant(
        "a silent worker under examination has no deadline", frozenset({"L1", "L3", "L5"}), 50, ForgetsWhomItLookedAt
    ),
    Mutant("deadline extensions accumulate", frozenset({"S16"}), 20, PilesUpDeadlines),
    Mutant("cool-down shorter by a lease", frozenset({"S3"}), 100, CountsTheCoolDownFromTheLoss),
    Mutant("a scheduler start restarts every cool-down", frozenset({"S3", "S4"}), 100, RestartsEveryWait),
    Mutant("term not raised", frozenset({"S4"}), 50, _write_with(_same_term)),
    Mutant("a missed start is not sent again", frozenset({"L1", "L5"}), 300, TellsGenerationsToNobodyTwice),
    Mutant(
        "a repeated heartbeat is never judged again", frozenset({"L1", "L5", "S6", "S3", "S18"}), 300, NeverJudgesAgain
    ),
    Mutant("an old death counts as a new one", frozenset({"S18"}), 300, TakesAnOldDeathForANewOne, changes=LATE_DEATHS),
    Mutant("a late close is accepted", frozenset({"S18"}), 100, AsksNobody, changes=LATE_CLOSES),
    Mutant("a repeated heartbeat renews nothing", frozenset({"S18", "S3"}), 300, RenewsNothingRepeated),
    Mutant(
        "a joint stop does not wait for its commit",
        frozenset({"S26"}),
        50,
        patches={"samebits.core.job_end.JointStop.take": _is_there_at_once},
        changes=JOINT_STOPS,
    ),
    Mutant(
        "a joint stop is requested only once",
        frozenset({"L1", "L3", "L5"}),
        100,
        patches={"samebits.core.job_end.JointStop.remind": _asks_once},
        changes=JOINT_STOPS,
    ),
)
