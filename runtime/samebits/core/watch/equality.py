"""Compare the digests that the ranks report for their states, and describe differences.

A digest has only a few bytes, so every rank reports it and none waits. One digest must be equal on all ranks, another
on the ranks that hold the same shards. Only if digests differ are two ranks asked for the parts from which the digests
were computed. ``training.state.compared`` defines what is hashed, and ``consistency`` decides what follows from a
difference. ``judge`` and ``sentence`` are pure functions of the reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from samebits.core.ledger import Ledger
from samebits.core.messages import EqualPoint, Explain, ReportEnvelope
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted
from samebits.core.reports import FINAL, Digest, Digests, Part, PartKind
from samebits.core.state import Seat, is_on_line
from samebits.printable import listed

EXPLAIN_S = 2.0
"""Seconds to wait for the parts of two digests before the job ends without naming the difference."""
NAMED_PARTS = 8
MOST_EQUAL = 16
"""Number of recent equal commits that are remembered."""

Key: TypeAlias = tuple[Point, int]
"""A commit: its point, and its number among several commits after one step."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Groups of ranks with equal values, the largest first. Groups of equal size are ordered by lowest rank."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def is_equal(self) -> bool:
        """Return whether all ranks agree."""
        return len(self.groups) <= 1

    @property
    def has_majority(self) -> bool:
        """Return whether more than half of the ranks agree."""
        return 2 * len(self.groups[0]) > sum(map(len, self.groups)) if self.groups else False


def judge(values: Mapping[int, bytes]) -> Judgement:
    """Group the ranks by value."""
    groups: dict[bytes, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return Judgement(tuple(sorted(map(tuple, groups.values()), key=lambda group: (-len(group), group[0]))))


@dataclass(frozen=True, slots=True)
class RankDifference:
    """Ranks whose states differ after a commit.

    Attributes:
        judgement: which ranks agree, of those in ``values``.
        one, other: digests of one rank from each of the first two groups, with parts if those arrived in time.
        values: the digests of all ranks, or of all ranks with the same shards, by rank.
        equal: the last earlier point at which all ranks were equal, or None.
        held: the last such point that is held by all ranks: a copy that each keeps, or a checkpoint; None: ``equal``.
    """

    judgement: Judgement
    one: Digest
    other: Digest
    values: Mapping[int, bytes]
    equal: Point | None
    held: Point | None = None

    @property
    def step(self) -> int:
        """Return the step at which the difference was found."""
        return max(self.one.point.step, self.other.point.step)

    @property
    def is_apart(self) -> bool:
        """Return whether the ranks reached the same step after different numbers of commits."""
        return self.one.commits != self.other.commits

    def first_part(self) -> str:
        """Return a phrase about the first part that differs, or "" if no parts arrived in time."""
        mine, theirs = (f"rank {group[0]}" for group in self.judgement.groups[:2])
        if self.is_apart:
            return f"the number of commits ({self.one.commits} on {mine}, {self.other.commits} on {theirs})"
        return _first_of(_that_matter(self.one, self.other), mine, theirs)

    @property
    def is_of_steps(self) -> bool:
        """Return whether ranks made different numbers of steps, so that no device is at fault."""
        first = _that_matter(self.one, self.other)[:1]
        return self.is_apart or any(part.kind is PartKind.STEPS for part, _ in first)


def differences(one: Iterable[Part], other: Iterable[Part]) -> list[tuple[Part, Part | None]]:
    """Return the parts that differ, most important first, each with the other rank's part or None."""
    theirs = {(part.kind, part.name): part for part in other}
    found = [(part, theirs.pop((part.kind, part.name), None)) for part in one]
    found += [(part, None) for part in theirs.values()]
    return sorted((pair for pair in found if pair[0] != pair[1]), key=lambda pair: _ORDER.index(pair[0].kind))


_ORDER = sorted(PartKind, key=lambda kind: 2.5 if kind is PartKind.SETTING else float(kind))
"""Order in which differences are named: causes before their effects."""


def sentence(judgement: Judgement, one: Digest, other: Digest, hidden_state: str = "") -> str:
    """Describe a difference: the ranks, the first part, the likely cause and a fix.

    Args:
        judgement, one, other: as in :class:`RankDifference`.
        hidden_state: the report of hidden state, with its fix, if a recovery has lost some.
    """
    alike, *odd = judgement.groups
    mine, theirs = f"rank {alike[0]}", f"rank {odd[0][0]}"
    where = f"at the end, step {one.point.step}" if one.commits == FINAL else f"after step {one.point.step}"
    if one.point.step != other.point.step:
        where = f"at the end, step {one.point.step} on {mine} and {other.point.step} on {theirs}"
    ranks = "; ".join(ranks_of(group) for group in odd[:NAMED_PARTS])
    differ = differs(rank for group in odd for rank in group)
    text = f"the ranks are not equal {where}: {ranks} {differ} from {ranks_of(alike)}"
    if one.commits != other.commits:
        apart = f"{one.commits} commits on {mine}, {other.commits} on {theirs}"
        return f"{text} ({apart}): {_cause(Part(PartKind.STEPS, '', ''), averages=True)}"
    found = _that_matter(one, other)
    if not found and hidden_state:
        return f"{text}: most likely {hidden_state}"
    if not found:
        return f"{text}. {_FIXES[PartKind.TRAINED]}"
    first = _first_of(found, mine, theirs)
    if hidden_state and found[0][0].kind in (PartKind.TRAINED, PartKind.SHARD):
        return f"{text}, first in {first}: most likely {hidden_state}"
    return f"{text}, first in {first}: {_cause(found[0][0], averages=one.averages and other.averages)}"


def _that_matter(one: Digest, other: Digest) -> list[tuple[Part, Part | None]]:
    """Return the parts that differ although they must be equal, or [] if the parts did not arrive in time."""
    if not (one.parts and other.parts):
        return []
    ignored = {PartKind.LOOSE} if one.key == other.key else {PartKind.LOOSE, PartKind.SHARD}
    return [pair for pair in differences(one.parts, other.parts) if pair[0].kind not in ignored]


def _first_of(found: Sequence[tuple[Part, Part | None]], mine: str, theirs: str) -> str:
    """Return a text such as ``completed_steps (3 on rank 0, 4 on rank 1) and 1 more``, or "" if nothing was found."""
    if not found:
        return ""
    part, its = found[0]
    is_shown = part.kind in (PartKind.STEPS, PartKind.SAMPLER, PartKind.SETTING)
    values = f" ({part.value} on {mine}, {its.value} on {theirs})" if is_shown and its is not None else ""
    return f"{part.name}{values}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")


