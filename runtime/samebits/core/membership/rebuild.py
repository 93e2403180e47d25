"""Rebuild a lost journal from the workers that are alive (docs/explanation/how-recovery-works.md).

A member of the last generation knows its place there, and two schedulers cannot give a majority of one generation the
same places. The facts on which a majority agrees must therefore have been in the lost journal. A minority, an outdated
member or the last process of an older job never determines the result (S15).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from samebits.core.ledger import Ledger
from samebits.core.messages import MemberRecord, Pairs, Process, Refusal, Register, RoundId
from samebits.core.point import Cut, Point
from samebits.core.ready import Severity
from samebits.core.records import MAX_TERM, JobCreated, JobRebuilt, RebuiltGeneration, RebuiltSeat

UNKNOWN_INCARNATION = 20
"""Bits of an incarnation below the term's. A new or unheard node begins above every incarnation it may have had."""
UNHEARD_TERMS = 1000
"""Scheduler starts assumed beyond the latest reported term, because members may report too late."""
UNHEARD_GENERATIONS = 10
"""Generations assumed beyond the latest reported one, if not all of its members report."""
REPORTS_PER_SLOT = 4
"""Reports kept per slot: more than the members of one job can send. Further ones, from strangers, are dropped."""
EVERY_STEP = 2**62
_TOO_MANY_GENERATIONS = 2**40  # more than any job can reach
_TOO_MANY_INCARNATIONS = (MAX_TERM + 1) << UNKNOWN_INCARNATION
_TOO_HIGH = MAX_TERM // 2  # a term above this is made up by a stranger; a rebuilt job's own terms begin above it


