"""Whether the generation comes on, and who is to blame where it does not.

Here lives when anybody came on last, how long that may take, the judgement of where everybody stands, its sentence, and
when whoever holds the others up is ended. Never here: how a process finds out where it stands, or how it is ended. The
one idea: ranks that train together wait for each other, so nothing is wrong as long as anybody comes on; when nobody
does, whoever is *not* waiting is the one that all the others wait for.

A member speaks only where it stands still for longer than it ever did, so a job that comes on pays nothing. How long a
step may take is learned: the longest that any member has seen, times ``FACTOR``, and never less than ``LEAST_S``. The
first steps of a generation have their own allowance: they build, compile and warm up.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.core.cause_table import DEFAULT, CauseTable, Strategy
from runtime.core.hangs import SILENT_KINDS, Hang, Sight, told_apart
from runtime.core.ledger import NAMED, Ledger, Presence
from runtime.core.messages import MAX_PLACE_CHARS, Activity, GiveUp, Phase, Progress, Still
from runtime.core.ready import Level
from runtime.core.state import Seat

LEAST_S = 5.0
FACTOR = 3.0
FIRST_STEPS = 2
"""So many steps of a generation are its first: DistributedDataParallel lays out its buckets anew after one."""
FIRST_STEPS_S = 600.0
LOOK_AGAIN_S = 0.5
SOONEST_S = 0.01
MOST_DOUBLINGS = 10


class Cure(enum.Enum):
    """What is done once patience is over: what the table of causes has for it, as far as it can be done from here."""

    END = "the process is ended, and replaced"
    FORM_ANEW = "the group is formed anew, from the last commit"
    NONE = "nothing: trying again would not help, or is somebody else's to decide"


TIMEOUTS = 2.0
"""So many step timeouts a hang is looked on."""
LEAST_PATIENCE_S: dict[Hang, float] = {
    Hang.STUCK: 30.0,  # the script may be waiting for another program
    Hang.BUSY: 600.0,  # an evaluation on one rank is no hang
    Hang.LOADING: 60.0,  # storage may be slow for a while, as at the start of an epoch
    Hang.COMPILING: 1800.0,
    Hang.APART: 30.0,
    Hang.LINK: 30.0,
}
"""Where the timeouts are learned, at least so many seconds."""
_CURES = {Strategy.SPARE: Cure.END, Strategy.RESTART: Cure.END, Strategy.ROLL_BACK: Cure.FORM_ANEW}


def cure_of(hang: Hang, table: CauseTable = DEFAULT) -> Cure:
    """What is done about it."""
    if hang in SILENT_KINDS:  # it would not hear; its lease will end
        return Cure.NONE
    return _CURES.get(table.strategy_for(hang), Cure.NONE)


_BY_PHASE = {Phase.DATA: Hang.LOADING, Phase.COMMIT: Hang.SAVING, Phase.COMPILING: Hang.COMPILING}


@dataclass(frozen=True, slots=True)
class Member:
    """Where one rank stands; ``progress`` is None of one whose function has returned."""

    node: str
    step: int
    progress: Progress | None
    silent_s: float = 0.0  # where that is too long: what it told is old, if it told anything
    sight: Sight | None = None  # of one that is silent

    @property
    def waits(self) -> bool:
        """Whether it waits for the others."""
        return self.progress is None or self.progress.phase is Phase.COMMUNICATION


@dataclass(frozen=True, slots=True)
class Standstill:
    """Nobody comes on: who holds the others up, by rank, and what each is in; nobody where ``common`` says it all."""

    culprits: tuple[tuple[Member, Hang], ...]
    waiting: tuple[Member, ...]
    common: Hang | None = None


def judge(members: Sequence[Member]) -> Standstill:
    """Who holds up whom, where nobody has come on for a while. A function of where everybody stands."""
    silent = [(member, told_apart(member.sight, member.silent_s)) for member in members if member.silent_s]
    heard = [member for member in members if not member.silent_s]
    waiting = tuple(member for member in heard if member.waits)
    holding = [(member, _hang(member.progress)) for member in heard if member.progress and not member.waits]
    if silent or (holding and waiting):
        return Standstill((*silent, *(holding if waiting else ())), waiting)
    if holding:
        return Standstill(tuple(holding), (), Hang.NOBODY_WAITS)
    numbers = [member.progress.collectives for member in waiting if member.progress]
    if len(set(numbers)) > 1:
        usual = max(sorted(set(numbers), reverse=True), key=numbers.count)
        apart = tuple(
            (member, Hang.APART) for member in waiting if member.progress and member.progress.collectives != usual
        )
        return Standstill(apart, tuple(member for member in waiting if (member, Hang.APART) not in apart))
    if len(numbers) < len(waiting):  # some have returned, and others are in a collective that those will never enter
        apart = tuple((member, Hang.APART) for member in waiting if member.progress is None)
        return Standstill(apart, tuple(member for member in waiting if member.progress))
    return Standstill((), waiting, Hang.LINK)


def _hang(progress: Progress) -> Hang:
    if progress.phase in _BY_PHASE:
        return _BY_PHASE[progress.phase]
    return Hang.STUCK if progress.rests else Hang.BUSY


def sentence(found: Standstill, still_s: float) -> str:
    """``no step for 12 s: worker 2 is in train.py:46 (time.sleep), workers 0 and 1 wait for it in all_reduce #812``."""
    begin = f"no step for {still_s:.0f} s: "
    if found.common is Hang.LINK:
        return f"{begin}all workers wait in the same collective, {_collective(found.waiting)}, and none comes out of it"
    if found.common is Hang.NOBODY_WAITS:
        where = ", ".join(_standing(member, hang) for member, hang in found.culprits[:NAMED])
        return f"{begin}{where}, and nobody waits for another"
    parts = [_standing(member, hang) for member, hang in found.culprits[:NAMED]]
    if len(found.culprits) > NAMED:
        parts.append(f"{len(found.culprits) - NAMED} more workers hold the others up, too")
    waiting = [member for member in found.waiting if member.progress]
    through = [member for member in found.waiting if not member.progress]
    it = "it" if len(found.culprits) == 1 else "them"
    if waiting:
        parts.append(f"{_workers(waiting)} for {it} in {_collective(waiting)}")
    if through:
        parts.append(f"{_workers(through)} for {it} at the end of training")
    return begin + ", ".join(parts)


