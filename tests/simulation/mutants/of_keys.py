"""Builds that lose a change to a key, or make it twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from samebits.core.agent.agent_core import AgentCore
from samebits.core.keys import key_store
from samebits.core.keys.key_store import KeyDeleted, KeyReady, KeyRecord, KeyStore, KeyWritten
from samebits.core.messages import FromScheduler, KeyAnswer, KeyCall
from samebits.core.scheduler import SchedulerCore
from samebits.core.state import Seat
from samebits.core.values import replace
from tests.simulation.mutants.mutant import Mutant


class _DoesTwice(KeyStore):
    """Answers are not kept."""

    def take(self, call: KeyCall) -> KeyReady:
        self.forget_callers_but(())
        return super().take(call)


class WritesNothing(SchedulerCore):
    """Answered changes are not written."""

    def _call_keys(self, seat: Seat, call: KeyCall) -> None:
        super()._call_keys(seat, call)
        self._ledger.ready.key_records.clear()


def _forgets_answers(records: Iterable[KeyRecord], term: int) -> KeyStore:
    return key_store.replay(
        (replace(one, session="") if isinstance(one, KeyWritten | KeyDeleted) else one for one in records), term
    )


class HearsLateCalls(SchedulerCore):
    """A call that was sent to an earlier scheduler is carried out by this one."""

    def _call_keys(self, seat: Seat, call: KeyCall) -> None:
        super()._call_keys(seat, replace(call, term=0))


def _twice_after_a_start(records: Iterable[KeyRecord], term: int) -> KeyStore:
    store = _DoesTwice(term)
    for record in records:
        store.apply(record)
    return store


class BelievesOldAnswers(AgentCore):
    """Answers of a previous scheduler count."""

    def _hear(self, message: FromScheduler) -> None:
        super()._hear(replace(message, term=self.term) if isinstance(message, KeyAnswer) else message)


CALLS: dict[str, Any] = {"calls_every_s": 1.0, "p_duplicate": 0.2, "chaos_s": 40.0, "target_step": 60}
DEATHS = {**CALLS, "p_drop": 0.2, "rates_hz": {"scheduler killed": 0.15, "connection broken": 0.2}}
LATE = {**DEATHS, "is_ordered": False, "has_stragglers": True, "p_slow": 0.2, "slow_s": 10.0}
LATER = {**LATE, "calls_every_s": 0.5, "p_slow": 0.5, "p_duplicate": 0.3, "p_drop": 0.3}
LATER |= {"rates_hz": {"scheduler killed": 0.2, "connection broken": 0.2}}

MUTANTS = (
    Mutant(
        "keys: a repeated call changes the key again",
        frozenset({"S25"}),
        100,
        patches={
            "samebits.core.scheduler.KeyStore": _DoesTwice,
            "samebits.core.scheduler.replay": _twice_after_a_start,
        },
        changes=CALLS,
    ),
    Mutant("keys: calls to an earlier scheduler count", frozenset({"S25"}), 300, HearsLateCalls, changes=LATE),
    Mutant("keys: nothing is written", frozenset({"S25"}), 50, WritesNothing, changes=DEATHS),
    Mutant(
        "keys: answers are not read back",
        frozenset({"S25"}),
        300,
        patches={"samebits.core.scheduler.replay": _forgets_answers},
        changes=DEATHS,
    ),
    Mutant(
        "agent: answers of an earlier scheduler count",
        frozenset({"S25"}),
        100,
        agent_type=BelievesOldAnswers,
        changes=LATER,
    ),
)