def ranks_of(group: Sequence[int]) -> str:
    """Return ``rank 0``, ``ranks 0 and 2`` or, of many, ``ranks 0, 2 and 5 more``."""
    return f"{'rank' if len(group) == 1 else 'ranks'} {listed(group, NAMED_PARTS)}"


def differs(ranks: Iterable[int]) -> str:
    """Return the verb for these ranks."""
    return "differs" if len([*ranks]) == 1 else "differ"


_LOST = "a rank has lost a value outside the state, or used a gradient that is not the average of all ranks'"
_MEANT = (
    "If ranks are meant to differ, as in expert parallelism, make these parameters DTensors "
    "(docs/reference/sharded-models.md)"
)
_FIX_OF_LOST = (
    "Fix: find such values with `samebits run --check` and keep them in TorchState(…), or average every gradient "
    "before optimizer.step()"
)
_FIXES = {
    PartKind.SETTING: (
        "Fix: set it to the same value on every rank; if a schedule sets it, pass the schedule to the state, as in "
        "TorchState(model, optimizer, schedule=schedule)"
    ),
    PartKind.STEPS: "Fix: let every rank take as many optimizer steps as the others",
    PartKind.SAMPLER: "Fix: take the same number of batches on every rank, also from a loader or generator that may "
    "end early, and move an ElasticSampler only by record_batch() and, to the next epoch, set_epoch()",
    PartKind.TRAINED: (
        "Fix: wrap the model in DistributedDataParallel before samebits.elastic.run, or all-reduce every gradient "
        f"before optimizer.step(). {_MEANT}"
    ),
    PartKind.UNTRAINED: "Fix: change this parameter alike on every rank, or make it a buffer",
    PartKind.SHARED: "Fix: make it equal in the state's sync(), or leave it out of shared_values()",
    PartKind.SHARD: _FIX_OF_LOST,
}


_NOT_AVERAGED = "no DistributedDataParallel is in use and no collective has made the gradients equal"