def _standing(member: Member, hang: Hang) -> str:
    who, progress = f"worker {member.node}", member.progress
    if hang in SILENT_KINDS:
        silent = f"{who} has not been heard of for {member.silent_s:.0f} s"
        return silent if hang is Hang.SILENT else f"{silent}: it {hang.value}"
    if progress is None:
        return f"{who} has returned from the training function"
    if hang is Hang.APART:
        return f"{who} is in {_collective([member])} already or still"
    return f"{who} is in {_where(progress, hang)}"


def _where(progress: Progress, hang: Hang) -> str:
    doing = {
        Hang.BUSY: " and computes",
        Hang.LOADING: " and waits for data",
        Hang.SAVING: " and commits",
        Hang.COMPILING: " and compiles",
    }.get(hang, "")
    return f"{shown_place(progress)}{doing}"


def shown_place(progress: Progress) -> str:
    """Where a main thread is, for a sentence: what it has told, on one line."""
    place = "".join(one if one.isprintable() else " " for one in progress.place[:MAX_PLACE_CHARS])
    return place or "code that is not the script's"


def _workers(members: Sequence[Member]) -> str:
    names = [member.node for member in members]
    if len(names) == 1:
        return f"worker {names[0]} waits"
    if len(names) > NAMED:
        return f"{len(names)} workers wait"
    return f"workers {', '.join(names[:-1])} and {names[-1]} wait"


def _collective(members: Sequence[Member]) -> str:
    progress = next(member.progress for member in members if member.progress)
    name = shown_place(progress).partition(" ")[0] if progress.place else "a collective"
    return f"{name} #{progress.collectives}"


