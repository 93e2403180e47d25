"""Builds that take healthy workers for hung or sick, forget what they asked, or leave a hung one alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from samebits.core.agent.agent_core import AgentCore
from samebits.core.hangs import Hang
from samebits.core.messages import Depart, FromScheduler, Leave, ReportEnvelope
from samebits.core.reports import StallReport
from samebits.core.scheduler import SchedulerCore
from samebits.core.state import Seat
from samebits.core.watch.hang_culprits import Member, Standstill
from samebits.core.watch.hang_judge import LEAST_PATIENCE_S, TIMEOUTS, HangJudge
from tests.simulation.mix import Naming
from tests.simulation.mutants.mutant import Mutant


def _with_watch(**replaced: Callable[..., Any]) -> type[SchedulerCore]:
    """Return a core whose watch decides these things so; each function is given the watch first."""

    class Changed(SchedulerCore):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self._watch = type("Broken", (HangJudge,), replaced)(self._ledger)

    return Changed


def _blames_all(members: Sequence[Member]) -> Standstill:
    """Blames every worker that stands still, even one that waits for another."""
    return Standstill(tuple((one, Hang.STUCK) for one in members if one.progress and not one.silent_s), ())


def _once_still_always_still(watch: HangJudge, seat: Seat, body: StallReport, said: ReportEnvelope) -> None:
    if body.progress is not None:
        HangJudge.take(watch, seat, body, said)


def _at_whatever_step(watch: HangJudge, node: str) -> Member | None:
    presence, told = watch._ledger.presences.get(node), watch._told.get(node)
    if presence is None or presence.closed_at is not None or told is None:
        return None
    progress = told[1]._replace(still_s=told[1].still_s + watch._ledger.now - told[2])
    return Member(node, presence.step, progress)


def _does_not_look_on(watch: HangJudge, hang: Hang, still_s: float, timeout_s: float, step: int) -> bool:
    return still_s >= watch._patience_s(hang, timeout_s, step)


def _as_soon_as_before(watch: HangJudge, hang: Hang, timeout_s: float, step: int) -> float:
    least_s = 0.0 if watch._ledger.policy.step_timeout_s else LEAST_PATIENCE_S.get(hang, 0.0)
    return max(TIMEOUTS * timeout_s, least_s)


def _without_patience(watch: HangJudge, hang: Hang, timeout_s: float, step: int) -> float:
    return timeout_s / 2


def _nobody_in_rounds(watch: HangJudge, came: Collection[str]) -> None:
    watch.end()


def _ends_nobody(watch: HangJudge, over: object, step: int) -> None:
    return None


class KeepsAilments(SchedulerCore):
    """A dead process's health report applies to its node's next process."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._host_health.forget = self._let_go  # type: ignore[method-assign]

    def _let_go(self, node: str) -> None:
        if self._host_health._leaving == node:
            self._host_health._leaving = ""


class CountsWhoLeft(SchedulerCore):
    """A departed member is still expected, and what it brought into the round counts."""

    def _leave(self, seat: Seat, message: Leave) -> None:
        forget = self._rendezvous.forget
        try:
            self._rendezvous.forget = lambda node: None  # type: ignore[method-assign]
            super()._leave(seat, message)
        finally:
            self._rendezvous.forget = forget  # type: ignore[method-assign]
        if seat.slot is not None and seat.has_left and self._rendezvous.round is not None:
            self._ledger.meet(seat.slot)


