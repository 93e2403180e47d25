"""Watch whether a generation makes progress, and end members that block the others.

Ranks that train together wait for each other, so the job is healthy while any of them makes progress. A member reports
only if it has stood still for longer than ever before, so a healthy job has no overhead. ``hang_culprits`` determines
which members are to blame.

The time limit for a step is learned: the longest step that any member has had, times ``FACTOR``, but at least
``LEAST_S`` seconds. The first steps of a generation have their own limit, because they build, compile and warm up.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from samebits.core.causes.table import DEFAULT, CauseTable, Remedy
from samebits.core.hangs import SILENT_KINDS, Hang
from samebits.core.ledger import NAMED, Ledger, Liveness
from samebits.core.messages import Activity, GiveUp, ReportEnvelope
from samebits.core.ready import Severity
from samebits.core.reports import Progress, StallReport
from samebits.core.state import Seat
from samebits.core.watch.hang_culprits import (
    Member,
    Standstill,
    different_collectives,
    find_culprits,
    hang_of,
    sentence,
    shown_place,
    standing,
    where,
)

LEAST_S = 5.0
FACTOR = 3.0
FIRST_STEPS = 2
"""Steps with their own limit in each generation: DistributedDataParallel rebuilds its buckets after the first."""
FIRST_STEPS_S = 600.0
FORMING_S = 60.0
"""The limit while a generation's group is formed and all ranks wait; connecting many ranks may take that long."""
LOOK_AGAIN_S = 0.5
SOONEST_S = 0.01
MOST_DOUBLINGS = 10


class Cure(enum.Enum):
    """What to do about a hang that has lasted too long, from the cause table."""

    END = "the process is ended and replaced"
    FORM_ANEW = "the group is formed again, from the last commit"
    NONE = "nothing: a retry would not help, or is decided elsewhere"


TIMEOUTS = 2.0
"""How long a hang is tolerated, in step timeouts."""
LEAST_PATIENCE_S: dict[Hang, float] = {
    Hang.STUCK: 30.0,  # the script may be waiting for another program
    Hang.BUSY: 600.0,  # an evaluation on one rank is not a hang
    Hang.LOADING: 60.0,  # storage may be slow for a while, as at the start of an epoch
    Hang.COMPILING: 1800.0,
    Hang.APART: 30.0,
    Hang.LINK: 30.0,
}
"""Least patience in seconds if timeouts are learned."""
_CURES = {Remedy.SPARE: Cure.END, Remedy.RESTART: Cure.END, Remedy.ROLL_BACK: Cure.FORM_ANEW}


def cure_of(hang: Hang, table: CauseTable = DEFAULT) -> Cure:
    """Return the remedy for a hang."""
    if hang in SILENT_KINDS:  # it would not receive the order; its lease will end
        return Cure.NONE
    return _CURES.get(table.strategy_for(hang), Cure.NONE)


