"""Decide what to do if ranks that must be equal differ: roll all ranks back, or end the job.

A bit that flipped on one rank reaches all others in the next all-reduce. Nothing that was computed since is reliable on
any rank, but the last state at which all ranks were equal is. A transient fault does not repeat exactly the same wrong
value. A permanent fault, such as a stuck bit, and an error of the script do, but only the latter repeats it on another
worker. A worker that repeats it is therefore replaced, if possible, before the script is blamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from samebits.core.causes.table import CauseClass, LossDetection, Observation
from samebits.core.ledger import Ledger, Member, Trust, ask_to_leave
from samebits.core.messages import Activity
from samebits.core.point import Point
from samebits.core.records import RolledBack
from samebits.core.reports import FINAL
from samebits.core.watch.equality import NAMED_PARTS, Judgement, RankDifference, differs, ranks_of, sentence
from samebits.printable import counted, listed

MOST_AT_ONE_STEP = 3
"""Ranks that differ this often at one step will not become equal there, unless one worker is at fault and leaves."""
DRAINED_AT = 2
"""A node whose state differed this often is asked to leave."""
_STOP = "no rollback (CONSISTENCY=stop)"
_NO_DEVICE = ", so it is not a device fault"
_OTHER_STEPS = "it made more or fewer steps than the others, as under a condition that not every rank meets"
MOST_REPAIRS = 64
"""Number of recent repairs that are remembered."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A difference because of which all ranks were rolled back."""

    step: int  # the step at which the difference was seen
    equal: int  # the last step before it at which all ranks were equal
    values: Mapping[int, bytes]  # digests of the ranks that were not trusted
    members: Mapping[int, Member] = field(default_factory=dict)  # their processes


@dataclass(frozen=True, slots=True)
class GoBack:
    """Decision: all ranks roll back to ``to``. If ``suspects`` are known, they copy that state from the others.

    If no group is larger than all others together, none is suspected: each rank rolls back to its own copy.
    """

    to: Point
    suspects: tuple[int, ...]
    replaces: bool = False  # the suspects differed again after a rollback, and are asked to leave at once


@dataclass(frozen=True, slots=True)
class Stop:
    """Decision: the difference cannot be repaired, for this reason; "" if the ranks were never equal after a step.

    If ``fix`` is not empty, a device or the script is at fault, and the fix applies if it is a device.
    """

    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """The processes of the ranks, and whether they can be replaced.

    Attributes:
        members: rank → its process.
        room: how many members the others can continue without.
        has_lost_state: whether a recovery has lost values of the script, which explain the difference.
    """

    members: Mapping[int, Member] = field(default_factory=dict)
    room: int = 0
    has_lost_state: bool = False


_UNKNOWN = RankProcesses()


