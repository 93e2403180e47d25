"""The size of the world, its expected members, and the successors of lost slots.

A slot is expected from the moment it is held until it is durably taken away. The journal therefore defines the world,
and a round waits for exactly these slots. A member's rank is the index of its slot among them. With a device mesh whose
number of replicas may change, only the slots of complete shard groups become members (:mod:`.shard_groups`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence, Set

from samebits.core.ledger import Ledger
from samebits.core.membership.shard_groups import ShardGroups, mesh_for
from samebits.core.messages import Activity, RankPosition, Sharding
from samebits.core.records import GenerationCommitted, SeatRetired, SlotGiven
from samebits.core.replacement_names import replaces, root_of
from samebits.core.state import Seat


def rank_of_slot(committed: GenerationCommitted, slot: int) -> int | None:
    """Return the rank of the slot's holder in this generation, or None."""
    slots = committed.slots
    rank = slot if slot < len(slots) and slots[slot] == slot else bisect_left(slots, slot)  # in a full world: itself
    return rank if rank < len(slots) and slots[rank] == slot else None


class World:
    """Tracks slots, places and grace periods.

    Args:
        is_unhealthy: returns whether a spare should not take over because it would leave again.

    Attributes:
        coming: slots given, while a generation trains, to newcomers that are not ready to join. A round waits for them
            only if the world would be too small otherwise.
        has_begun: the first round was opened, or a generation was committed.
        mesh: the mesh by whose shard groups the world shrinks, once known; None: it shrinks by single slots.
    """

    def __init__(self, ledger: Ledger, is_unhealthy: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._is_unhealthy = is_unhealthy
        self.coming: set[int] = set()
        self.has_begun = False
        self.mesh: Sharding | None = None
        self._groups: tuple[int, ShardGroups | None] = (-1, None)  # cached for one version of the ledger
        self._places: tuple[int, dict[int, RankPosition]] = (-1, {})  # cached for one version of the ledger

    def load(self) -> None:
        """Expect the slots in the journal. All are absent at first."""
        ledger, state = self._ledger, self._ledger.state
        expected = set(state.by_slot)
        if state.generation is None:
            expected.update(range(ledger.policy.world_size))
        ledger.clear_absent()
        for slot in range(ledger.policy.max_world_size):  # a slot that was taken away may have no new holder yet
            if len(expected) >= ledger.policy.min_world_size:
                break
            expected.add(slot)
        for slot in sorted(expected):
            ledger.miss(slot)
        self.has_begun = state.generation is not None
        self.mesh = None if state.generation is None else mesh_for(ledger.policy, state.generation.sharding)
        self.coming = {slot for slot, node in state.by_slot.items() if self.is_new(slot) and state.seats[node].is_held}

    def learn_mesh(self, sharding: Sharding | None) -> None:
        """Note how a joining member's state is sharded, unless the journal has told it already."""
        if self.mesh is None and (mesh := mesh_for(self._ledger.policy, sharding)) is not None:
            self.mesh = mesh
            self._ledger.version += 1

    # ---- slots

    def is_new(self, slot: int) -> bool:
        """Return whether the slot was created after the last generation began."""
        committed = self._ledger.state.generation
        return committed is not None and bool(committed.slots) and rank_of_slot(committed, slot) is None

    def size(self) -> int:
        """Return the number of slots, held or not."""
        ledger = self._ledger
        if not ledger.policy.is_elastic:
            return ledger.policy.world_size
        return len(ledger.state.by_slot) + len(ledger.absent) - len(ledger.vacated)

    def free_slot(self, wanted: int | None = None) -> int | None:
        """Return a slot for one more worker (``wanted``, or else the first free one), or None."""
        ledger = self._ledger
        candidates: Iterable[int] = range(ledger.policy.max_world_size) if wanted is None else (wanted,)
        if (groups := self._shard_groups()) is not None:  # first the groups that lack fewest
            candidates = sorted(candidates, key=groups.vacancies)
        grows, held = self.may_grow(), ledger.state.by_slot
        return next((slot for slot in candidates if slot not in held and (grows or slot in ledger.absent)), None)

    def may_grow(self) -> bool:
        """Return whether the world may have one more slot."""
        policy, state = self._ledger.policy, self._ledger.state
        if not policy.is_elastic or state.final is not None:
            return False
        return not self.has_begun or (policy.recovery and self.has_resets_left())

    def has_resets_left(self) -> bool:
        """Return whether one more generation may begin (RESET_LIMIT)."""
        limit, state = self._ledger.policy.reset_limit, self._ledger.state
        interrupted_at = [record.generation for record in state.interruptions]
        line = () if state.generation is None else state.generation.line
        made_anew_at = [cut.generation for cut in line if cut.is_a_loss]
        began_at = max((0, *interrupted_at, *made_anew_at))
        return limit == 0 or state.generation_number - began_at <= limit

    def may_begin(self) -> bool:
        """Return whether enough workers are present for the first generation."""
        ledger = self._ledger
        return not ledger.absent or (ledger.policy.is_elastic and ledger.present() >= ledger.policy.world_size)

    def start_deadline(self, first_heard_at: float | None, pending: int) -> float | None:
        """Return when the first generation forms with fewer than WORKER_NUM workers, or None."""
        policy = self._ledger.policy
        if self.has_begun or first_heard_at is None or policy.min_world_size == policy.world_size:
            return None
        enough = self._ledger.present() + pending >= policy.min_world_size
        return first_heard_at + policy.start_grace_s if enough else None

    def begin_without_absent(self) -> None:
        """Give up the absent slots so that the first generation can begin without them."""
        for slot in sorted(self._ledger.absent):
            self._give_up(slot)

    # ---- losses

    def give_slots(self) -> list[Seat]:
        """Give lost slots to spares at once. Only the lost node has to wait for a cool-down."""
        ledger = self._ledger
        given: list[Seat] = []
        if not (ledger.absent and ledger.state.spares):
            return given
        if ledger.state.final is not None or not ledger.policy.recovery:
            return given
        is_filling = ledger.state.generation is None
        if is_filling and not ledger.vacated:
            return given
        spares, slots = self._here(), sorted(ledger.vacated if is_filling else ledger.absent)
        lines = {root_of(ledger.state.by_slot[slot]) for slot in slots if slot in ledger.state.by_slot}
        for slot in slots:
            lost = ledger.state.seat_of_slot(slot)
            if self.is_new(slot):
                continue
            if (
                is_filling and lost is not None and not lost.is_lost
            ):  # it left on purpose; the node or its replacement will return
                fit = [one for one in spares if replaces(one.node, lost.node)]
            else:
                fit = _fit(spares, lost, lines)
            if not fit:
                continue  # the spares left are reserved for other lines
            spare = self._readiest(fit, lost)
            spares.remove(spare)
            of_whom = ""
            if lost is not None:
                ledger.write(SeatRetired(lost.node, slot))
                of_whom = f" of worker {lost.node}"
            ledger.write(SlotGiven(spare.node, slot))
            ledger.meet(slot)
            ledger.ready.say(f"spare {spare.node} ({spare.process}) takes slot {slot}{of_whom}")
            given.append(spare)
        return given

    def complete_groups(self) -> list[Seat]:
        """Give vacant slots to spares if that completes a shard group whose other members wait for it."""
        ledger, groups, given = self._ledger, self._shard_groups(), list[Seat]()
        if groups is None or ledger.absent or ledger.state.generation is None or not ledger.state.spares:
            return given
        if not self.may_grow():
            return given
        spares, held = self._here(), ledger.state.by_slot
        for slot in sorted(held.keys() - groups.complete, key=groups.vacancies):
            vacant = self._vacant_beside(slot)
            if not 0 < len(vacant) <= len(spares):
                continue
            for free in vacant:
                spare = self._readiest(spares, None)
                spares.remove(spare)
                ledger.write(SlotGiven(spare.node, free))
                ledger.meet(free)
                if ledger.presences[spare.node].activity is not Activity.WAITING:
                    self.expect_later(free)
                ledger.ready.say(f"spare {spare.node} ({spare.process}) takes slot {free}, which its shard group lacks")
                given.append(spare)
        return given

    def _vacant_beside(self, slot: int) -> list[int]:
        """Return the slots of this slot's shard group that have no holder."""
        mesh, held = self.mesh, self._ledger.state.by_slot
        assert mesh is not None, "only a world with a mesh has shard groups"
        slots = range(self._ledger.policy.max_world_size)
        return [one for one in slots if one not in held and mesh.group_of(one) == mesh.group_of(slot)]

    def _here(self) -> list[Seat]:
        """Return spares that have sent a message and are connected. The others may be dead as well."""
        ledger = self._ledger
        found = ((ledger.state.seats[node], ledger.presences[node]) for node in ledger.state.spares)
        return [seat for seat, presence in found if presence.heard_at is not None and presence.closed_at is None]

    def spare_said(self, lost: Seat) -> str:
        """Return a phrase about where the spare for this seat is, or "" if there is no spare."""
        fit = _fit(self._here(), lost, {root_of(lost.node)})
        if not fit:
            return ""
        is_beside = self._readiest(fit, lost).process.host == lost.process.host
        return "on its host" if is_beside else "on another host"

    def _readiest(self, spares: Sequence[Seat], lost: Seat | None) -> Seat:
        """Return the spare that is best prepared to replace ``lost``.

        Waiting spares come before starting ones, then healthy before unhealthy ones. If the lost node's host or device
        failed, a spare on another host is preferred. Then comes the node's own replacement, then a spare on its host,
        then the first.
        """
        presences = self._ledger.presences
        before = None if lost is None else presences.get(lost.node)
        avoids_host = before is not None and before.avoids_host

        def falls_short(seat: Seat) -> tuple[bool, bool, bool, bool, bool]:
            is_waiting = presences[seat.node].activity is Activity.WAITING
            is_beside = lost is not None and seat.process.host == lost.process.host
            is_its_own = lost is not None and root_of(seat.node) == root_of(lost.node)
            is_unhealthy = self._is_unhealthy(seat.node)
            return not is_waiting, is_unhealthy, avoids_host and is_beside, not is_its_own, not is_beside

        return min(spares, key=falls_short)

    def shortage(self) -> str:
        """Return how many workers an elastic world lacks, as a text, or "" if it has enough."""
        ledger, least = self._ledger, self._ledger.policy.min_world_size
        if not ledger.policy.is_elastic:
            return ""
        if self.present() < least:
            whole = "" if self.mesh is None else " in complete shard groups"
            return f"; {self.present()} of at least {least} (MIN_WORKER_NUM) are here{whole}"
        return "" if self._can_continue() else "; no shard group of the last generation is complete"

    def present(self, without: int | None = None) -> int:
        """Return how many workers that are considered alive could form a generation.

        Args:
            without: a slot that is about to be lost.
        """
        ledger, groups = self._ledger, self._shard_groups()
        if groups is None:
            return ledger.present() - (without in ledger.state.by_slot and without not in ledger.absent)
        return len(groups.complete - (set() if without is None else groups.beside([without])))

    def _can_continue(self) -> bool:
        """Return whether a shard group of the last generation is complete.

        Only its members hold the newest commit of every part. Groups that wait outside hold older ones.
        """
        groups = self._shard_groups()
        return groups is None or any(not self._arrives(slot) for slot in groups.complete)

    def _arrives(self, slot: int) -> bool:
        """Return whether a slot of this slot's shard group was created after the last generation began."""
        groups = self._shard_groups()
        assert groups is not None, "only a world with a mesh has shard groups"
        return any(map(self.is_new, groups.beside([slot])))

    def _shard_groups(self) -> ShardGroups | None:
        """Return the present shard groups, or None if the world has none."""
        ledger = self._ledger
        if self.mesh is None:
            return None
        if self._groups[0] != ledger.version:
            self._groups = (ledger.version, ShardGroups(self.mesh, ledger.state.by_slot, ledger.absent))
        return self._groups[1]

    def shrink(self) -> None:
        """Continue without slots whose grace period is over, if enough members remain."""
        ledger = self._ledger
        deadline = self.shrink_deadline()
        if deadline is None or deadline > ledger.now:
            return
        due = [slot for slot in sorted(ledger.absent) if self._waits_until(slot) <= ledger.now]
        names = ledger.names_of(due)
        for slot in due:
            self._give_up(slot)
        ledger.ready.say(f"the world continues without worker {names}: {self.present()} are left{self._waiting()}")

    def _waiting(self) -> str:
        """Return a text with the workers that wait outside for their shard group, or ""."""
        ledger, groups = self._ledger, self._shard_groups()
        outside = set[int]() if groups is None else ledger.state.by_slot.keys() - groups.complete - ledger.absent.keys()
        names = ledger.names_of(outside)
        return f"; worker {names} {'wait' if len(outside) > 1 else 'waits'} for the shard group" if outside else ""

    def shrink_deadline(self) -> float | None:
        """Return when ``shrink`` is due, or None."""
        ledger = self._ledger
        policy = ledger.policy
        if not (policy.is_elastic and policy.recovery and self.has_begun and ledger.absent):
            return None
        if ledger.state.final is not None or self.present() < policy.min_world_size or not self._can_continue():
            return None
        return min(self._waits_until(slot) for slot in ledger.absent)

    def _waits_until(self, slot: int) -> float:
        return self._ledger.now if self.is_new(slot) else self._ledger.absent[slot]

    def _give_up(self, slot: int) -> None:
        seat = self._ledger.state.seat_of_slot(slot)
        if seat is not None:
            self._ledger.write(SeatRetired(seat.node, slot))
        self.coming.discard(slot)
        self._ledger.meet(slot)

    def shift(self, gap_s: float) -> None:
        """Extend grace periods by the length of a pause of the scheduler."""
        ledger = self._ledger
        latest = ledger.now + ledger.policy.shrink_grace_s
        for slot, until in ledger.absent.items():
            ledger.absent[slot] = min(until + gap_s, latest)

    # ---- members and places

    def expect_later(self, slot: int) -> None:
        """Record that a slot's new holder is not ready, so that no round waits for it."""
        self.coming.add(slot)
        self._ledger.version += 1

    def expect_now(self, slot: int) -> None:
        """Record that a slot's holder is ready, or gone."""
        if slot in self.coming:
            self.coming.remove(slot)
            self._ledger.version += 1

    def is_awaited(self, slot: int) -> bool:
        """Return whether a round waits for the slot's holder."""
        return slot not in self.coming or slot not in self._outside()

    def members(self) -> list[int]:
        """Return the slots that would form a generation now, in ascending order."""
        return sorted(self._ledger.state.by_slot.keys() - self._outside())

    def is_complete(self, joined: Collection[str]) -> bool:
        """Return whether a round that these nodes have joined has everyone that it waits for."""
        ledger = self._ledger
        if ledger.absent:
            return False
        if self.mesh is None:
            return len(joined) == len(ledger.state.by_slot) - len(self._outside())
        groups = self._shard_groups()
        if groups is not None and not self.coming and len(joined) < len(groups.complete):
            return False  # without listing thousands of members at each join
        members = self.members()  # others may have joined, which wait for their shard group
        enough = ledger.policy.min_world_size <= len(members) <= len(joined)
        return enough and all(ledger.state.by_slot[slot] in joined for slot in members)

    def may_join(self, slot: int) -> bool:
        """Return whether the slot's holder, which is ready, adds to a generation that can continue."""
        if not self.is_new(slot):
            return False
        groups = self._shard_groups()
        return groups is None or (slot in groups.complete and not groups.beside([slot]) & self.coming)

    def _outside(self) -> Set[int]:
        """Return the held slots that a round need not wait for: newcomers, and incomplete shard groups."""
        ledger, groups = self._ledger, self._shard_groups()
        least = ledger.policy.min_world_size
        if groups is None:
            return self.coming if self.coming and ledger.present() - len(self.coming) >= least else set[int]()
        arriving = groups.beside(self.coming) & groups.complete
        left = groups.complete - arriving
        return ledger.state.by_slot.keys() - (left if arriving and len(left) >= least else groups.complete)

    def place_of(self, slot: int) -> RankPosition | None:
        """Return the slot's place in a round of all present members or, at a fixed size, of all members."""
        ledger = self._ledger
        if not ledger.policy.is_elastic:
            return RankPosition(slot, slot, ledger.policy.world_size)
        if self._places[0] != ledger.version:
            slots = [one for one in self.members() if one not in ledger.absent]
            places = {one: RankPosition(one, rank, len(slots)) for rank, one in enumerate(slots)}
            self._places = (ledger.version, places)
        return self._places[1].get(slot)


def _fit(spares: Sequence[Seat], lost: Seat | None, lines: Collection[str]) -> list[Seat]:
    """Return spares that may take the lost slot: its own replacement, or spares that replace no other lost node."""
    own = None if lost is None else root_of(lost.node)
    return [one for one in spares if (line := root_of(one.node)) == own or line not in lines]
