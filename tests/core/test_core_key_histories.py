"""Key-value histories under losses, repeats, kills and partitions are linearizable, and every call returns.

The checker is tested too: it catches five broken builds and impossible small histories.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from samebits.core.agent.agent_events import KeyAsk
from samebits.core.agent.key_calls import KeyCalls
from samebits.core.keys import key_store
from samebits.core.keys.key_store import KeyDeleted, KeyReady, KeyRecord, KeyStore, KeyWritten
from samebits.core.messages import KeyAnswer, KeyCall, KeyOp, KeyOutcome
from samebits.core.values import replace
from tests.core.key_world import Build, Unanswered, World
from tests.core.linearizability import NEVER, Called, is_linearizable

SEEDS = 300
MUTANT_SEEDS = 600


def violation(seed: int, *, is_durable: bool, build: Build | None = None) -> str:
    """Return what is wrong in this run, or an empty string."""
    world = World(seed, is_durable=is_durable, build=build)
    try:
        history = world.run()
    except Unanswered as error:
        return f"seed {seed}: {error}"
    broken = [key for key, calls in history.items() if not is_linearizable(calls)]
    return f"seed {seed}: no order of the calls to {broken} gives their answers" if broken else ""


@pytest.mark.parametrize("is_durable", [True, False], ids=["durable, scheduler killed", "volatile"])
def test_every_history_is_linearizable(is_durable: bool) -> None:
    assert [found for seed in range(SEEDS) if (found := violation(seed, is_durable=is_durable))] == []


def test_runs_are_long_enough_to_be_meaningful() -> None:
    kills = lost = repeated = unanswered = 0
    outcomes = set()
    for seed in range(40):
        world = World(seed, is_durable=True)
        calls = [call for calls in world.run().values() for call in calls]
        kills, lost, repeated = kills + world.kills, lost + world.lost, repeated + world.repeated
        unanswered += sum(call.answer is None and call.ask.op is not KeyOp.WAIT for call in calls)
        outcomes |= {(call.ask.op, call.answer.outcome) for call in calls if call.answer is not None}
    assert min(kills, lost, repeated, unanswered) > 20, (kills, lost, repeated, unanswered)
    assert {op for op, outcome in outcomes if outcome is KeyOutcome.DONE} == set(KeyOp)
    assert (KeyOp.COMPARE_AND_SET, KeyOutcome.DIFFERS) in outcomes


# ---- broken builds


class _DoesTwice(KeyStore):
    def take(self, call: KeyCall) -> KeyReady:
        self.forget_callers_but(())
        return super().take(call)


class _ForgetsThatNothingWasDone(KeyStore):
    def take(self, call: KeyCall) -> KeyReady:
        ready = super().take(call)
        for answer in ready.answers:
            if answer.outcome is not KeyOutcome.DONE:
                self._callers[answer.session].answers.pop(answer.number, None)
        return ready


class _NotDurableAgain(KeyStore):
    """A call without durability makes a durable key volatile."""

    def take(self, call: KeyCall) -> KeyReady:
        if not call.is_durable and call.op is not KeyOp.DELETE:
            self._durable.pop(call.key, None)
        return super().take(call)


class _HearsLateCalls(KeyStore):
    """A call that was sent to an earlier scheduler is carried out by this one."""

    def take(self, call: KeyCall) -> KeyReady:
        return super().take(replace(call, term=0))


def _hears_late_calls(records: list[KeyRecord], term: int) -> KeyStore:
    store = _HearsLateCalls(term)
    for record in records:
        store.apply(record)
    return store


def _reads_no_answers(records: list[KeyRecord], term: int) -> KeyStore:
    return key_store.replay(
        (replace(one, session="") if isinstance(one, KeyWritten | KeyDeleted) else one for one in records), term
    )


def _not_durable_again(records: list[KeyRecord], term: int) -> KeyStore:
    store = _NotDurableAgain(term)
    for record in records:
        store.apply(record)
    return store


def _counts_anew(records: list[KeyRecord], term: int) -> KeyStore:
    store = KeyStore(term)
    store._version = 0
    for record in records:
        store.apply(record)
    return store


class _FloorTooHigh(KeyCalls):
    def _floor(self) -> int:
        return self._last + 1


MUTANTS = {
    "a repeated call changes the key again": Build(store=_DoesTwice, reads=lambda _, term: _DoesTwice(term)),
    "a late repeat does what was not done": Build(store=_ForgetsThatNothingWasDone),
    "a call to an earlier scheduler counts": Build(reads=_hears_late_calls),
    "answers are not read back": Build(reads=_reads_no_answers),
    "it speaks before it saves": Build(speaks_first=True),
    "an answer of an earlier scheduler counts": Build(takes_old_answers=True),
    "a durable key becomes volatile again": Build(store=_NotDurableAgain, reads=_not_durable_again),
    "versions restart with the scheduler": Build(reads=_counts_anew),
    "a caller lets go of answers that it lacks": Build(calls=_FloorTooHigh),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_build_is_caught(name: str) -> None:
    found = (violation(seed, is_durable=True, build=MUTANTS[name]) for seed in range(MUTANT_SEEDS))
    assert any(found), name


# ---- the checker by itself

ONE, TWO = msgspec.msgpack.encode(1), msgspec.msgpack.encode(2)


def call(op: KeyOp, began: int, ended: int | None, version: int = 0, value: bytes = b"", **ask: int | bytes) -> Called:
    outcome = KeyOutcome.DONE if version else KeyOutcome.ABSENT
    answer = None if ended is None else KeyAnswer("s", 1, 1, outcome, version, value)
    return Called(KeyAsk(op, b"k", **ask), began, NEVER if ended is None else ended, answer)  # type: ignore[arg-type]


NO_KEY_GIVES: dict[str, list[Called]] = {
    "a stale read": [
        call(KeyOp.ADD, 1, 2, 5, ONE, amount=1),
        call(KeyOp.GET, 3, 4),
    ],
    "the same sum twice": [
        call(KeyOp.ADD, 1, 4, 5, ONE, amount=1),
        call(KeyOp.ADD, 2, 3, 6, ONE, amount=1),
    ],
    "a read that goes back": [
        call(KeyOp.ADD, 1, 9, 5, ONE, amount=1),
        call(KeyOp.GET, 2, 3, 5, ONE),
        call(KeyOp.GET, 4, 5),
    ],
    "a version that falls": [
        call(KeyOp.ADD, 1, 2, 5, ONE, amount=1),
        call(KeyOp.ADD, 3, 4, 4, TWO, amount=1),
    ],
    "a change that was seen and is gone": [
        call(KeyOp.ADD, 1, None, amount=1),
        call(KeyOp.GET, 2, 3, 5, ONE),
        call(KeyOp.GET, 4, 5),
    ],
}


@pytest.mark.parametrize("name", NO_KEY_GIVES)
def test_checker_rejects_impossible_histories(name: str) -> None:
    assert not is_linearizable(NO_KEY_GIVES[name])


def test_checker_accepts_possible_histories() -> None:
    assert is_linearizable([call(KeyOp.ADD, 1, 4, 5, ONE, amount=1), call(KeyOp.GET, 2, 3)])
    assert is_linearizable([call(KeyOp.ADD, 1, 4, 6, TWO, amount=1), call(KeyOp.ADD, 2, 3, 5, ONE, amount=1)])
    assert is_linearizable([call(KeyOp.ADD, 1, None, amount=1), call(KeyOp.GET, 2, 3), call(KeyOp.GET, 4, 5, 7, ONE)])


def test_unanswered_call_may_take_effect_at_any_time_or_never() -> None:
    lost: Callable[[], Called] = lambda: call(KeyOp.ADD, 1, None, amount=1)  # noqa: E731
    assert is_linearizable([lost(), call(KeyOp.GET, 2, 3)])
    assert is_linearizable([lost(), call(KeyOp.GET, 2, 3, 9, ONE)])
    assert is_linearizable([lost(), call(KeyOp.ADD, 2, 3, 9, ONE, amount=1), call(KeyOp.GET, 4, 5, 12, TWO)])
    assert not is_linearizable([lost(), call(KeyOp.GET, 2, 3, 9, TWO)])