def decide(
    found: RankDifference,
    trust: Trust,
    repairs: Sequence[Repair] = (),
    origins: Mapping[int, Member] | None = None,
    processes: RankProcesses = _UNKNOWN,
) -> GoBack | Stop:
    """Decide how to handle a difference, given the repairs made so far.

    Without a majority, no group needs to be trusted: every rank's copy was found equal when it was made. If ranks have
    been equal only before their first step, the script is the likely cause.

    Args:
        found: the difference.
        trust: which ranks are trusted.
        repairs: the repairs in this job so far.
        origins: rank → the member whose state it holds; by default itself.
        processes: the processes of the ranks; by default none is known, and none can be replaced.
    """
    judgement, equal = found.judgement, found.equal
    if equal is None or trust is Trust.STOP:
        was_equal = equal is not None and equal.step > 0 and trust is Trust.STOP
        return Stop(_STOP if was_equal else "")
    believed = _believed(judgement, trust, origins or {})
    if believed is None and equal == Point(0, found.one.point.generation):
        return Stop("")
    groups = () if believed is None else judgement.groups
    suspects = tuple(sorted(rank for group in groups if group is not believed for rank in group))
    repeated = _repeated(found, {rank: found.values[rank] for rank in suspects or found.values}, repairs)
    to = found.held or equal
    if repeated is None:
        return GoBack(to, suspects)
    is_by_majority = believed == _believed(judgement, Trust.MAJORITY, origins or {})
    why = _why_not(found, suspects if is_by_majority else (), repeated, processes)
    is_bounded = sum(repair.step == found.step for repair in repairs) < MOST_AT_ONE_STEP
    can_replace = is_by_majority and 0 < len(suspects) <= processes.room
    return GoBack(to, suspects, replaces=True) if why.fix and can_replace and is_bounded else why


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A difference after a rollback that did not help."""

    why: str
    script: str  # the conclusion, unless the same worker may have caused both
    earlier: Sequence[Repair]  # the repairs that did not help


def _repeated(found: RankDifference, values: Mapping[int, bytes], repairs: Sequence[Repair]) -> _Repeated | None:
    """Return how the difference shows that rolling back did not help, or None."""
    before = [repair for repair in repairs if repair.step == found.step]
    if same := [repair for repair in before if repair.values == values]:
        return _Repeated("the same difference appeared again after the rollback", _NO_DEVICE, same)
    if repairs and found.step <= repairs[-1].equal:
        return _Repeated("the ranks differed at an earlier step after the rollback", _NO_DEVICE, repairs[-1:])
    if len(before) + 1 >= MOST_AT_ONE_STEP:
        return _Repeated(f"the ranks differed at the same step again after {len(before)} rollbacks", "", before)
    return None


def _why_not(found: RankDifference, suspects: Sequence[int], repeated: _Repeated, processes: RankProcesses) -> Stop:
    """Return why another rollback would not help, with a fix if a device may be at fault.

    A node counts as the same worker after a restart of its process, because it usually has the same device.

    Args:
        found: the difference.
        suspects: ranks that differ from a majority; empty: it is unknown which rank is wrong.
        repeated: the rollbacks that did not help.
        processes: the processes of the ranks.
    """
    why = repeated.why
    if found.is_of_steps or processes.has_lost_state:
        return Stop(why + repeated.script)
    if not suspects:
        return Stop(f"{why}, by a permanent fault of a device or by the script", "resume on other hosts")
    nodes = {rank: member[0] for rank, member in processes.members.items()}
    then = [{rank: repair.members[rank][0] for rank in repair.members} for repair in repeated.earlier]
    if any(before.get(rank) not in (None, nodes.get(rank)) for before in then for rank in suspects):
        return Stop(f"{why}{' on another worker' if repeated.script else ''}{repeated.script}")
    if any(rank not in before for before in then for rank in suspects):
        return Stop(why + repeated.script)
    named = f"worker {', '.join(nodes[rank] for rank in suspects[:NAMED_PARTS])}"
    whose, hosts = (f"{named}'s device", "that host") if len(suspects) == 1 else (f"devices of {named}", "their hosts")
    fix = f"resume with a spare on another host (SPARE_NUM) or without {hosts}"
    return Stop(f"{why}, by a permanent fault of {whose}, such as a stuck bit, or by the script", fix)


def _believed(judgement: Judgement, trust: Trust, origins: Mapping[int, Member]) -> tuple[int, ...] | None:
    """Return the group of ranks whose state is trusted, or None."""
    if trust is Trust.LEADER:
        return min(judgement.groups)  # with rank 0 or, among those that hold other shards, the first replica
    witnesses = {group: len({origins.get(rank, rank) for rank in group}) for group in judgement.groups}
    most = max(witnesses, key=witnesses.__getitem__)
    return most if 2 * witnesses[most] > sum(witnesses.values()) else None


def _roll_back_to(to: Point, furthest: int) -> str:
    again = furthest - to.step
    repeated = counted(again, "step") if again else "no step"
    return f"all ranks roll back to step {to.step}, where all were equal, and repeat {repeated}"


def _apart(groups: Sequence[tuple[int, ...]]) -> str:
    """Describe groups of ranks none of which is a majority."""
    if len(groups) == 2:
        return f"{ranks_of(groups[0])} {differs(groups[0])} from {ranks_of(groups[1])}"
    return f"{listed(map(ranks_of, groups), NAMED_PARTS)} differ from each other"


def _last_words(text: str, stop: Stop) -> str:
    """Return the description of a difference, with the reason why it is not repaired."""
    if not stop.fix:
        return f"{text}. Not repaired: {stop.why}" if stop.why else text
    what, _, script = text.partition(": most likely ")  # the cause if the script is at fault
    there = f"most likely {script}" if script else "correct the script"
    what = what.partition(". Fix: ")[0]
    return f"{what}. Not repaired: {stop.why}. Fix: {stop.fix}; if it appears there too, {there}"


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
        trust = self._trust
        since = 0 if found.equal is None else found.equal.generation
        origins = {} if committed is None else ledger.witnesses.origins(committed.members, since)
        lost = hidden_state if committed is not None and committed.generation > 1 and not found.is_of_steps else ""
        members = {} if committed is None else dict(enumerate(committed.members))
        decision = decide(found, trust, self._repairs, origins, RankProcesses(members, self._room(), bool(lost)))
        if isinstance(decision, Stop) or committed is None:
            text = sentence(found.judgement, found.one, found.other, lost)
            return _last_words(text, decision) if isinstance(decision, Stop) else text
        values = {rank: found.values[rank] for rank in decision.suspects or found.values}
        repair = Repair(found.step, (found.equal or decision.to).step, values, {rank: members[rank] for rank in values})
        self._repairs = [*self._repairs, repair][-MOST_REPAIRS:]
        # a rank that only copied the value is not to blame
        nodes = [committed.members[rank][0] for rank in decision.suspects if origins[rank] == committed.members[rank]]
        text = self._text(found, decision, nodes, lost)
        suspects = tuple(committed.members[rank] for rank in decision.suspects)
        ledger.write(RolledBack(committed.generation, decision.to, suspects, found.step, text))
        ledger.announce(text)
        self._offences.update([] if lost else nodes)
        if decision.replaces:
            for node, _ in suspects:
                ask_to_leave(ledger, [node], f"worker {node} differed again after the rollback: it is asked to leave")
        else:
            self._drain([node for node in nodes if self._offences[node] >= DRAINED_AT])
        return ""

    def distrust(self, why: str, equal: Point) -> str:
        """Roll all ranks back after a mismatch of their collectives, or return why the job must end.

        A rank that left out a collective, or called one too many, was matched with another step of its peers. It may
        have committed a step with a gradient that is not the average of all, and no later point is reliable.

        Args:
            why: which ranks called which collectives.
            equal: the last point at which all ranks were equal and which all hold.
        """
        ledger, committed = self._ledger, self._ledger.state.generation
        assert committed is not None, "its members stand still"
        text = f"{why}: most likely a rank left out a collective, or called one too many"
        if self._trust is Trust.STOP:
            return f"{text}. Not repaired: {_STOP}"
        step = max(equal.step, self._furthest())
        text += f"; {_roll_back_to(equal, step)}"
        ledger.write(RolledBack(committed.generation, equal, (), step, text))
        ledger.announce(text)
        return ""

    @property
    def _trust(self) -> Trust:
        policy = self._ledger.policy
        return policy.trust if policy.recovery else Trust.STOP

    def _furthest(self) -> int:
        """Return the highest step that a member has reached."""
        committed = self._ledger.state.generation
        members = () if committed is None else committed.members
        return max((self._ledger.presences[node].step for node, _ in members), default=0)

    def _text(self, found: RankDifference, decision: GoBack, nodes: Sequence[str], lost: str) -> str:
        """Return a one-line message: which ranks differ, in what, since when, and how much is repeated."""
        ledger, committed = self._ledger, self._ledger.state.generation
        assert committed is not None, "they differ in one"
        row = ledger.policy.causes.of(Observation(notice=LossDetection.UNEQUAL))
        alike = tuple(rank for rank in sorted(found.values) if rank not in decision.suspects)
        who = ", ".join(f"worker {node}, {ledger.process_of(node)}" for node in nodes[:NAMED_PARTS])
        if odd := decision.suspects:
            what, whose = f"{ranks_of(odd)} ({who or 'of a lost worker'}) {differs(odd)} from {ranks_of(alike)}", ""
        else:
            what, whose = _apart(found.judgement.groups), ", and without a majority it is unknown which is wrong"
        at = f"at the end, step {found.step}" if found.one.commits == FINAL else f"after step {found.step}"
        first = found.first_part()
        begins = (found.equal or decision.to).step + 1
        since = f"since step {begins}" if begins == found.step else f"since some step from {begins} to {found.step}"
        since = "since that commit" if begins > found.step else since
        fault = (
            f"{_OTHER_STEPS} ({CauseClass.SOFTWARE.value})" if found.is_of_steps else f"{row.fault} ({row.cause.value})"
        )
        if lost:  # without the fix, which follows if the same difference recurs
            fault = f"most likely {lost.partition('. Fix')[0].partition(', and later')[0]}"
        first = f", first in {first}" if first else ""
        back = _roll_back_to(decision.to, max(self._furthest(), found.step))
        return f"{what} {at}{first}, {since}: {fault}{whose}; {back}"

    def _drain(self, nodes: Sequence[str]) -> None:
        """Ask nodes that differed repeatedly to leave, if the others can continue without them."""
        ledger, room = self._ledger, self._room()
        for at, node in enumerate(nodes):
            often = f"worker {node}'s state differed from the others' {self._offences[node]} times"
            if at < room:
                ask_to_leave(ledger, [node], f"{often}: it is asked to leave")
            else:
                ledger.announce(
                    f"{often}, but it keeps its rank, because no spare is ready to take its place. Fix: start a "
                    "spare on another host (SPARE_NUM), and stop this worker"
                )

    def _room(self) -> int:
        """Return how many members the others can continue without."""
        ledger, state = self._ledger, self._ledger.state
        spares = sum(
            presence.activity is Activity.WAITING and presence.closed_at is None
            for node in state.spares
            if (presence := ledger.presences.get(node)) is not None
        )
        sharding = None if state.generation is None else state.generation.sharding
        left_with_each = 1 if sharding is None else sharding.group_size  # its shard group leaves the generation, too
        dispensable = ledger.present() - ledger.policy.min_world_size if ledger.policy.is_elastic else 0
        return max(spares, dispensable // left_with_each)