class HangJudge:
    """Watches the members of the last generation for hangs.

    Attributes:
        said: the message about the present standstill; "" while the job makes progress.
        found: the culprits of the present standstill, or None.
        in_vain: why the job must end because forming the group again did not help; "" otherwise.
        mismatch: the different collectives that the ranks called at the same place of the order, if ``tick`` has found
            any; "" otherwise. A collective before may have combined values of different steps.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told: dict[str, tuple[ReportEnvelope, Progress, float]] = {}  # node → its report, and when it arrived
        self._look_at: float | None = None
        self._is_in_round = False
        self._seen_since: float | None = None  # when the present standstill exceeded the limit
        self._held_by: tuple[Hang | None, frozenset[str]] = (None, frozenset())  # the culprits of that standstill
        self._ended_at_step: dict[int, int] = {}  # step → how often a member was ended there
        self._apart: tuple[int, str] = (0, "")  # where the group was last formed again for different collectives
        self.said = self.in_vain = self.mismatch = ""
        self.found: Standstill | None = None

    def take(self, seat: Seat, body: StallReport, said: ReportEnvelope) -> None:
        """Record a member's report that it stands still, or makes progress again."""
        self._told.pop(seat.node, None)
        if body.progress is not None and said.generation == self._ledger.state.generation_number:
            self._told[seat.node] = said, body.progress, self._ledger.now
        if self._look_at is None:
            self._look_at = self._ledger.now

    def end(self) -> None:
        """Forget all reports, because the generation is over."""
        if self._told or self._look_at is not None:
            self._told.clear()
            self._look_at, self._seen_since, self.said, self.found = None, None, "", None

    def deadline(self) -> float | None:
        """Return when ``tick`` is due, or None."""
        return self._look_at if self._ledger.policy.watches else None

    def shift(self, gap_s: float) -> None:
        """Extend the time limits by the length of a pause of the scheduler."""
        now = self._ledger.now
        self._told = {
            node: (still, progress, min(at + gap_s, now)) for node, (still, progress, at) in self._told.items()
        }

    def tick(self) -> str:
        """Report a standstill and end the members that cause it. Return why the group must form again, or ""."""
        deadline, now, self._is_in_round, self.mismatch = self.deadline(), self._ledger.now, False, ""
        if deadline is None or now < deadline:
            return ""
        members = self._members()
        still = [one.progress for one in members or () if one.progress is not None]
        if members is None or not still:
            self._come_on()
            self._look_at = now + LOOK_AGAIN_S if self._told else None
            return ""
        self._look_at = now + LOOK_AGAIN_S
        found, step = find_culprits(members), max(member.step for member in members)
        # If all ranks wait, none compiles, so the first steps need no time if a rank has returned or waits elsewhere.
        is_elsewhere = len({one.collectives for one in still}) == 1 and bool(different_collectives(found))
        is_apart = len(still) < len(members) or is_elsewhere
        is_apart = is_apart and all(one.waits and not one.silent_s for one in members)
        still_s = min(one.still_s for one in still)
        if any(one.forms for one in members) and all(one.waits and not one.silent_s for one in members):
            timeout_s = max(FORMING_S, self._ledger.policy.step_timeout_s or 0.0)
        else:
            timeout_s = self._timeout_s(still, is_first=not is_apart)
        if still_s < timeout_s:
            self._look_at = now + min(max(timeout_s - still_s, SOONEST_S), LOOK_AGAIN_S)
            self._come_on()
            return ""
        if self._seen_since is None or found.held_by != self._held_by:
            self._held_by, self._seen_since = found.held_by, now
        self.found = found
        if not self.said:
            self.said = f"{sentence(found, still_s)}{self._then(found, timeout_s, step)}"
            self._ledger.ready.say(self.said, Severity.WARNING)
        if not self._ledger.policy.ends_stuck:
            return ""
        return self._cure(found, still_s, timeout_s, step)

    def tick_in_round(self, came: Collection[str]) -> None:
        """End members that stand still while an open round waits for them.

        Members in a collective leave it by themselves, or their own process ends them. If no member has joined yet, the
        round waits for none.
        """
        ledger, deadline, now = self._ledger, self.deadline(), self._ledger.now
        if not self._is_in_round:
            self._is_in_round, self.said, self.found, self._seen_since = True, "", None, None
        if deadline is None or now < deadline:
            return
        members = (self._standing_of(node) for node in self._told if node not in came)
        late = [one for one in members if one is not None and not one.silent_s and not one.waits]
        if not late or not came:
            self.said, self.found, self._seen_since = "", None, None
            self._look_at = now + LOOK_AGAIN_S if self._told else None
            return
        self._look_at = now + LOOK_AGAIN_S
        step, over, said = max(member.step for member in late), [], []
        found = Standstill(tuple((one, hang_of(one.progress)) for one in late if one.progress is not None), ())
        for member, hang in found.culprits:
            assert member.progress is not None
            still_s, timeout_s = member.progress.still_s, self._timeout_s([member.progress])
            if still_s >= timeout_s:
                self._seen_since = now if self._seen_since is None else self._seen_since
                said.append(f"{standing(member, hang)} for {still_s:.0f} s{self._then(found, timeout_s, step)}")
            if self._cure_of(hang) is Cure.END and self._is_over(hang, still_s, timeout_s, step):
                over.append((member, hang))
        if said and not self.said:
            self.said, self.found = f"the round waits: {said[0]}", found
            ledger.ready.say(self.said, Severity.WARNING)
        if over and ledger.policy.ends_stuck:
            self._end_them(over, step)

    def _come_on(self) -> None:
        self._seen_since = None
        if self.said:
            self._ledger.ready.say("the job makes progress again")
            self.said, self.found = "", None

    def _timeout_s(self, still: Sequence[Progress], *, is_first: bool = True) -> float:
        fixed_s = self._ledger.policy.step_timeout_s
        if is_first and min(one.steps for one in still) < FIRST_STEPS:
            return max(FIRST_STEPS_S, fixed_s or 0.0)
        return fixed_s or max(LEAST_S, FACTOR * max(one.longest_s for one in still))

    def _members(self) -> list[Member] | None:
        """Return what every member is doing, or None if any makes progress or is changing generation."""
        committed = self._ledger.state.generation
        members: list[Member] = []
        for node, _ in () if committed is None else committed.members:
            member = self._standing_of(node)
            if member is None:
                return None
            members.append(member)
        return members

    def _standing_of(self, node: str) -> Member | None:
        """Return what a member is doing, or None if it makes progress, is absent or reports nothing."""
        ledger, presence, told = self._ledger, self._ledger.presences.get(node), self._told.get(node)
        number = ledger.state.generation_number
        if presence is None or presence.closed_at is not None or presence.generation != number:
            return None
        silent_s, process_state = self._silent_s(presence), presence.current_process_state()
        if presence.activity is Activity.DONE:
            return Member(node, presence.step, None, silent_s, process_state)
        if told is not None and told[0].step == presence.step and self._is_of_now(told[0]):
            progress = told[1]._replace(still_s=told[1].still_s + ledger.now - told[2])
            forms = presence.activity is Activity.FORMING
            return Member(node, presence.step, progress, silent_s, process_state, forms)
        return Member(node, presence.step, None, silent_s, process_state) if silent_s else None

    def _is_of_now(self, said: ReportEnvelope) -> bool:
        """Return whether the sender still holds its seat and was a member of the last generation."""
        seat = self._ledger.state.seats.get(said.sender.node)
        is_its = seat is not None and seat.session == said.sender.session
        return is_its and said.generation == self._ledger.state.generation_number

    def _silent_s(self, presence: Liveness) -> float:
        """Return how many seconds the member has been silent, or 0 if less than half of NODE_TIMEOUT."""
        silent_s = self._ledger.now - (presence.heard_at or self._ledger.now)
        return silent_s if silent_s > self._ledger.policy.node_timeout_s / 2 else 0.0

    def silent(self) -> list[Seat]:
        """Return members that the next tick may report as silent."""
        deadline, committed = self.deadline(), self._ledger.state.generation
        if deadline is None or self._ledger.now < deadline or not self._told or committed is None:
            return []
        presences = self._ledger.presences
        nodes = [node for node, _ in committed.members if node in presences and self._silent_s(presences[node])]
        return [self._ledger.state.seats[node] for node in nodes]

    def _patience_s(self, hang: Hang, timeout_s: float, step: int) -> float:
        """Return how long to wait before a hang is ended, in seconds.

        The time doubles each time that ending a member at this step did not help.
        """
        before = min(self._ended_at_step.get(step, 0), MOST_DOUBLINGS)
        least_s = 0.0 if self._ledger.policy.step_timeout_s else LEAST_PATIENCE_S.get(hang, 0.0)
        return float(max(TIMEOUTS * timeout_s, least_s) * 2**before)

    def _is_over(self, hang: Hang, still_s: float, timeout_s: float, step: int) -> bool:
        """Return whether the hang has lasted too long, and was also watched for that long.

        The second condition spares members whose machine was suspended and has just resumed.
        """
        patience_s, now = self._patience_s(hang, timeout_s, step), self._ledger.now
        seen_s = 0.0 if self._seen_since is None else now - self._seen_since
        return still_s >= patience_s and seen_s >= patience_s - timeout_s - LOOK_AGAIN_S

    def _cure_of(self, hang: Hang) -> Cure:
        return cure_of(hang, self._ledger.policy.causes)

    def _then(self, found: Standstill, timeout_s: float, step: int) -> str:
        hangs = [hang for _, hang in found.culprits] if found.common is None else [found.common]
        cures = {cure: hang for hang in hangs if (cure := self._cure_of(hang)) is not Cure.NONE}
        if not cures:
            return ""
        if not self._ledger.policy.ends_stuck:
            return "; nothing is done about it (HANG=tell)"
        cure, hang = next(iter(cures.items()))
        what = "it is ended and replaced" if cure is Cure.END else "the group is formed again"
        before = self._ended_at_step.get(step, 0)
        again = f", as {before} times before" if before > 1 else ", as once before" if before else ""
        return f"; {what} after {self._patience_s(hang, timeout_s, step):.0f} s (HANG=end){again}"

    def _cure(self, found: Standstill, still_s: float, timeout_s: float, step: int) -> str:
        def is_over(hang: Hang, cure: Cure) -> bool:
            return self._cure_of(hang) is cure and self._is_over(hang, still_s, timeout_s, step)

        over = [(one, hang) for one, hang in found.culprits if found.common is None and is_over(hang, Cure.END)]
        common = [found.common] if found.common else [hang for _, hang in found.culprits]
        if not over and not any(is_over(hang, Cure.FORM_ANEW) for hang in common):
            return ""
        self._end_them(over, step)
        if over:
            return ""
        text = sentence(found, still_s)
        has_returned = any(one.progress is None for one, _ in found.culprits)
        if has_returned and self._ended_at_step[step] > 1:  # the loop ends at that step whenever it is entered
            place = next((shown_place(one.progress) for one in found.waiting if one.progress), "")
            self.in_vain = (
                f"{text} ({place}), as it did before the group was formed again: the ranks take different numbers of "
                "steps. Fix: take the same number of batches on every rank (samebits.ElasticSampler does), and leave "
                "the loop at the same step everywhere"
            )
        elif apart := different_collectives(found):
            if self._apart == (step, apart):  # the new group was connected, so the network is not the cause
                self.in_vain = (
                    f"the ranks call different collectives after step {step}: {apart}, as they did before the group "
                    "was formed again. Fix: call the same collectives in the same order on every rank"
                )
            self._apart = step, apart
            members = (*found.waiting, *(one for one, _ in found.culprits))
            numbers = {one.progress.collectives for one in members if one.progress is not None}
            self.mismatch = apart if len(numbers) == 1 else ""
        return text

    def _end_them(self, over: Sequence[tuple[Member, Hang]], step: int) -> None:
        """End these members, and remember the step so that the next attempt waits longer."""
        ledger = self._ledger
        self._ended_at_step[step] = self._ended_at_step.pop(step, 0) + 1
        while len(self._ended_at_step) > NAMED:
            del self._ended_at_step[next(iter(self._ended_at_step))]
        for member, hang in over:
            seat, progress = ledger.state.seats[member.node], member.progress
            assert progress is not None, "a silent one is left to its lease"
            why = f"it held the others up for {progress.still_s:.0f} s in {where(progress, hang)} (HANG=end)"
            ledger.presences[member.node].hang = hang
            ledger.tell(member.node, GiveUp(ledger.state.job, ledger.state.term, seat.incarnation, why))
        self.said, self.found = "", None
