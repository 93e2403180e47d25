"""Choose a generation's restore point and its sources (docs/contributors/architecture.md).

Each rank has a *replica key*: ranks with equal keys hold the same part of the state (:class:`.messages.Sharding`). The
point is the newest for which every key has a holder; a rank that lacks the point gets it from a rank with its key. A
replicated state has one key, so one holder is enough; where each rank holds a shard of its own, every rank must hold
the point. A copy that a member keeps as another rank's buddy counts as held under that rank's key. The point of step 0
is saved before anything is sharded, so on any disk it holds every key. A key that no member has would be left out of
training silently, so members without all keys of the mesh have no restore point at all.

A rank gets the point from the first of these sources that has it: its own memory; a replica's memory; the copies of
commits that its slot has in its host's shared memory, which outlive a killed process; its own checkpoints; a replica's
copies and checkpoints; a buddy's memory. If a rank has parts that only its own points contain (its generators' states),
its own copies and checkpoints come before a replica's memory, and its buddy's memory before a replica's checkpoints.

The survivors hold the last commit in memory, so disks are read only if memories and copies do not hold every key.
Reading a disk verifies every byte and may take longer than the rest of a recovery.

The states of a rank's generators are in its own points, and may also have survived in its page
(:func:`page_obstacle`). If the newest point lacks them, all ranks go back to the newest point that these ranks, or
their buddies, hold. If there is no such point, the newest is used, and the text names the states that are derived
instead. A part without a holder cannot be derived: then there is no restore point.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from samebits.core.messages import Holdings, LiveStep, Loan, Page, PageLoan, Pairs
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted
from samebits.core.state import is_on_line
from samebits.core.values import replace
from samebits.printable import counted, listed

Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A copy that a rank loads: the rank that stores it, and the slot that saved it."""

    keeper: int
    slot: int


