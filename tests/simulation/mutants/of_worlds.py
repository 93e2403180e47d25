"""Cores and agents that break a promise about spares, places or the size of the world; one decision each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from samebits.core.agent.agent_core import AgentCore
from samebits.core.membership.replacement_proofs import Claim, ReplacementProofs
from samebits.core.messages import Holdings, RankPosition, Register, RoundOpened, Sharding
from samebits.core.ready import Ready
from samebits.core.records import GenerationCommitted, SeatRetired, SlotGiven
from samebits.core.scheduler import SchedulerCore, SchedulerEvent
from samebits.core.state import Seat
from samebits.core.values import replace
from tests.simulation.mix import Naming
from tests.simulation.mutants.mutant import Mutant


def _with_world(**replaced: Callable[..., Any]) -> type[SchedulerCore]:
    """Return a core whose world decides these things so; each function is given the world first."""

    class Changed(SchedulerCore):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            for name, function in replaced.items():
                setattr(self._world, name, _bound(function, self._world))

    return Changed


def _bound(function: Callable[..., Any], world: Any) -> Callable[..., Any]:
    return lambda *arguments: function(world, *arguments)


def _gives_to_the_seated(world: Any) -> list[Seat]:
    """Gives another slot to a worker that has one."""
    ledger, given = world._ledger, []
    for slot in sorted(ledger.absent):
        lost, live = ledger.state.seat_of_slot(slot), ledger.live_seats()
        if ledger.state.generation is None or ledger.state.final is not None or lost is None or not live:
            continue
        ledger.write(SeatRetired(lost.node, slot))
        ledger.write(SlotGiven(live[0].node, slot))
        ledger.meet(slot)
        given.append(live[0])
    return given


class GivesHeldSlots(SchedulerCore):
    """A spare takes the slot of a holder whose connection only broke."""

    def step(self, event: SchedulerEvent, now: float) -> Ready:
        for node in sorted(self._leases._closing):
            seat = self.state.seats[node]
            if seat.slot is not None and self.state.spares and self.state.generation and not self.state.final:
                self._ledger.absent.setdefault(seat.slot, now)
        return super().step(event, now)


def _shrinks_at_once(world: Any, slot: int) -> float:
    return float(world._ledger.now)


def _shrinks_below(world: Any) -> float | None:
    """Ignores the minimum."""
    ledger = world._ledger
    if not (ledger.policy.is_elastic and world.has_begun and ledger.absent) or ledger.state.final is not None:
        return None
    return min(world._waits_until(slot) for slot in ledger.absent) if ledger.present() else None


def _never_looks(joined: Mapping[int, Holdings], committed: GenerationCommitted | None, *_: object) -> bool:
    return committed is not None and all(member.live is None and not member.looked for member in joined.values())


class NeverHardens(SchedulerCore):
    """A loss, a failed collective or a missed commit leaves a gentle round gentle."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._rendezvous.harden = self._forget_who_left  # type: ignore[method-assign]

    def _forget_who_left(self, reason: str) -> None:
        if self._rendezvous.round is not None:
            self._rendezvous.round.leave_by = None


class TakesAnyAddress(SchedulerCore):
    """A part of the address map counts in any place its member gets."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._rendezvous._is_in_place = lambda made_for, place: True  # type: ignore[method-assign]


class PublishesAnyAddress(AgentCore):
    """An address made for one place is published in another."""

    def _is_ready_for(self, place: RankPosition) -> bool:
        return self._holdings is not None


class ReturnsAtOnce(SchedulerCore):
    """A node whose slot was reassigned waits for no cool-down."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        admit = self._admission._admit_unknown

        def admit_at_once(message: Register) -> Seat | None:
            with mock.patch.object(self._leases, "cool_down_left_s", lambda seat: 0.0):
                return admit(message)

        self._admission._admit_unknown = admit_at_once  # type: ignore[method-assign]


class TellsSlotsFirst(SchedulerCore):
    """A spare is invited to its slot one step before that is written."""

    def step(self, event: SchedulerEvent, now: float) -> Ready:
        ready = super().step(event, now)
        late = getattr(self, "_late", [])
        given = [record for record in ready.records if isinstance(record, SlotGiven)]
        self._late = given
        ready.records = late + [record for record in ready.records if not isinstance(record, SlotGiven)]
        return ready