def highest_unheard_incarnation(term: int) -> int:
    """Return the highest incarnation that a lost journal may have assigned before this term without a report of it."""
    return (term // UNHEARD_TERMS) << UNKNOWN_INCARNATION


@dataclass(frozen=True, slots=True)
class Agreement:
    """The facts that must be equal in the reports of one generation's members."""

    job: str
    generation: int
    round: RoundId
    world_size: int
    restore: Point | None


class Rebuild:
    """Collects the reports of an earlier job's members while no seat is granted, and judges them once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reports: dict[str, Register] = {}  # by session
        self._terms: dict[str, int] = {}  # by job: the latest known term, also from spares
        self._until: float | None = None
        self._is_over = False

    @property
    def deadline(self) -> float | None:
        """Return when the reports are judged even if some are missing, or None before the first report."""
        return self._until

    def takes(self, message: Register) -> bool:
        """Return whether this Register is a report, or must wait until the reports are judged."""
        ledger = self._ledger
        if self._is_over or not (ledger.policy.recovery and ledger.policy.rebuild) or ledger.state.seats:
            return False
        if not self._is_report(message):
            if self._until is None and not self._is_spare(message):
                return False
            self._begin(message)
            self._hold(message)
        else:
            self._begin(message)
            if message.session in self._reports or len(self._reports) < self._most:
                self._reports[message.session] = message
        if 0 < message.term < _TOO_HIGH and (message.job in self._terms or len(self._terms) < self._most):
            self._terms[message.job] = max(message.term, self._terms.get(message.job, 0))
        return True

    @property
    def _most(self) -> int:
        return REPORTS_PER_SLOT * self._ledger.policy.max_world_size

    def _begin(self, message: Register) -> None:
        ledger = self._ledger
        if self._until is None:
            self._until = ledger.now + ledger.policy.node_timeout_s
            text = (
                f"RECOVERY_PATH holds no journal, but a worker of job {message.job} is alive: no worker is seated for "
                f"at most {ledger.policy.node_timeout_s:g} s (NODE_TIMEOUT), until a majority of them has reported"
            )
            ledger.ready.say(text, Severity.WARNING)

    def _is_spare(self, message: Register) -> bool:
        """Return whether the sender is a spare of the lost job, so that its members will register, too."""
        is_spare = message.standing is None and message.incarnation > 0
        return self._ledger.policy.spare_num > 0 and is_spare and self._is_of_lost_job(message)

    def _is_of_lost_job(self, message: Register) -> bool:
        """Return whether the sender belongs to the lost job: the launcher's job, or any job if there is no launcher."""
        expected = self._ledger.policy.job
        return message.job == expected if expected else message.job not in ("", self._ledger.state.job)

    def _is_report(self, message: Register) -> bool:
        standing, policy = message.standing, self._ledger.policy
        return (
            standing is not None
            and self._is_of_lost_job(message)
            and policy.min_world_size <= standing.world_size <= policy.max_world_size
            and 0 <= standing.rank < standing.world_size
            and 0 <= standing.slot - standing.rank <= policy.max_world_size - standing.world_size
            and 0 < standing.term < _TOO_HIGH
            and 0 < standing.generation < _TOO_MANY_GENERATIONS
            and 0 < message.incarnation < _TOO_MANY_INCARNATIONS
        )

    def forget(self, session: str) -> None:
        """Discard the report of a session whose connection was closed."""
        self._reports.pop(session, None)

    def shift(self, gap_s: float) -> None:
        """Extend the deadline by the length of a pause of the scheduler."""
        if self._until is not None:
            self._until = min(self._until + gap_s, self._ledger.now + self._ledger.policy.node_timeout_s)

    def judge(self) -> list[Register] | None:
        """Return the members of the rebuilt job, which is then already in the journal.

        Return None if it is too early or no group agrees. Call this only after the socket is drained. The first group
        to agree need not be the newest: all members of an earlier generation may be alive, cut off and replaced, and
        may report before their successors.
        """
        ledger = self._ledger
        if self._until is None or ledger.now < self._until:
            return None
        groups = _in_agreement(self._reports.values())
        assert not ledger.state.seats, "no worker is seated before the reports are judged"
        self._until, self._is_over = None, True
        most = [one for one, members in groups.items() if _is_majority(one, len(members)) and _rises(members)]
        if len({one.job for one in most}) != 1:
            ledger.ready.say(
                f"no job is rebuilt: {_shown(groups)}; a majority of one generation's members must agree. {_MEND}"
            )
            return None
        last = max(most, key=lambda one: one.generation)
        members = groups[last]
        self._write(last, members)
        return list(members.values())

    def _hold(self, message: Register) -> None:
        assert self._until is not None
        left_s = max(self._until - self._ledger.now, 0.1)
        text = f"workers of an earlier job report: no worker is seated for another {left_s:.1f} s"
        self._ledger.ready.send(message.session, self._ledger.refusal(message.session, Refusal.ALIVE, text, left_s))

    def _write(self, last: Agreement, members: dict[int, Register]) -> None:
        ledger = self._ledger
        reports = [one for one in self._reports.values() if one.job == last.job]
        standings = [one.standing for one in reports if one.standing is not None]
        heard_of = max(self._terms.get(last.job, 0), *(one.term for one in standings))
        term = max(ledger.state.term, heard_of) + 1 + UNHEARD_TERMS
        slots = _slots_by_rank(last.world_size, members)
        digits = all(message.node == str(slots[rank]) for rank, message in members.items())
        seats = []
        for rank, slot in enumerate(slots):
            if rank in members:
                message = members[rank]
                seats.append(RebuiltSeat(message.node, slot, message.incarnation, message.session, message.process))
            else:
                node = str(slot) if digits else f"unknown holder of slot {slot}"
                seats.append(RebuiltSeat(node, slot, term << UNKNOWN_INCARNATION, "", _NOWHERE))
        top = max(one.generation for one in standings)
        line = () if last.restore is None else (Cut(last.restore.generation, last.restore.step),)
        if top > last.generation:  # it was committed, but so few were informed that it counts no members
            line = (*line, Cut(last.generation, EVERY_STEP))
        if len(members) < last.world_size:  # the others may have continued without these and saved points
            line = (*line, Cut(top + UNHEARD_GENERATIONS, -1))
        in_it = tuple((seat.node, seat.incarnation) for seat in seats) if top == last.generation else ()
        ledger.write(
            JobRebuilt(
                job=last.job,
                name=ledger.policy.job_name or next(iter(members.values())).job_name,
                settings=ledger.policy.settings,
                term=term,
                boot_id=ledger.boot_id,
                at=ledger.now,
                seats=tuple(seats),
                generation=RebuiltGeneration(top, last.round, in_it, last.restore, line, (), slots if in_it else ()),
                final=max((one.final for one in standings if one.final is not None), default=None),
            )
        )
        ledger.ready.say(
            f"job {last.job} is rebuilt from {len(members)} of {last.world_size} members of generation "
            f"{last.generation}, which agree; term {term}"
        )


def from_points(
    job: str, name: str, settings: Pairs, boot_id: str, now: float, point: Point, top: int
) -> tuple[JobCreated, JobRebuilt]:
    """Return the first journal records of a job that has points but no processes.

    Args:
        job, name, settings: describe the job that saved the points.
        boot_id, now: describe this start.
        point: held and verified by every rank. Points of its generation up to it are the line.
        top: the highest generation found anywhere.
    """
    term = 1 + UNHEARD_TERMS
    line = (Cut(point.generation, point.step), Cut(top + UNHEARD_GENERATIONS, -1))
    generation = RebuiltGeneration(top + UNHEARD_GENERATIONS, RoundId(term, 0), (), point, line, (), ())
    return (
        JobCreated(job, name, settings),
        JobRebuilt(job, name, settings, term, boot_id, now, seats=(), generation=generation, final=None),
    )


_NOWHERE = Process("", 0, 0, "")
_MEND = "End the remaining processes and start again with `samebits recover` or `samebits run`"


def is_placeholder(session: str) -> bool:
    """Return whether a seat was rebuilt without a report from its holder."""
    return not session


def _is_majority(said: Agreement, reports: int) -> bool:
    """Return whether this many reports are a majority. A generation can have only one majority."""
    return 2 * reports > said.world_size


def _what_it_says(message: Register) -> Agreement:
    standing = message.standing
    assert isinstance(standing, MemberRecord)
    return Agreement(message.job, standing.generation, standing.round, standing.world_size, standing.restore)


def _in_agreement(reports: Iterable[Register]) -> dict[Agreement, dict[int, Register]]:
    """Group the reports by agreement and rank. If two reports claim the same rank, neither counts."""
    groups: dict[Agreement, dict[int, Register]] = {}
    claimed_twice: set[tuple[Agreement, int]] = set()
    for message in reports:
        assert isinstance(message.standing, MemberRecord)
        key, rank = _what_it_says(message), message.standing.rank
        group = groups.setdefault(key, {})
        if rank in group:
            claimed_twice.add((key, rank))
        group[rank] = message
    for key, rank in claimed_twice:
        groups[key].pop(rank, None)
    return {key: members for key, members in groups.items() if members}


def _slots_by_rank(world_size: int, members: Mapping[int, Register]) -> tuple[int, ...]:
    """Return the slots of all ranks. A rank without a report gets the first slot that keeps the slots in order."""
    slots: list[int] = []
    for rank in range(world_size):
        standing = members[rank].standing if rank in members else None
        slots.append(standing.slot if standing is not None else slots[-1] + 1 if slots else 0)
    return tuple(slots)


def _rises(members: Mapping[int, Register]) -> bool:
    """Return whether slots increase with ranks and leave room for the ranks in between."""
    reported = [(rank, members[rank].standing) for rank in sorted(members)]
    places = [(rank, standing.slot) for rank, standing in reported if standing is not None]
    return all(b_slot - a_slot >= b_rank - a_rank for (a_rank, a_slot), (b_rank, b_slot) in pairwise(places))


def _shown(groups: dict[Agreement, dict[int, Register]]) -> str:
    largest = sorted(groups.items(), key=lambda entry: -len(entry[1]))[:4]
    return "; ".join(
        f"{len(members)} of {one.world_size} report generation {one.generation} of job {one.job}"
        for one, members in largest
    )