def _cause(part: Part, *, averages: bool) -> str:
    cause = {
        PartKind.STEPS: "a rank has stepped without the others",
        PartKind.SAMPLER: "the ranks took different numbers of batches, or code outside the state has moved a sampler",
        PartKind.SETTING: "something outside the state sets it, such as a learning-rate schedule",
        PartKind.UNTRAINED: "this parameter is in no optimizer of the state, and something else changes it",
        PartKind.SHARED: "the state marks it as shared",
        PartKind.SHARD: _LOST,
    }.get(part.kind, "")
    fix = _FIXES[PartKind.TRAINED if part.kind is PartKind.LOOSE else part.kind]
    if not cause and averages:
        cause, fix = _LOST, f"{_FIX_OF_LOST}. {_MEANT}"
    return f"most likely {cause or _NOT_AVERAGED}. {fix}"


@dataclass(slots=True)
class _Inquiry:
    """A request to two ranks for the parts of their digests."""

    judgement: Judgement
    nodes: tuple[str, str]
    digests: list[Digest]
    values: Mapping[int, bytes]
    until: float

    @property
    def is_answered(self) -> bool:
        """Return whether both ranks have sent their parts."""
        return all(digest.parts for digest in self.digests)


@dataclass(slots=True)
class _Tally:
    """The digests that were reported for one commit.

    Attributes:
        tellers: number of ranks that reported the commit.
        surplus: number of values beyond the first, over all subjects; 0: all that must be equal is equal.
    """

    tellers: int = 0
    surplus: int = 0
    _values: dict[tuple[int, ...] | None, Counter[bytes]] = field(default_factory=dict)  # by key; None: of all ranks

    def add(self, digest: Digest) -> None:
        """Count a rank's digest."""
        self.tellers += 1
        for subject, value in _claims(digest):
            values = self._values.setdefault(subject, Counter())
            self.surplus += bool(values) and value not in values
            values[value] += 1

    def remove(self, digest: Digest) -> None:
        """Count a rank's digest no longer."""
        self.tellers -= 1
        for subject, value in _claims(digest):
            values = self._values[subject]
            values[value] -= 1
            if not values[value]:
                del values[value]
                self.surplus -= bool(values)


def _claims(digest: Digest) -> Iterator[tuple[tuple[int, ...] | None, bytes]]:
    """Yield what must be equal: on all ranks, and on all ranks with the digest's key."""
    yield None, digest.shared
    if digest.held:
        yield digest.key, digest.held


