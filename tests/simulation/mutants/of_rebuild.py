"""Cores that rebuild a lost journal from the wrong reports or with the wrong content."""

from __future__ import annotations

from collections.abc import Iterable

from samebits.core.membership.rebuild import Agreement, _in_agreement
from samebits.core.messages import Register
from samebits.core.point import Cut
from samebits.core.records import JobRebuilt, Record
from samebits.core.scheduler import SchedulerCore
from samebits.core.values import replace
from tests.simulation.mix import Naming
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.of_core import _write_with


def _whatever_their_generation(reports: Iterable[Register]) -> dict[Agreement, dict[int, Register]]:
    """Accepts members of any generation for the last one, the earliest for each rank."""
    merged: dict[tuple[str, int], tuple[Agreement, dict[int, Register]]] = {}
    by_generation = sorted(_in_agreement(reports).items(), key=lambda entry: entry[0].generation)
    for said, members in by_generation:
        _, earlier = merged.get((said.job, said.world_size), (said, {}))
        merged[said.job, said.world_size] = said, {**members, **earlier}
    return dict(merged.values())


def _with_new_incarnations(record: Record) -> Record:
    """Makes every process the first of its node."""
    if not isinstance(record, JobRebuilt):
        return record
    return replace(record, seats=tuple(replace(seat, incarnation=1) for seat in record.seats))


def _with_an_old_term(record: Record) -> Record:
    """Gives rounds and generations the numbers of an earlier scheduler's."""
    return replace(record, term=1) if isinstance(record, JobRebuilt) else record


def _on_another_line(record: Record) -> Record:
    """Counts everything the last generation's predecessors did, wherever it started."""
    if not isinstance(record, JobRebuilt):
        return record
    line = tuple(Cut(number, 2**62) for number in range(1, record.generation.generation))
    return replace(record, generation=replace(record.generation, line=line))


WIPES = {"rebuilds": True, "chaos_s": 60.0, "target_step": 100}
WIPES |= {"rates_hz": {"recovery path wiped": 1 / 10, "worker killed": 1 / 15, "scheduler killed": 1 / 30}}

"""Processes that were replaced while stopped or cut off are present when a journal is lost."""
REPLACED = {**WIPES, "chaos_s": 200.0, "target_step": 300, "naming": Naming.NAMES, "spare_num": 2, "world_size": 3}
REPLACED |= {"min_world_size": 3, "max_world_size": 3, "p_drop": 0.0, "p_slow": 0.0, "p_duplicate": 0.0}
REPLACED |= {"rates_hz": {"recovery path wiped": 1 / 20, "worker stopped": 1 / 4, "partition": 1 / 8}}


class BeginsMeanwhile(SchedulerCore):
    """The first arrivals start another job while members of an earlier one report."""

    def _start_deadline(self) -> float | None:
        return self._world.start_deadline(self._ending.filling_since(), len(self._admission.pending))


ELASTIC = {
    **WIPES,
    "world_size": 3,
    "min_world_size": 1,
    "max_world_size": 4,
    "start_grace_s": 0.0,
    "naming": Naming.NAMES,
}

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rebuild: one member speaks for all",
        frozenset({"S15"}),
        100,
        patches={"samebits.core.membership.rebuild._is_majority": lambda said, reports: True},
        changes=WIPES,
    ),
    Mutant(
        "rebuild: members of any generation agree",
        frozenset({"S15"}),
        100,
        patches={"samebits.core.membership.rebuild._in_agreement": _whatever_their_generation},
        changes=REPLACED,
    ),
    Mutant(
        "rebuild: incarnations restart at 1",
        frozenset({"L1", "S5", "S6", "S15"}),
        100,
        _write_with(_with_new_incarnations),
        changes=WIPES,
    ),
    Mutant(
        "rebuild: an old term",
        frozenset({"S4", "S15", "L1", "S12"}),
        100,
        _write_with(_with_an_old_term),
        changes=WIPES,
    ),
    Mutant(
        "rebuild: new workers start another job meanwhile", frozenset({"crash"}), 300, BeginsMeanwhile, changes=ELASTIC
    ),
    Mutant("rebuild: another line", frozenset({"S15", "S10", "S9"}), 300, _write_with(_on_another_line), changes=WIPES),
)