class Watch:
    """Follows the members of the last generation.

    Attributes:
        said: what was said of the present standstill; empty where the job comes on.
        found: who holds the others up in it; None where the job comes on.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told: dict[str, tuple[Still, Progress, float]] = {}  # node → that it stands still, and when it said so
        self._look_at: float | None = None
        self._ended_at_step: dict[int, int] = {}  # step → how often somebody was ended there
        self.said = ""
        self.found: Standstill | None = None

    def take(self, seat: Seat, message: Still) -> None:
        """A member stands still, or comes on again."""
        self._told.pop(seat.node, None)
        if message.progress is not None and message.generation == self._ledger.state.generation_number:
            self._told[seat.node] = message, message.progress, self._ledger.now
        if self._look_at is None:
            self._look_at = self._ledger.now

    def end(self) -> None:
        """The generation is over."""
        if self._told or self._look_at is not None:
            self._told.clear()
            self._look_at, self.said, self.found = None, "", None

    def deadline(self) -> float | None:
        """When ``tick`` is worth calling."""
        return self._look_at if self._ledger.policy.watches else None

    def tick(self) -> str:
        """Say who holds the others up, and end who does so for too long; why the group is to be formed anew, if so."""
        deadline, now = self.deadline(), self._ledger.now
        if deadline is None or now < deadline:
            return ""
        members = self._members()
        still = [one.progress for one in members or () if one.progress is not None]
        if members is None or not still:
            self._come_on()
            self._look_at = now + LOOK_AGAIN_S if self._told else None
            return ""
        self._look_at = now + LOOK_AGAIN_S
        still_s, timeout_s = min(one.still_s for one in still), self._timeout_s(still)
        if still_s < timeout_s:
            self._look_at = now + min(max(timeout_s - still_s, SOONEST_S), LOOK_AGAIN_S)
            self._come_on()
            return ""
        found, step = judge(members), max(member.step for member in members)
        self.found = found
        if not self.said:
            self.said = f"{sentence(found, still_s)}{self._then(found, timeout_s, step)}"
            self._ledger.ready.say(self.said, Level.WARNING)
        if not self._ledger.policy.ends_stuck:
            return ""
        return self._cure(found, still_s, timeout_s, step)

    def _come_on(self) -> None:
        if self.said:
            self._ledger.ready.say("the job comes on")
            self.said, self.found = "", None

    def _timeout_s(self, still: Sequence[Progress]) -> float:
        fixed_s = self._ledger.policy.step_timeout_s
        if min(one.steps for one in still) < FIRST_STEPS:
            return max(FIRST_STEPS_S, fixed_s or 0.0)
        return fixed_s or max(LEAST_S, FACTOR * max(one.longest_s for one in still))

    def _members(self) -> list[Member] | None:
        """Where all of them stand; None where one comes on, or is on its way into the generation or out of it."""
        ledger, committed = self._ledger, self._ledger.state.generation
        members: list[Member] = []
        for node, _ in () if committed is None else committed.members:
            presence, told = ledger.presences.get(node), self._told.get(node)
            if (
                presence is None
                or presence.closed_at is not None
                or presence.generation != ledger.state.generation_number
            ):
                return None
            silent_s, sight = self._silent_s(presence), presence.sight_now()
            if presence.activity is Activity.DONE:
                members.append(Member(node, presence.step, None, silent_s, sight))
            elif told is not None and told[0].step == presence.step:
                progress, at = told[1], told[2]
                progress = progress._replace(still_s=progress.still_s + ledger.now - at)
                members.append(Member(node, presence.step, progress, silent_s, sight))
            elif silent_s:
                members.append(Member(node, presence.step, None, silent_s, sight))
            else:
                return None
        return members

    def _silent_s(self, presence: Presence) -> float:
        """How long nothing has come from it; 0 where that is nothing to speak of."""
        silent_s = self._ledger.now - (presence.heard_at or self._ledger.now)
        return silent_s if silent_s > self._ledger.policy.node_timeout_s / 2 else 0.0

    def silent(self) -> list[Seat]:
        """Members of whom it may be said at the next tick that nothing comes from them."""
        deadline, committed = self.deadline(), self._ledger.state.generation
        if deadline is None or self._ledger.now < deadline or not self._told or committed is None:
            return []
        presences = self._ledger.presences
        nodes = [node for node, _ in committed.members if node in presences and self._silent_s(presences[node])]
        return [self._ledger.state.seats[node] for node in nodes]

    def _patience_s(self, hang: Hang, timeout_s: float, step: int) -> float:
        """Longer where somebody was ended at this step before: it did not help."""
        before = min(self._ended_at_step.get(step, 0), MOST_DOUBLINGS)
        least_s = 0.0 if self._ledger.policy.step_timeout_s else LEAST_PATIENCE_S.get(hang, 0.0)
        return float(max(TIMEOUTS * timeout_s, least_s) * 2**before)

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
        what = "it is ended and replaced" if cure is Cure.END else "the group is formed anew"
        before = self._ended_at_step.get(step, 0)
        again = f", as {before} times before" if before > 1 else ", as once before" if before else ""
        return f"; {what} after {self._patience_s(hang, timeout_s, step):.0f} s (HANG=end){again}"

    def _cure(self, found: Standstill, still_s: float, timeout_s: float, step: int) -> str:
        ledger = self._ledger

        def is_over(hang: Hang, cure: Cure) -> bool:
            return self._cure_of(hang) is cure and still_s >= self._patience_s(hang, timeout_s, step)

        over = [(one, hang) for one, hang in found.culprits if found.common is None and is_over(hang, Cure.END)]
        common = [found.common] if found.common else [hang for _, hang in found.culprits]
        if not over and not any(is_over(hang, Cure.FORM_ANEW) for hang in common):
            return ""
        self._ended_at_step[step] = self._ended_at_step.pop(step, 0) + 1
        while len(self._ended_at_step) > NAMED:
            del self._ended_at_step[next(iter(self._ended_at_step))]
        for member, hang in over:
            seat = ledger.state.seats[member.node]
            assert member.progress is not None, "a silent one is left to its lease"
            why = f"it held the others up for {still_s:.0f} s in {_where(member.progress, hang)} (HANG=end)"
            ledger.presences[member.node].hang = hang
            ledger.tell(member.node, GiveUp(ledger.state.job, ledger.state.term, seat.incarnation, why))
        self.said, self.found = "", None
        return "" if over else sentence(found, still_s)