class Equality:
    """The digests of the last generation's members."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counted: GenerationCommitted | None = None  # the generation that digests are counted for
        self._rank_of: dict[tuple[str, int], int] = {}  # of its members
        self._told: dict[tuple[str, int], dict[Key, Digest]] = {}  # (node, incarnation) → last reported digests
        self._tallies: dict[Key, _Tally] = {}
        self._kept: Counter[Point] = Counter()  # how many keep a copy of each point
        self._differs: _Inquiry | None = None  # the first difference found
        self._may_differ: _Inquiry | None = None  # the first among values that may differ
        self.odd_values = ""  # which values differ on one rank, and since when; "": none seen
        self._equal: dict[Key, bool] = {}  # commits at which all were equal, ascending: whether all keep a copy

    def take(self, seat: Seat, body: Digests, said: ReportEnvelope) -> None:
        """Record a member's digests."""
        state = self._ledger.state
        committed, teller = state.generation, (seat.node, seat.incarnation)
        if committed is None or state.rolled_back is not None:  # digests now are still from the abandoned line
            return
        self._count_for(committed)
        if teller not in self._rank_of:
            return
        self._discount(self._told.get(teller, {}))
        digests = [one for one in body.digests if is_on_line(one.point, committed)]
        told = self._told[teller] = {_key(one): one for one in digests}
        self._count(told)
        self._hear_parts(seat.node, told)
        for key in told:
            if self._tallies[key].tellers == len(self._rank_of):
                self._compare(key)
        for key, one in told.items():
            if (
                one.is_kept
                and self._kept[key[0]] == len(self._rank_of) > self._tallies[key].tellers
                and not self._differs
            ):
                self._compare_numbers(key[0])

    def is_equal(self, point: Point) -> bool:
        """Return whether all members reported this point with equal digests."""
        keys = {key for told in self._told.values() for key in told if key[0] == point and key[1] != FINAL}
        return bool(keys) and all(self._is_equal(key) for key in keys)

    @property
    def is_final_equal(self) -> bool:
        """Return whether all members reported equal final states and no difference was found."""
        committed = self._ledger.state.generation
        return committed is not None and self._differs is None and self._is_equal(_final_key(committed.generation))

    @property
    def deadline(self) -> float | None:
        """Return when the wait for requested parts ends, or None."""
        waits = (one.until for one in (self._differs, self._may_differ) if one is not None)
        return min(waits, default=None)

    @property
    def is_in_question(self) -> bool:
        """Return whether a difference was found whose parts have not arrived yet."""
        return self._differs is not None

    def difference(self) -> RankDifference | None:
        """Return the first difference once its parts have arrived or the wait is over, otherwise None."""
        self._name_what_may_differ()
        found = self._differs
        if found is None or not (found.is_answered or found.until <= self._ledger.now):
            return None
        one, other = found.digests
        key = _key(one)
        return RankDifference(
            found.judgement, one, other, found.values, self._equal_before(key), self._equal_before(key, is_held=True)
        )

    def last_equal(self) -> Point | None:
        """Return the newest point on the line at which all ranks were equal and which all hold, or None."""
        return self._equal_before(_final_key(self._ledger.state.generation_number), is_held=True)

    def settle(self) -> None:
        """Forget all digests, because the difference has been handled."""
        self._differs = self._may_differ = None
        self._told.clear()
        self._tallies.clear()
        self._kept.clear()

    def _equal_before(self, key: Key, *, is_held: bool = False) -> Point | None:
        committed, known = self._ledger.state.generation, self._ledger.state.committed_point
        points = [
            one[0]
            for one, is_kept in self._equal.items()
            if (is_kept or not is_held) and (key[1] == FINAL or one[0] < key[0]) and is_on_line(one[0], committed)
        ]
        if known is not None and (key[1] == FINAL or known < key[0]):
            points.append(known)
        return max(points, default=None)

    def shift(self, gap_s: float) -> None:
        """Extend the wait for parts by the length of a pause of the scheduler."""
        for inquiry in (self._differs, self._may_differ):
            if inquiry is not None:
                inquiry.until = min(inquiry.until + gap_s, self._ledger.now + EXPLAIN_S)

    # ---- counting

    def _is_equal(self, key: Key) -> bool:
        tally = self._tallies.get(key)
        return tally is not None and tally.tellers == len(self._rank_of) and not tally.surplus

    def _count(self, told: Mapping[Key, Digest]) -> None:
        for key, one in told.items():
            self._tallies.setdefault(key, _Tally()).add(one)
        self._kept.update({key[0] for key, one in told.items() if one.is_kept})

    def _discount(self, told: Mapping[Key, Digest]) -> None:
        for key, one in told.items():
            tally = self._tallies[key]
            tally.remove(one)
            if not tally.tellers:
                del self._tallies[key]
        self._kept.subtract({key[0] for key, one in told.items() if one.is_kept})
        self._kept = +self._kept

    def _count_for(self, committed: GenerationCommitted) -> None:
        """Count again after the members have changed. Digests of members that remain are still valid."""
        if committed is self._counted:
            return
        self._counted = committed
        self._rank_of = {(node, incarnation): rank for rank, (node, incarnation) in enumerate(committed.members)}
        self._told = {
            teller: {key: one for key, one in told.items() if is_on_line(one.point, committed)}
            for teller, told in self._told.items()
            if teller in self._rank_of
        }
        self._tallies.clear()
        self._kept.clear()
        for told in self._told.values():
            self._count(told)
        self._equal = {key: is_kept for key, is_kept in self._equal.items() if is_on_line(key[0], committed)}
        for inquiry in (self._differs, self._may_differ):
            if inquiry is not None and not is_on_line(inquiry.digests[0].point, committed):
                self._differs = self._may_differ = None  # its line was abandoned
                break

    # ---- differences

    def _compare(self, key: Key) -> None:
        """Compare a commit that all members have reported."""
        told = {self._rank_of[teller]: digests[key] for teller, digests in self._told.items()}
        if self._is_equal(key):
            self._found_equal(key, told)
        if self._differs is None and not self._is_equal(key):
            self._differs = self._asked(told, *_unequal(told))
        elif self._differs is None and self._may_differ is None and not self.odd_values:
            judgement = judge({rank: one.loose for rank, one in told.items()})
            if not judgement.is_equal and all(one.loose for one in told.values()):
                self._may_differ = self._asked(told, judgement, {})

    def _found_equal(self, key: Key, told: Mapping[int, Digest]) -> None:
        """Remember an equal commit, and tell ranks that older copies in memory are no longer needed."""
        if key in self._equal or key[1] == FINAL:
            return
        self._equal[key] = all(one.is_kept for one in told.values())
        self._equal = dict(sorted(self._equal.items())[-MOST_EQUAL:])
        if self._differs is None and any(one.is_kept for one in told.values()):
            ledger, state = self._ledger, self._ledger.state
            message = EqualPoint(state.job, state.term, state.generation_number, key[0])
            for node, _ in self._rank_of:
                ledger.tell(node, message)

    def _compare_numbers(self, point: Point) -> None:
        """Compare the ranks' commit numbers at a point that all ranks have.

        The numbers differ if a rank has skipped a step.
        """
        told = {
            self._rank_of[teller]: one
            for teller, digests in self._told.items()
            for key, one in digests.items()
            if key[0] == point and one.is_kept
        }
        judgement = judge({rank: str(one.commits).encode() for rank, one in told.items()})
        if not judgement.is_equal:
            self._differs = self._asked(told, judgement, {rank: one.shared for rank, one in told.items()})

    def _asked(self, told: Mapping[int, Digest], judgement: Judgement, values: Mapping[int, bytes]) -> _Inquiry:
        ledger, nodes = self._ledger, {rank: node for (node, _), rank in self._rank_of.items()}
        ranks = judgement.groups[0][0], judgement.groups[1][0]
        inquiry = _Inquiry(
            judgement,
            (nodes[ranks[0]], nodes[ranks[1]]),
            [told[rank] for rank in ranks],
            values,
            ledger.now + EXPLAIN_S,
        )
        for node, one in zip(inquiry.nodes, inquiry.digests, strict=True):
            ledger.tell(node, Explain(ledger.state.job, ledger.state.term, one.point, one.commits))
        return inquiry

    def _hear_parts(self, node: str, told: Mapping[Key, Digest]) -> None:
        for inquiry in (self._differs, self._may_differ):
            if inquiry is None or node not in inquiry.nodes:
                continue
            at = inquiry.nodes.index(node)
            now = told.get(_key(inquiry.digests[at]))
            if now is not None and now.parts:
                inquiry.digests[at] = now

    def _name_what_may_differ(self) -> None:
        found = self._may_differ
        if found is None or not (found.is_answered or found.until <= self._ledger.now):
            return
        self._may_differ = None
        names = [part.name for part, _ in differences(found.digests[1].parts, found.digests[0].parts)]
        if not names:
            return  # not reported in time: a later commit may show the difference
        shown = ", ".join(names[:NAMED_PARTS])
        more = f" and {len(names) - NAMED_PARTS} more" if len(names) > NAMED_PARTS else ""
        alike, odd = found.judgement.groups[:2]
        step = found.digests[0].point.step
        self.odd_values = f"{ranks_of(odd)} {differs(odd)} from {ranks_of(alike)} in {shown}{more} after step {step}"
        self._ledger.announce(
            f"{self.odd_values}. Training continues, but a process that joins or replaces a rank gets another rank's "
            "values. Fix: keep values of a single rank out of the state, or make them equal on all ranks; for batch "
            "statistics, use SyncBatchNorm"
        )


def _unequal(told: Mapping[int, Digest]) -> tuple[Judgement, Mapping[int, bytes]]:
    """Return the values that differ although they must be equal, by rank, and which ranks agree.

    Shards are compared only if everything else is equal, and those of one key are enough.
    """
    values = {rank: one.shared for rank, one in told.items()}
    judgement = judge(values)
    held: dict[tuple[int, ...], dict[int, bytes]] = {}
    for rank, one in sorted(told.items()):
        held.setdefault(one.key, {})[rank] = one.held
    for alike in held.values():
        if judgement.is_equal:
            values, judgement = alike, judge(alike)
    return judgement, values


def _key(digest: Digest) -> Key:
    return _final_key(digest.point.generation) if digest.commits == FINAL else (digest.point, digest.commits)


def _final_key(generation: int) -> Key:
    """Return the key under which final states are compared, whatever each rank's number of steps."""
    return Point(0, generation), FINAL