class GivesSlotsToWhoLeft(SchedulerCore):
    """A departed spare is taken for a present one."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._world._here = self._spares  # type: ignore[method-assign]

    def _spares(self) -> list[Seat]:
        return [seat for seat in self.state.seats.values() if seat.slot is None and seat.has_left]

    def _give_slots(self, admitted: Seat | None = None) -> None:
        left = {seat.node: None for seat in self._spares()}
        spares, self.state.spares = self.state.spares, left  # type: ignore[misc]
        try:
            super()._give_slots(admitted)
        finally:
            self.state.spares = spares  # type: ignore[misc]


class StaysWhenAsked(AgentCore):
    """A request to leave is ignored."""

    def _hear(self, message: FromScheduler) -> None:
        if not isinstance(message, Depart):
            super()._hear(message)


FIXED_SIZE = {"min_world_size": 3, "max_world_size": 3, "world_size": 3, "spare_num": 0}
QUIET = {**FIXED_SIZE, "is_ordered": True, "p_drop": 0.0, "p_slow": 0.0, "has_stragglers": False, "fsync_s": 0.0}
QUIET |= {"chaos_s": 60.0, "target_step": 60, "step_s": 0.3, "step_timeout_s": 4.0, "ends_stuck": True}
HANGS = {**QUIET, "rates_hz": {"main thread held": 0.1, "main thread pauses": 0.2}}
STOPS = {**QUIET, "rates_hz": {"worker stopped": 0.3, "scheduler stopped": 0.2}}
AGAIN = {**QUIET, "chaos_s": 110.0, "save_every": 100, "commit_every": 100, "cool_down_s": 0.0, "prepares_s": 0.1}
AGAIN |= {"step_s": 0.5, "sweep_s": 2.0, "rates_hz": {"main thread held": 0.3}}
LOSSES = {**QUIET, "rates_hz": {"main thread held": 0.2, "worker killed": 0.1}}
SICK = {**QUIET, "spare_num": 2, "cool_down_s": 0.0, "prepares_s": 1.0, "sweep_s": 2.0, "naming": Naming.SLOTS}
SICK |= {"rates_hz": {"host unwell": 0.1, "worker killed": 0.15}}
SPIKES = {**QUIET, "spare_num": 2, "rates_hz": {"host unwell": 0.01}}
ASKED = {**QUIET, "commit_every": 1, "rates_hz": {"node drained": 0.2}}
LEAVES = {**QUIET, "spare_num": 2, "rates_hz": {"node drained": 0.2, "worker killed": 0.2, "worker terminated": 0.2}}

MUTANTS = (
    Mutant(
        "every worker without progress is ended",
        frozenset({"S22"}),
        30,
        patches={"samebits.core.watch.hang_judge.find_culprits": _blames_all},
        changes=HANGS,
    ),
    Mutant("a pause is a hang", frozenset({"S22"}), 50, _with_watch(_patience_s=_without_patience), changes=HANGS),
    Mutant(
        "a worker that stalled once counts as stalled forever",
        frozenset({"S22", "S23"}),
        100,
        _with_watch(take=_once_still_always_still, _standing_of=_at_whatever_step),
        changes=HANGS | {"save_every": 1},
    ),
    Mutant(
        "a suspended worker counts as hung",
        frozenset({"S22"}),
        200,
        _with_watch(_is_over=_does_not_look_on),
        changes=STOPS,
    ),
    Mutant(
        "one full look is enough",
        frozenset({"S22"}),
        50,
        patches={"samebits.core.watch.health_limits.LOOKS": 1},
        changes=SPIKES,
    ),
    Mutant(
        "a repeated hang is ended as early as the first",
        frozenset({"S23"}),
        100,
        _with_watch(_patience_s=_as_soon_as_before),
        changes=AGAIN,
    ),
    Mutant("a dead process's health problems remain", frozenset({"S22", "S23"}), 100, KeepsAilments, changes=SICK),
    Mutant("a worker that has left is a member", frozenset({"S8", "S24", "crash"}), 50, CountsWhoLeft, changes=LEAVES),
    Mutant("a worker that has left gets a slot", frozenset({"S24"}), 200, GivesSlotsToWhoLeft, changes=LEAVES),
    Mutant("agent: stays when asked to leave", frozenset({"S24"}), 20, agent_type=StaysWhenAsked, changes=ASKED),
    Mutant(
        "a worker held in a round stays",
        frozenset({"L6"}),
        200,
        _with_watch(tick_in_round=_nobody_in_rounds),
        changes=LOSSES,
    ),
    Mutant("no worker is ever ended", frozenset({"L6"}), 50, _with_watch(_end_them=_ends_nobody), changes=HANGS),
)
