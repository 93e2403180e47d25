"""What is done where ranks that were equal are not any more: everybody goes back, or the job ends.

Here lives the decision on one difference, and what is remembered of earlier ones. Never here: who reported what and
what differs (``equality``), how a round goes back (``rendezvous``), what a rank keeps (``training``). The one idea: a
bit that has changed by itself in one rank has reached all others by the next all-reduce, so nothing that was made since
is to be relied on, whoever's it is; but where the ranks last were equal they all are right. What a device does once it
does not do again with the very same wrong value; what a script does, it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samebits.core.causes.table import CauseClass, Notice, Observation
from samebits.core.ledger import Ledger, Member, Mend
from samebits.core.membership.departures import ask_to_leave
from samebits.core.messages import Activity
from samebits.core.point import Point
from samebits.core.records import RolledBack
from samebits.core.reports import FINAL
from samebits.core.watch.equality import NAMED_PARTS, Difference, Judgement, ranks_of, sentence

MOST_AT_ONE_STEP = 3
"""Who differ at the same step so often will not be equal there."""
DRAINED_AT = 2
"""A node whose state was another's so often is asked to leave."""
_OTHER_STEPS = "it made more or fewer steps than the others, as under a condition that not every rank meets"
MOST_REPAIRS = 64
"""Of earlier ones, so many are remembered."""


@dataclass(frozen=True, slots=True)
class Repair:
    """One difference that everybody went back for: where it was seen, and with which values of whom."""

    step: int
    to: int  # the step that they went back to
    values: Mapping[int, bytes]  # of the ranks that were not believed