@dataclass(frozen=True, slots=True)
class Restore:
    """The chosen point, the ranks that hold it, and a text that explains the choice."""

    point: Point | None
    holders: frozenset[int]
    sources: Mapping[int, int]  # rank without the point → the holder that sends it
    text: str
    borrowed: Mapping[int, Borrowed] = field(default_factory=dict)  # rank without the point → the copy that it loads
    lends: Mapping[int, tuple[Loan, ...]] = field(default_factory=dict)  # the same, by keeper
    serves: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # ``sources``, by holder
    by_page: frozenset[int] = frozenset()  # ranks in ``sources`` whose generators are restored from pages
    page_loans: tuple[PageLoan, ...] = ()  # pages of ``by_page`` ranks that another rank has to send
    lost: str = ""  # why there is no point, although members hold some

    def source_of(self, rank: int) -> int:
        """Return the rank from which ``rank`` gets the point: itself if it holds the point."""
        borrowed = self.borrowed.get(rank)
        return self.sources.get(rank, rank) if borrowed is None else borrowed.keeper

    def served_by(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that load ``rank``'s own point."""
        return self.serves.get(rank, ())

    def lent_by(self, rank: int) -> tuple[Loan, ...]:
        """Return the copies stored by ``rank`` that it or other ranks load."""
        return self.lends.get(rank, ())


def drop_doubtful_points(joined: Mapping[int, Holdings], equal: Point | None) -> dict[int, Holdings]:
    """Return ``joined`` without points later than ``equal``, the last point at which the ranks were equal."""

    def is_equal(point: Point) -> bool:
        return equal is not None and point <= equal

    return {
        rank: replace(
            one,
            points=tuple(filter(is_equal, one.points)),
            live=one.live if one.live is not None and is_equal(one.live) else None,
            copies=tuple(copy for copy in one.copies if is_equal(copy.point)),
            kept=tuple(kept for kept in one.kept if is_equal(kept.point)),
        )
        for rank, one in joined.items()
    }


def must_look(
    joined: Mapping[int, Holdings],
    committed: GenerationCommitted | None,
    slots: Sequence[int | None] | None = None,
    equal: Point | None = None,
) -> bool:
    """Return whether the choice depends on disks that have not been read.

    No rank can be ahead of a member that holds a commit of the last generation, or its start: peers cannot complete
    another step without it. Older points, or those of an earlier generation, may be outdated. After a rollback, so is
    any point older than ``equal``, to which all ranks are to roll back.
    """
    if committed is None or all(member.looked for member in joined.values()):
        return False
    newest = max((member.live for member in joined.values() if member.live is not None), default=None)
    if newest is None or (newest.generation != committed.generation and newest != committed.restore):
        return True
    if equal is not None and newest < equal:
        return True
    keys = _keys(joined, _slots_of(joined, slots))
    kept = _kept(joined)
    remembered = {keys[rank] for rank in joined if newest in kept[rank]}
    remembered |= {keys[rank] for rank in _in_memory(joined, newest)}
    if not remembered.issuperset(keys.values()):
        return True
    found = _pages(joined, newest, _slots_of(joined, slots))
    return any(
        member.own_parts and newest not in {member.live, *member.points, *kept[rank]} and found[rank].obstacle
        for rank, member in joined.items()
    )


def choose_restore_point(
    joined: Mapping[int, Holdings],
    committed: GenerationCommitted | None,
    slots: Sequence[int] | None = None,
    suspects: Collection[int] = (),
) -> Restore:
    """Choose the restore point for these members, by rank.

    Args:
        joined: the members' holdings.
        committed: the last generation.
        slots: by rank; None: each rank equals its slot.
        suspects: ranks whose memory is used only if no other holds the point. They still load their own parts.
    """
    slot_of, kept = _slots_of(joined, slots), _kept(joined)
    keys = _keys(joined, slot_of)
    if lost := _parts_without_member(joined, keys):
        return Restore(None, frozenset(), {}, lost, lost=lost)
    held = {
        rank: {
            point
            for point in {member.live, *member.points, *kept[rank]}
            if point is not None and is_on_line(point, committed)
        }
        for rank, member in joined.items()
    }
    copies = _copies(joined, committed)
    own = {rank: held[rank] | copies.get(slot_of[rank], {}).keys() for rank in joined}
    live = max((one.live for rank, one in joined.items() if one.live in held[rank]), default=None)
    pages = {} if live is None else _pages(joined, live, slot_of)
    for rank, page in pages.items():
        if live is not None and not page.obstacle:
            own[rank].add(live)
    everything = set().union(*held.values(), *copies.values())
    best = max(everything, default=None)
    if best is None and not any(one.numerics for one in joined.values()):
        return Restore(None, frozenset(), {}, "")  # torchrun agents and plain scripts keep no state here
    if best is None:
        return Restore(None, frozenset(), {}, "no restore point yet: every rank starts from rank 0's initial state")
    missing = {one: _without_holder(one, joined, held, copies, slot_of, keys) for one in everything}
    complete = {one for one, without in missing.items() if not without}
    if not complete:
        lost = _parts_lost(best, missing[best], keys)
        return Restore(None, frozenset(), {}, lost, lost=lost)
    needing = [rank for rank, member in joined.items() if member.own_parts]
    common = complete.intersection(*(own[rank] for rank in needing))
    point = max(common or complete)
    in_memory = dict.fromkeys(_trusted(_in_memory(joined, point), suspects, keys))
    remembered = {keys[rank] for rank in in_memory}
    # A step may have several commits (one more at an epoch's end), and disks hold the first. If a memory holds the
    # point, its last commit is used. Only ranks with parts of their own use their disks even then.
    on_disk = [
        rank
        for rank, one in sorted(joined.items())
        if point in held[rank] and one.live != point and (keys[rank] not in remembered or one.own_parts)
    ]
    holders = dict.fromkeys(sorted([*in_memory, *on_disk]))
    lent = {slot: keepers[point] for slot, keepers in copies.items() if point in keepers}
    held_keys = {keys[rank] for rank in holders}
    without = {
        rank: slot_of[rank]
        for rank in joined
        if point not in held[rank] or (rank not in holders and keys[rank] not in held_keys)
    }
    borrowed = _borrow(
        {rank: slot for rank, slot in without.items() if joined[rank].own_parts or keys[rank] not in held_keys}, lent
    )
    # If only keepers hold a key, a rank without a copy of its own point takes another rank's copy.
    unserved = [rank for rank in sorted(without) if rank not in borrowed and keys[rank] not in held_keys]
    borrowed |= _share(unserved, lent, keys, slot_of)
    lacking = [rank for rank in joined if rank not in borrowed and rank not in holders]
    initial = [rank for rank, one in joined.items() if point.step == 0 and point in one.points]
    sources = _sources(lacking, (list(in_memory), on_disk), initial, keys)
    by_page = frozenset(
        rank for rank in lacking if point == live and joined[rank].own_parts and not pages[rank].obstacle
    )
    page_loans = tuple(
        PageLoan(pages[rank].lender, rank, slot_of[rank]) for rank in sorted(by_page) if pages[rank].lender != rank
    )
    has_pages = live == best and any(one.page is not None or one.orphaned_pages for one in joined.values())
    why = {rank: pages[rank].obstacle for rank in needing if has_pages and best not in own[rank]}
    shardless = [rank for rank in joined if keys[rank] in missing[best]]
    in_copies = [rank for rank in on_disk if point in kept[rank]]
    text = _explain(point, best, shardless, holders, in_memory, in_copies, lacking, borrowed, why)
    if by_page:
        text += f"; the generators of {_ranks(sorted(by_page))} are restored from pages in memory"
    derived = [
        rank
        for rank in needing
        if (rank in sources and rank not in by_page) or (rank in borrowed and borrowed[rank].slot != slot_of[rank])
    ]
    if not common and derived and point.step > 0:  # at step 0 all generators are as the script left them
        text += f" (the RNG state of {_ranks(derived)} is lost: it is derived from seed, rank and step)"
    loans, serves = _by_keeper(borrowed), _by_source(sources)
    return Restore(point, frozenset(holders), sources, text, borrowed, loans, serves, by_page, page_loans)


def lost_progress(found: Point | None, known: Point | None, joined: Mapping[int, Holdings]) -> str:
    """Return why training must not start from ``found``, or "" if it may.

    Args:
        found: the chosen restore point.
        known: the newest point that every rank had, according to the journal.
        joined: the members' holdings.
    """
    if known is None or known.step == 0 or (found is not None and found.step > 0):
        return ""
    folders = list(dict.fromkeys(one.folder for _, one in sorted(joined.items()) if one.folder))
    places = _some(folders) if folders else "any checkpoint folder"
    return (
        f"every rank had the restore point of {known}, and no restore point is left. Searched: the "
        f"memory of {counted(len(joined), 'worker')}, the buffers in their hosts' shared memory, the copies that they "
        f"keep for each other, and {places}. Starting from step 0 would give up {counted(known.step, 'step')}. Fix: "
        "bring the checkpoints back, or mount them, and call `samebits recover`; `samebits run --fresh` gives them up"
    )


def lost_steps(found: Point | None, known: Point | None) -> str:
    """Return a text if ``found`` is older than the newest point that every rank had, otherwise ""."""
    if found is None or known is None or found.step >= known.step:
        return ""
    return (
        f"every rank had the restore point of step {known.step}, which can no longer be used: training goes back to "
        f"step {found.step} and repeats {counted(known.step - found.step, 'step')}. Fix: to keep them, stop the job "
        f"before its next checkpoint, bring the missing checkpoints back (a mount, CHECKPOINT_PATH), and recover"
    )


def _keys(joined: Mapping[int, Holdings], slot_of: Mapping[int, int]) -> dict[int, Key]:
    """Return the replica key of each rank, which is that of its slot. All keys are equal if the state is replicated."""
    return {rank: _key_of(one, slot_of[rank]) for rank, one in joined.items()}


def _key_of(member: Holdings, slot: int) -> Key:
    return () if member.sharding is None else member.sharding.key_of(slot)


def _parts_without_member(joined: Mapping[int, Holdings], keys: Mapping[int, Key]) -> str:
    """Return why these members cannot train, if none of them would hold a part of the state; otherwise ""."""
    sharding = next((one.sharding for one in joined.values() if one.sharding is not None), None)
    if sharding is None or len(set(keys.values())) == sharding.key_count:
        return ""
    return (
        f"the state is sharded over {' x '.join(map(str, sharding.sizes))} ranks into "
        f"{counted(sharding.key_count, 'part')}, and the {counted(len(joined), 'worker')} of the next generation would "
        f"hold only {len(set(keys.values()))} of them. Fix: start the missing workers and call `samebits recover`"
    )


def _in_memory(joined: Mapping[int, Holdings], point: Point) -> list[int]:
    """Return the ranks whose memory holds the last commit of this point's step."""
    newest = max((member.commits for member in joined.values() if member.live == point), default=0)
    return [rank for rank, one in sorted(joined.items()) if one.live == point and one.commits == newest]


def _kept(joined: Mapping[int, Holdings]) -> dict[int, frozenset[Point]]:
    """Return the points whose last commit is in each rank's shared-memory copies.

    A step may have several commits. The commit in a live memory counts as the last one, or else the newest copy.
    """
    newest: dict[Point, int] = {}
    for one in joined.values():
        if one.live is not None:
            newest[one.live] = max(one.commits, newest.get(one.live, 0))
    for point in {kept.point for one in joined.values() for kept in one.kept} - newest.keys():
        newest[point] = max(kept.commits for one in joined.values() for kept in one.kept if kept.point == point)
    return {
        rank: frozenset(kept.point for kept in one.kept if kept.commits == newest[kept.point])
        for rank, one in joined.items()
    }


def _trusted(ranks: Sequence[int], suspects: Collection[int], keys: Mapping[int, Key]) -> list[int]:
    """Return the ranks without suspects, except suspects whose key no other rank holds."""
    sound = {keys[rank] for rank in ranks if rank not in suspects}
    return [rank for rank in ranks if rank not in suspects or keys[rank] not in sound]


def _without_holder(
    point: Point,
    joined: Mapping[int, Holdings],
    held: Mapping[int, Collection[Point]],
    copies: Mapping[int, Mapping[Point, int]],
    slot_of: Mapping[int, int],
    keys: Mapping[int, Key],
) -> set[Key]:
    """Return the keys that no rank holds at this point."""
    if point.step == 0 and any(point in one.points and point in held[rank] for rank, one in joined.items()):
        return set()  # saved before anything was sharded
    key_of_slot = {slot_of[rank]: key for rank, key in keys.items()}
    found = {key_of_slot.get(slot, ()) for slot, keepers in copies.items() if point in keepers}
    # A memory that holds an earlier commit of the same step does not count.
    found |= {keys[rank] for rank, one in joined.items() if point in held[rank] and one.live != point}
    found |= {keys[rank] for rank in _in_memory(joined, point)}
    return set(keys.values()) - found


def _sources(
    lacking: Sequence[int], held: Sequence[Sequence[int]], initial: Sequence[int], keys: Mapping[int, Key]
) -> dict[int, int]:
    """Assign to each rank that lacks the point a holder of its key, spread evenly.

    Args:
        lacking: the ranks without the point.
        held: groups of holders, the preferred group first.
        initial: the ranks whose disks hold the point of step 0, which is complete there.
        keys: the keys of all ranks.
    """
    sources: dict[int, int] = {}
    served: dict[tuple[int, ...], int] = {}
    for rank in lacking:
        alike = (tuple(one for one in holders if keys[one] == keys[rank]) for holders in held)
        senders = next((some for some in alike if some), tuple(initial))
        sources[rank] = senders[served.setdefault(senders, 0) % len(senders)]
        served[senders] += 1
    return sources


def _parts_lost(newest: Point, without: Collection[Key], keys: Mapping[int, Key]) -> str:
    """Return a text that explains that no remaining point has all parts of the state."""
    ranks = sorted(rank for rank, key in keys.items() if key in without)
    return (
        f"the state is sharded, and no memory, copy, buffer or disk holds the part of {_ranks(ranks)} at step "
        f"{newest.step}, nor is any older point held in all its parts. Fix: bring the checkpoints of these ranks or of "
        "their replicas back, or mount them, and call `samebits recover`; `samebits run --fresh` gives the job up"
    )


def _slots_of(joined: Mapping[int, Holdings], slots: Sequence[int | None] | None) -> dict[int, int]:
    """Return the slots by rank. Without ``slots``, a rank's slot has the same number."""
    found = range(len(joined)) if slots is None else slots
    return {rank: rank if slot is None else slot for rank, slot in enumerate(found)}


NO_PAGE = "finds no page of its generators in its host's memory"
DREW_LATE = "draws random numbers between a step's last collective and its commit"
PEERS_DREW_LATE = "lacks the commit in its page, and its peers drew between that step's last collective and it"
NO_SUCH_STEP = "has neither this commit nor the same number of collectives before it in its page"


def page_obstacle(page: Page | None, point: Point, commits: int, steps: Collection[LiveStep | None]) -> str:
    """Return why a page lacks its rank's generator states at a commit, or "" if it has them.

    A rank that was killed in the step that its peers committed had called all collectives of that step. Its generators
    at the commit are therefore in the state from before the last collective, unless it drew random numbers after that.
    Its page does not show whether it did, but its peers run the same program: they must have called as many collectives
    in that step as the page counts, and none of them may have drawn after the last one. The page must also show that
    its rank never did so in an earlier step.

    Args:
        page: the rank's page.
        point: the commit.
        commits: number of commits on the line up to it.
        steps: facts about the last step, from the ranks that hold the commit.
    """
    if page is None:
        return NO_PAGE
    if any(kept.point == point and kept.commits == commits for kept in page.commits):
        return ""
    known = [step for step in steps if step is not None]
    if page.generation != point.generation or page.next_commit != commits or not known:
        return NO_SUCH_STEP
    if page.draws_late:
        return DREW_LATE
    if any(step.draws_late for step in known):
        return PEERS_DREW_LATE
    return "" if all(step.collectives == page.collectives for step in known) else NO_SUCH_STEP


class _FoundPage(NamedTuple):
    """The best page that was found for a rank's generators."""

    obstacle: str  # why it cannot bring them to the commit; "" if it can
    lender: int  # the rank that has it


def _pages(joined: Mapping[int, Holdings], live: Point, slot_of: Mapping[int, int]) -> dict[int, _FoundPage]:
    """Return a page for each rank: the first one that reaches the last commit of ``live``, otherwise the rank's own."""
    commits = max((member.commits for member in joined.values() if member.live == live), default=0)
    steps = [one.live_step for one in joined.values() if one.live == live and one.commits == commits]
    orphaned: dict[int, list[tuple[int, Page | None]]] = {}
    for lender, member in sorted(joined.items()):
        for orphan in member.orphaned_pages:
            orphaned.setdefault(orphan.slot, []).append((lender, orphan.page))
    found = {}
    for rank, member in joined.items():
        pages = [(rank, member.page), *orphaned.get(slot_of[rank], ())]
        judged = [_FoundPage(page_obstacle(page, live, commits, steps), lender) for lender, page in pages]
        found[rank] = next((page for page in judged if not page.obstacle), judged[0])
    return found


def _copies(joined: Mapping[int, Holdings], committed: GenerationCommitted | None) -> dict[int, dict[Point, int]]:
    """Return, for each slot, its points that other ranks store, each with the first such rank."""
    found: dict[int, dict[Point, int]] = {}
    for rank, member in sorted(joined.items()):
        for copy in member.copies:
            if is_on_line(copy.point, committed):
                found.setdefault(copy.slot, {}).setdefault(copy.point, rank)
    return found


def _borrow(wanted: Mapping[int, int], kept: Mapping[int, int]) -> dict[int, Borrowed]:
    """Return the copy of its own point that each rank loads.

    Args:
        wanted: rank → its slot.
        kept: slot → its keeper.
    """
    return {rank: Borrowed(kept[slot], slot) for rank, slot in wanted.items() if slot in kept}


def _share(
    ranks: Sequence[int], kept: Mapping[int, int], keys: Mapping[int, Key], slot_of: Mapping[int, int]
) -> dict[int, Borrowed]:
    """Assign to each rank a copy that holds its key's part, spread evenly over the copies."""
    key_of_slot = {slot_of[rank]: key for rank, key in keys.items()}
    borrowed: dict[int, Borrowed] = {}
    for rank in ranks:
        some = [
            Borrowed(keeper, slot) for slot, keeper in sorted(kept.items()) if _may_lend(slot, key_of_slot, keys[rank])
        ]
        if some:
            borrowed[rank] = some[len(borrowed) % len(some)]
    return borrowed


def _may_lend(slot: int, key_of_slot: Mapping[int, Key], key: Key) -> bool:
    """Return whether a copy of a slot's point holds this key's part.

    For a slot without a rank, this is known only if all ranks hold the same part.
    """
    return key_of_slot.get(slot, ()) == key


def _by_keeper(borrowed: Mapping[int, Borrowed]) -> dict[int, tuple[Loan, ...]]:
    lends: dict[int, list[Loan]] = {}
    for rank, one in borrowed.items():
        lends.setdefault(one.keeper, []).append(Loan(rank, one.slot))
    return {keeper: tuple(loans) for keeper, loans in lends.items()}


def _by_source(sources: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    serves: dict[int, list[int]] = {}
    for rank, source in sources.items():
        serves.setdefault(source, []).append(rank)
    return {source: tuple(ranks) for source, ranks in serves.items()}


def _explain(
    point: Point,
    best: Point,
    without: Sequence[int],
    holders: Collection[int],
    in_memory: Collection[int],
    in_copies: Collection[int],
    lacking: list[int],
    borrowed: Mapping[int, Borrowed],
    why: Mapping[int, str],
) -> str:
    text = f"restore point: step {point.step} of generation {point.generation}, "
    on_disk = [rank for rank in holders if rank not in in_memory and rank not in in_copies]
    parts = []
    if in_memory and not lacking and not borrowed and not on_disk and not in_copies:
        parts.append("in every rank's memory")
    elif on_disk and not lacking and not borrowed and not in_memory and not in_copies:
        parts.append("from every rank's own checkpoint")
    else:
        parts += [f"in the memory of {_ranks(in_memory)}"] if in_memory else []
        parts += [f"in the shared-memory copy of {_ranks(in_copies)}"] if in_copies else []
        parts += [f"held by {_ranks(on_disk)}"] if on_disk else []
    if borrowed:
        keepers = sorted({one.keeper for one in borrowed.values()})
        parts.append(f"from copies of {_ranks(sorted(borrowed))} on {_ranks(keepers)}")
    text += ", ".join(parts) + (f"; sent to {_ranks(lacking)}" if lacking else "")
    if point != best and without:
        text += f" (step {best.step} is not held by all, and no other rank holds the shard of {_ranks(without)})"
    elif point != best:
        text += (
            f" (step {best.step} is not held by all, and a rank's RNG state is in its own points alone; rng='per_step' "
            "avoids this"
        )
        text += "".join(f"; rank {rank} {reason}" for rank, reason in list(why.items())[:1]) + ")"
    return text


def _ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 2``, ``ranks 0 and 2`` or ``ranks 0, 1 and 5 more``."""
    found = list(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {_some(found)}"


def _some(items: Iterable[object]) -> str:
    found = list(items)
    return listed([*found[:8], f"{len(found) - 8} more"] if len(found) > 8 else found)


def differing(mine: Pairs, theirs: Pairs) -> str:
    """Return a text such as ``name is A here and B there`` for each different value, or "" if all are equal."""
    if mine == theirs:
        return ""
    left, right = dict(mine), dict(theirs)
    names = [name for name in dict.fromkeys([*left, *right]) if left.get(name) != right.get(name)]
    return "; ".join(
        f"{shown_name(name)} is {left.get(name, 'unset')} here and {right.get(name, 'unset')} there" for name in names
    )


def shown_name(name: str) -> str:
    """Return a shared setting's name for messages to users. Journals keep the name of earlier releases."""
    return "CONSISTENCY's interval" if name == "CONSISTENCY_EVERY" else name
