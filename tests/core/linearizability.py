"""Check whether a history of calls to one object, such as a key, is linearizable (Wing and Gong, 1993).

A history lists each call with its caller, its times and its answer. A call that returned before another began must
precede it in the order. A call without an answer may have taken effect at any later time, or never. A key's
versions are checked too: they rise, and a compare-and-set succeeds exactly if its version is the key's.

The search is depth first over (placed calls, state) and remembers dead ends (Lowe, "Testing for Linearizability",
2017).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from samebits.core.agent.agent_events import KeyAsk
from samebits.core.messages import KeyAnswer, KeyOp, KeyOutcome

NEVER = 1 << 60


class Call(Protocol):
    """One call: its start and its end. The answer is None if there was none."""

    began: int
    ended: int

    @property
    def answer(self) -> object: ...


_State = TypeVar("_State", bound=Hashable)
_Call = TypeVar("_Call", bound=Call)


@dataclass(slots=True)
class Called:
    """One call: its start, its end and its answer. The answer is None if there was none."""

    ask: KeyAsk
    began: int
    ended: int = NEVER
    answer: KeyAnswer | None = None


class Key(NamedTuple):
    """The key's state; None if absent. While no caller has seen the version, it is only known to exceed ``version``."""

    value: bytes | None = None
    version: int = 0
    is_known: bool = True

    def at(self, version: int) -> Key | None:
        """Return the key with this version, or None if the key cannot have it."""
        if self.is_known:
            return self if version == self.version else None
        return Key(self.value, version) if version > self.version else None


def is_linearizable(calls: Sequence[Called]) -> bool:
    """Return whether a single key can have given these answers."""
    return has_order(calls, Key(), _after)


def has_order(calls: Sequence[_Call], first: _State, after: Callable[[_State, _Call], Iterator[_State]]) -> bool:
    """Return whether some order of the calls explains their answers.

    Args:
        calls: the history of one object.
        first: the object's state before all calls.
        after: returns the possible states after a call, or nothing if the call cannot have been answered so.
    """
    history = sorted(calls, key=lambda call: call.began)
    must = sum(1 << index for index, call in enumerate(history) if call.answer is not None)
    seen: set[tuple[int, _State]] = set()
    stack: list[tuple[int, _State]] = [(0, first)]
    while stack:
        placed, state = stack.pop()
        if placed & must == must:
            return True
        if (placed, state) in seen:
            continue
        seen.add((placed, state))
        left = [(index, call) for index, call in enumerate(history) if not placed >> index & 1]
        first_end = min(call.ended for _, call in left)
        for index, call in left:
            if call.began > first_end:
                break
            stack += ((placed | 1 << index, following) for following in after(state, call))
    return False


def _after(key: Key, call: Called) -> Iterator[Key]:
    """Return the possible states after this call, or nothing if it cannot have been answered so."""
    ask, answer = call.ask, call.answer
    if answer is None:
        yield from _after_unanswered(key, ask)
        return
    if answer.outcome is KeyOutcome.ABSENT:
        if key.value is None:
            yield key
        return
    if answer.outcome is KeyOutcome.DIFFERS and answer.version == 0:
        if key.value is None and ask.version:
            yield key
        return
    if answer.outcome is KeyOutcome.DIFFERS or ask.op in (KeyOp.GET, KeyOp.WAIT):
        now = None if key.value is None else key.at(answer.version)
        if now is not None and _allows(now, ask, answer):
            yield now
        return
    before: Key | None = key
    if ask.op is KeyOp.COMPARE_AND_SET or (ask.op is KeyOp.DELETE and ask.version):
        before = (key if ask.version == 0 else None) if key.value is None else key.at(ask.version)
    if before is None or answer.version <= before.version or (ask.op is KeyOp.DELETE and key.value is None):
        return
    value = _written(before, ask)
    if ask.op is not KeyOp.ADD or value == answer.value:
        yield Key(value, answer.version)


def _allows(now: Key, ask: KeyAsk, answer: KeyAnswer) -> bool:
    if answer.outcome is KeyOutcome.DIFFERS:
        return answer.version != ask.version
    return now.value == answer.value and (ask.op is KeyOp.GET or answer.version > ask.version)


def _after_unanswered(key: Key, ask: KeyAsk) -> Iterator[Key]:
    match ask.op:
        case KeyOp.GET | KeyOp.WAIT:
            yield key
        case KeyOp.COMPARE_AND_SET if key.value is None and ask.version:
            yield key
        case KeyOp.COMPARE_AND_SET | KeyOp.DELETE if key.value is not None and (
            ask.version or ask.op is KeyOp.COMPARE_AND_SET
        ):
            if (before := key.at(ask.version)) is not None:
                yield Key(_written(before, ask), before.version, is_known=False)
            if not key.is_known or key.version != ask.version:
                yield key
        case KeyOp.DELETE if key.value is None:
            yield key
        case _:
            yield Key(_written(key, ask), key.version, is_known=False)


def _written(key: Key, ask: KeyAsk) -> bytes | None:
    if ask.op is KeyOp.DELETE:
        return None
    if ask.op is KeyOp.ADD:
        return msgspec.msgpack.encode(ask.amount + (0 if key.value is None else msgspec.msgpack.decode(key.value)))
    return ask.value