@dataclass(frozen=True, slots=True)
class GoBack:
    """Everybody goes back to ``to``; the ranks in ``suspects``, if anybody knows them, take it from the others."""

    to: Point
    suspects: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing of it can be mended, for this reason; empty where the ranks were never equal after a step."""

    why: str


def decide(
    found: Difference, mends: Mend, repairs: Sequence[Repair] = (), origins: Mapping[int, Member] | None = None
) -> GoBack | Stop:
    """What is done about a difference: a function of what was reported, and of what was done before.

    Where a generation has begun since all were equal, a rank that knew better may be lost: then nobody needs to be
    believed for all to go back, each to what it has kept itself.

    Args:
        found: the difference.
        mends: who is believed.
        repairs: of this job so far.
        origins: whose state each rank holds; by default its own.
    """
    judgement, equal = found.judgement, found.equal
    if equal is None or mends is Mend.STOP:
        was_equal = equal is not None and equal.step > 0 and mends is Mend.STOP
        return Stop("nobody goes back (CONSISTENCY=stop)" if was_equal else "")
    believed = _believed(judgement, mends, origins or {})
    if believed is None and equal.generation == found.one.point.generation:
        return Stop(f"no majority: {_against(judgement)}, and nobody knows who is right" if equal.step else "")
    groups = () if believed is None else judgement.groups
    suspects = tuple(sorted(rank for group in groups if group is not believed for rank in group))
    values = {rank: found.values[rank] for rank in suspects or found.values}
    before = [repair for repair in repairs if repair.step == found.step]
    if any(repair.values == values for repair in before):
        return Stop("after everybody went back the same came out: it is no device that failed")
    if repairs and found.step <= repairs[-1].to:
        return Stop("after everybody went back they differ there already: it is no device that failed")
    if len(before) + 1 >= MOST_AT_ONE_STEP:
        return Stop(f"everybody went back {len(before)} times and differed at the same step again")
    return GoBack(equal, suspects)


def _believed(judgement: Judgement, mends: Mend, origins: Mapping[int, Member]) -> tuple[int, ...] | None:
    """The group whose state stands; None where there is none."""
    if mends is Mend.LEADER:
        return next(group for group in judgement.groups if 0 in group)
    witnesses = {group: len({origins.get(rank, rank) for rank in group}) for group in judgement.groups}
    most = max(witnesses, key=witnesses.__getitem__)
    return most if 2 * witnesses[most] > sum(witnesses.values()) else None


def _against(judgement: Judgement) -> str:
    shown = " against ".join(map(ranks_of, judgement.groups[:NAMED_PARTS]))
    more = len(judgement.groups) - NAMED_PARTS
    return f"{shown} and {more} more groups" if more > 0 else shown


class Consistency:
    """Of one scheduler start: decides, and remembers whose state has differed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._repairs: list[Repair] = []
        self._offences: Counter[str] = Counter()  # by node

    def judge(self, found: Difference) -> str:
        """Have everybody go back, which is written down and said; why the job must end, where that cannot be."""
        ledger, committed = self._ledger, self._ledger.state.generation
        mends = ledger.policy.mends if ledger.policy.recovery else Mend.STOP
        since = 0 if found.equal is None else found.equal.generation
        origins = {} if committed is None else ledger.witnesses.origins(committed.members, since)
        decision = decide(found, mends, self._repairs, origins)
        if isinstance(decision, Stop) or committed is None:
            why = decision.why if isinstance(decision, Stop) else ""
            return f"{sentence(found.judgement, found.one, found.other)}{f'. Not mended: {why}' if why else ''}"
        values = {rank: found.values[rank] for rank in decision.suspects or found.values}
        self._repairs = [*self._repairs, Repair(found.step, decision.to.step, values)][-MOST_REPAIRS:]
        # Who only has the value from another is not to blame for it.
        nodes = [committed.members[rank][0] for rank in decision.suspects if origins[rank] == committed.members[rank]]
        text = self._text(found, decision, nodes)
        suspects = tuple(committed.members[rank] for rank in decision.suspects)
        ledger.write(RolledBack(committed.generation, decision.to, suspects, found.step, text))
        ledger.announce(text)
        self._offences.update(nodes)
        self._drain([node for node in nodes if self._offences[node] >= DRAINED_AT])
        return ""

    def _text(self, found: Difference, decision: GoBack, nodes: Sequence[str]) -> str:
        """In one line: who, what, since when, and what is done again."""
        ledger, committed = self._ledger, self._ledger.state.generation
        assert committed is not None, "they differ in one"
        row = ledger.policy.causes.of(Observation(notice=Notice.UNEQUAL))
        alike = tuple(rank for rank in sorted(found.values) if rank not in decision.suspects)
        who = ", ".join(f"worker {node}, {ledger.process_of(node)}" for node in nodes[:NAMED_PARTS])
        what, whose = f"{ranks_of(decision.suspects)} ({who or 'of a lost worker'}) differs from {ranks_of(alike)}", ""
        if not decision.suspects:
            what = " differs from ".join(map(ranks_of, found.judgement.groups[:NAMED_PARTS]))
            whose = ", and whoever could tell which is lost"
        at = f"at the end, step {found.step}" if found.one.commits == FINAL else f"after step {found.step}"
        first = found.first_part()
        begins = decision.to.step + 1
        since = f"since step {begins}" if begins == found.step else f"since some step from {begins} to {found.step}"
        since = "since that commit" if begins > found.step else since
        furthest = max((ledger.presences[node].step for node, _ in committed.members), default=0)
        again = max(furthest, found.step) - decision.to.step
        redone = "1 step is" if again == 1 else f"{again or 'no'} steps are"
        fault = (
            f"{_OTHER_STEPS} ({CauseClass.SOFTWARE.value})" if found.is_of_steps else f"{row.fault} ({row.cause.value})"
        )
        return (
            f"{what} {at}{f', first in {first}' if first else ''}, {since}: {fault}{whose}; "
            f"everybody goes back to step {decision.to.step}, where all were equal, and {redone} done again"
        )

    def _drain(self, nodes: Sequence[str]) -> None:
        """Whose state was another's before, too, leaves where the others can go on without it."""
        ledger, state = self._ledger, self._ledger.state
        spares = sum(
            presence.activity is Activity.WAITING and presence.closed_at is None
            for node in state.spares
            if (presence := ledger.presences.get(node)) is not None
        )
        room = max(spares, ledger.present() - ledger.policy.min_world_size if ledger.policy.is_elastic else 0)
        for at, node in enumerate(nodes):
            often = f"worker {node}'s state was another than the others' {self._offences[node]} times"
            if at < room:
                ask_to_leave(ledger, [node], f"{often}: it is asked to leave")
            else:
                ledger.announce(
                    f"{often}, and it stays: no spare is warm to take its place. Fix: start a spare on another host "
                    "(SPARE_NUM), and stop this worker"
                )