class OrdersRanksByAge(SchedulerCore):
    """Ranks follow the order of arrival, not the slots."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        members = self._world.members

        def by_age() -> list[int]:
            state = self._ledger.state
            return sorted(members(), key=lambda slot: (-state.seats[state.by_slot[slot]].incarnation, slot))

        self._world.members = by_age  # type: ignore[method-assign]


class SpoilsPlaces(SchedulerCore):
    """Every other announced place belongs to another worker."""

    def _finish_step(self) -> Ready:
        ready = super()._finish_step()
        ready.sends = [
            send._replace(message=replace(send.message, place=replace(send.message.place, slot=97)))
            if isinstance(send.message, RoundOpened) and send.message.place is not None
            else send
            for send in ready.sends
        ]
        return ready


SHARD_GROUPS = {"world_size": 4, "min_world_size": 2, "max_world_size": 4, "has_memory": True}
SHARD_GROUPS |= {"sharding": Sharding((2, 2), (True, False), 0), "naming": Naming.SLOTS}
SHARD_GROUPS |= {"chaos_s": 60.0, "rates_hz": {"worker killed": 0.15, "connection broken": 0.05}}
ELASTIC = {"world_size": 4, "min_world_size": 2, "max_world_size": 6, "has_memory": True}
LOSSES = {"rates_hz": {"worker killed": 0.15, "connection broken": 0.2}}
SPARES = {"spare_num": 2, "world_size": 3, **LOSSES}
GROWTH = {**ELASTIC, "chaos_s": 40.0, "target_step": 60, "save_every": 10, "commit_every": 3, "step_s": 1.0}
GROWTH |= {"breaks_sockets": False, "quiet_start_s": 8.0, "rates_hz": {"node added": 0.2, "worker killed": 0.05}}

REPLACED = {"replaces": True, "naming": Naming.SLOTS, "world_size": 3, "min_world_size": 3, "max_world_size": 3}
REPLACED |= {"spare_num": 0, "chaos_s": 60.0, "quiet_start_s": 8.0, "step_s": 0.3, "target_step": 150}
REPLACED |= {"cool_down_s": 30.0, "rates_hz": {"worker killed": 0.2, "replacement forged": 0.5}}


def _believes_every_proof(replacements: ReplacementProofs, message: Register) -> bool:
    return bool(message.proof)


def _takes_spent_numbers(replacements: ReplacementProofs, message: Register) -> Claim:
    """A replaced number is as good as a new one."""
    with mock.patch.dict(replacements._ledger.state.replacements):
        newest = replacements.newest(message.node)
        replacements._ledger.state.replacements.clear()
        with mock.patch.object(replacements, "newest", lambda node: newest):
            return _CLAIM(replacements, message)


_CLAIM = ReplacementProofs.claim

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a proof is not compared",
        frozenset({"S3"}),
        30,
        patches={"samebits.core.membership.replacement_proofs.ReplacementProofs.is_proven": _believes_every_proof},
        changes=REPLACED,
    ),
    Mutant(
        "a used number is accepted again",
        frozenset({"S3", "S5"}),
        60,
        patches={"samebits.core.membership.replacement_proofs.ReplacementProofs.claim": _takes_spent_numbers},
        changes=REPLACED,
    ),
    Mutant(
        "one node is given two slots",
        frozenset({"S1", "S2", "S4", "S7", "S14", "crash"}),
        50,
        _with_world(give_slots=_gives_to_the_seated),
        changes=SPARES,
    ),
    Mutant("a slot is given while it is held", frozenset({"S14"}), 50, GivesHeldSlots, changes=SPARES),
    Mutant("a slot is sent before it is written", frozenset({"S4", "S7", "S14"}), 50, TellsSlotsFirst, changes=SPARES),
    Mutant("lost workers return without a cool-down", frozenset({"S3"}), 50, ReturnsAtOnce, changes=SPARES),
    Mutant(
        "the world shrinks below its minimum",
        frozenset({"S14"}),
        50,
        _with_world(shrink_deadline=_shrinks_below),
        changes=ELASTIC | LOSSES,
    ),
    Mutant(
        "the world shrinks before its grace",
        frozenset({"S14"}),
        50,
        _with_world(_waits_until=_shrinks_at_once),
        changes=ELASTIC | LOSSES | {"shrink_grace_s": 10.0},
    ),
    Mutant(
        "a world with a mesh shrinks by single slots",
        frozenset({"S9", "S14"}),
        50,
        _with_world(learn_mesh=lambda world, sharding: None),
        changes=SHARD_GROUPS,
    ),
    Mutant(
        "a part of the state has no member",
        frozenset({"S9", "S14"}),
        50,
        _with_world(learn_mesh=lambda world, sharding: None),
        patches={"samebits.core.restore._parts_without_member": lambda joined, keys: ""},
        changes=SHARD_GROUPS,
    ),
    Mutant(
        "a shard group that waits outside replaces the last one",
        frozenset({"S14"}),
        100,
        _with_world(_can_continue=lambda world: True),
        changes=SHARD_GROUPS,
    ),
    Mutant(
        "an outdated memory is accepted",
        frozenset({"S9", "S10"}),
        300,
        patches={"samebits.core.rounds.rendezvous.must_look": _never_looks},
        changes={"has_memory": True, "p_dirty": 0.5},
    ),
    Mutant(
        "a gentle round stays gentle after a loss", frozenset({"L1", "L3", "L5"}), 300, NeverHardens, changes=GROWTH
    ),
    Mutant(
        "an address made for another place counts",
        frozenset({"S8"}),
        100,
        TakesAnyAddress,
        changes=ELASTIC | LOSSES | {"addresses_early": 1.0},
    ),
    Mutant(
        "agent: an address made for another place is published",
        frozenset({"S8"}),
        100,
        agent_type=PublishesAnyAddress,
        changes=ELASTIC | LOSSES | {"addresses_early": 1.0},
    ),
    Mutant(
        "ranks are ordered by age", frozenset({"S2", "S14", "crash"}), 50, OrdersRanksByAge, changes=ELASTIC | LOSSES
    ),
    Mutant("a place that no member has", frozenset({"S7"}), 10, SpoilsPlaces),
)
