"""Decide what to do if ranks that must be equal differ: roll all ranks back, or end the job.

A bit that flipped on one rank reaches all others in the next all-reduce. Nothing that was computed since is reliable on
any rank, but the last state at which all ranks were equal is. A device fault does not repeat exactly the same wrong
value, whereas an error of the script does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samebits.core.causes.table import CauseClass, LossDetection, Observation
from samebits.core.ledger import Ledger, Member, Trust, ask_to_leave
from samebits.core.messages import Activity
from samebits.core.point import Point
from samebits.core.records import RolledBack
from samebits.core.reports import FINAL
from samebits.core.watch.equality import NAMED_PARTS, Judgement, RankDifference, ranks_of, sentence

MOST_AT_ONE_STEP = 3
"""Ranks that differ this often at one step will not become equal there."""
DRAINED_AT = 2
"""A node whose state differed this often is asked to leave."""
_OTHER_STEPS = "it made more or fewer steps than the others, as under a condition that not every rank meets"
MOST_REPAIRS = 64
"""Number of recent repairs that are remembered."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A difference because of which all ranks were rolled back."""

    step: int  # the step at which the difference was seen
    to: int  # the step to which all ranks rolled back
    values: Mapping[int, bytes]  # digests of the ranks that were not trusted


@dataclass(frozen=True, slots=True)
class GoBack:
    """Decision: all ranks roll back to ``to``. If ``suspects`` are known, they copy that state from the others.

    If no group is larger than all others together, none is suspected: each rank rolls back to its own copy.
    """

    to: Point
    suspects: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Decision: the difference cannot be repaired, for this reason; "" if the ranks were never equal after a step."""

    why: str


def decide(
    found: RankDifference, trust: Trust, repairs: Sequence[Repair] = (), origins: Mapping[int, Member] | None = None
) -> GoBack | Stop:
    """Decide how to handle a difference, given the repairs made so far.

    Without a majority, no group needs to be trusted: every rank's copy was found equal when it was made. If ranks have
    been equal only before their first step, the script is the likely cause.

    Args:
        found: the difference.
        trust: which ranks are trusted.
        repairs: the repairs in this job so far.
        origins: rank → the member whose state it holds; by default itself.
    """
    judgement, equal = found.judgement, found.equal
    if equal is None or trust is Trust.STOP:
        was_equal = equal is not None and equal.step > 0 and trust is Trust.STOP
        return Stop("no rollback (CONSISTENCY=stop)" if was_equal else "")
    believed = _believed(judgement, trust, origins or {})
    if believed is None and equal == Point(0, found.one.point.generation):
        return Stop("")
    groups = () if believed is None else judgement.groups
    suspects = tuple(sorted(rank for group in groups if group is not believed for rank in group))
    values = {rank: found.values[rank] for rank in suspects or found.values}
    before = [repair for repair in repairs if repair.step == found.step]
    if any(repair.values == values for repair in before):
        return Stop("the same difference appeared again after the rollback, so it is not a device fault")
    if repairs and found.step <= repairs[-1].to:
        return Stop("the ranks differed at an earlier step after the rollback, so it is not a device fault")
    if len(before) + 1 >= MOST_AT_ONE_STEP:
        return Stop(f"the ranks differed at the same step again after {len(before)} rollbacks")
    return GoBack(found.held or equal, suspects)


def _believed(judgement: Judgement, trust: Trust, origins: Mapping[int, Member]) -> tuple[int, ...] | None:
    """Return the group of ranks whose state is trusted, or None."""
    if trust is Trust.LEADER:
        return min(judgement.groups)  # with rank 0 or, among those that hold other shards, the first replica
    witnesses = {group: len({origins.get(rank, rank) for rank in group}) for group in judgement.groups}
    most = max(witnesses, key=witnesses.__getitem__)
    return most if 2 * witnesses[most] > sum(witnesses.values()) else None


class ConsistencyJudge:
    """Decides what to do about differences, and counts them per node, since the scheduler started."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._repairs: list[Repair] = []
        self._offences: Counter[str] = Counter()  # by node: how often its state differed

    def judge(self, found: RankDifference, hidden_state: str = "") -> str:
        """Roll all ranks back and log it, or return why the job must end.

        Args:
            found: the difference.
            hidden_state: the last report of hidden state.
        """
        ledger, committed = self._ledger, self._ledger.state.generation
        trust = ledger.policy.trust if ledger.policy.recovery else Trust.STOP
        since = 0 if found.equal is None else found.equal.generation
        origins = {} if committed is None else ledger.witnesses.origins(committed.members, since)
        decision = decide(found, trust, self._repairs, origins)
        lost = hidden_state if committed is not None and committed.generation > 1 and not found.is_of_steps else ""
        if isinstance(decision, Stop) or committed is None:
            why = decision.why if isinstance(decision, Stop) else ""
            text = sentence(found.judgement, found.one, found.other, lost)
            return f"{text}{f'. Not repaired: {why}' if why else ''}"
        values = {rank: found.values[rank] for rank in decision.suspects or found.values}
        self._repairs = [*self._repairs, Repair(found.step, decision.to.step, values)][-MOST_REPAIRS:]
        # a rank that only copied the value is not to blame
        nodes = [committed.members[rank][0] for rank in decision.suspects if origins[rank] == committed.members[rank]]
        text = self._text(found, decision, nodes, lost)
        suspects = tuple(committed.members[rank] for rank in decision.suspects)
        ledger.write(RolledBack(committed.generation, decision.to, suspects, found.step, text))
        ledger.announce(text)
        self._offences.update([] if lost else nodes)
        self._drain([node for node in nodes if self._offences[node] >= DRAINED_AT])
        return ""

    def _text(self, found: RankDifference, decision: GoBack, nodes: Sequence[str], lost: str) -> str:
        """Return a one-line message: which ranks differ, in what, since when, and how much is repeated."""
        ledger, committed = self._ledger, self._ledger.state.generation
        assert committed is not None, "they differ in one"
        row = ledger.policy.causes.of(Observation(notice=LossDetection.UNEQUAL))
        alike = tuple(rank for rank in sorted(found.values) if rank not in decision.suspects)
        who = ", ".join(f"worker {node}, {ledger.process_of(node)}" for node in nodes[:NAMED_PARTS])
        what, whose = f"{ranks_of(decision.suspects)} ({who or 'of a lost worker'}) differs from {ranks_of(alike)}", ""
        if not decision.suspects:
            what = " differs from ".join(map(ranks_of, found.judgement.groups[:NAMED_PARTS]))
            whose = ", and without a majority it is unknown which is wrong"
        at = f"at the end, step {found.step}" if found.one.commits == FINAL else f"after step {found.step}"
        first = found.first_part()
        begins = (found.equal or decision.to).step + 1
        since = f"since step {begins}" if begins == found.step else f"since some step from {begins} to {found.step}"
        since = "since that commit" if begins > found.step else since
        furthest = max((ledger.presences[node].step for node, _ in committed.members), default=0)
        again = max(furthest, found.step) - decision.to.step
        redone = "1 step" if again == 1 else f"{again or 'no'} steps"
        fault = (
            f"{_OTHER_STEPS} ({CauseClass.SOFTWARE.value})" if found.is_of_steps else f"{row.fault} ({row.cause.value})"
        )
        if lost:  # without the fix, which follows if the same difference recurs
            fault = f"most likely {lost.partition('. Fix')[0].partition(', and later')[0]}"
        return (
            f"{what} {at}{f', first in {first}' if first else ''}, {since}: {fault}{whose}; "
            f"all ranks roll back to step {decision.to.step}, where all were equal, and repeat {redone}"
        )

    def _drain(self, nodes: Sequence[str]) -> None:
        """Ask nodes that differed repeatedly to leave, if the others can continue without them."""
        ledger, state = self._ledger, self._ledger.state
        spares = sum(
            presence.activity is Activity.WAITING and presence.closed_at is None
            for node in state.spares
            if (presence := ledger.presences.get(node)) is not None
        )
        sharding = None if state.generation is None else state.generation.sharding
        left_with_each = 1 if sharding is None else sharding.group_size  # its shard group leaves the generation, too
        dispensable = ledger.present() - ledger.policy.min_world_size if ledger.policy.is_elastic else 0
        room = max(spares, dispensable // left_with_each)
        for at, node in enumerate(nodes):
            often = f"worker {node}'s state differed from the others' {self._offences[node]} times"
            if at < room:
                ask_to_leave(ledger, [node], f"{often}: it is asked to leave")
            else:
                ledger.announce(
                    f"{often}, but it keeps its rank, because no spare is ready to take its place. Fix: start a "
                    "spare on another host (SPARE_NUM), and stop this worker"
                )
