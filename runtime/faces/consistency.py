"""Replicas that are to agree: versions merged, digests judged, and a state chosen where they differ.

``StateSynchronization`` merges by version (``core.key_value.newest``), ``ConsistencyProtocol`` and
``ConsistencyRecovery`` judge by ``core.equality.judge``, as a job does with the digests of its ranks. Values are
compared by their hash (xxh3_128 of what msgpack makes of them); nothing is pickled.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgpack
import xxhash

from runtime.core.equality import Judgement, judge
from runtime.core.key_value import Versioned, newest
from runtime.errors import UnequalError, UsageError

__all__ = ["ConsistencyProtocol", "ConsistencyRecovery", "StateSynchronization", "Strategy"]


class StateSynchronization:
    """Values with versions that several processes change and exchange; a newer value is never lost by a merge."""

    def __init__(self) -> None:
        self._state: dict[bytes, Versioned] = {}

    def update(self, name: str, value: Any) -> int:
        """Set a value; returns its version, one above the last that was seen of this name."""
        key = name.encode()
        version = self._state[key].version + 1 if key in self._state else 1
        self._state[key] = Versioned(_packed(name, value), version)
        return version

    def get(self, name: str, default: Any = None) -> Any:
        """The newest value that is known."""
        held = self._state.get(name.encode())
        return default if held is None else _unpacked(held.value)

    def export(self) -> bytes:
        """All of it, for :meth:`merge` elsewhere: msgpack of name → (value, version)."""
        packed: bytes = msgpack.packb({key: [held.value, held.version] for key, held in self._state.items()})
        return packed

    def merge(self, exported: bytes) -> None:
        """Take in what another process has exported: of each name the higher version stays, of one version the greater
        value, so that the order of merges does not matter.

        Raises:
            UsageError: these are not the bytes of an export; nothing was taken in.
        """
        try:
            found = msgpack.unpackb(exported, raw=True, strict_map_key=False)
            theirs = {bytes(key): Versioned(bytes(value), _version(version)) for key, (value, version) in found.items()}
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise UsageError(f"StateSynchronization.merge: these are not the bytes of an export ({error})") from None
        ties = {
            key: max(held, theirs[key])
            for key, held in self._state.items()
            if key in theirs and theirs[key].version == held.version
        }
        self._state = newest(self._state | ties, theirs)


class Strategy(enum.StrEnum):
    """Whose state stands where replicas differ."""

    MAJORITY = "majority"  # that of more than half
    LEADER = "leader"  # that of the lowest rank, or of the one that is named
    DEFAULT = "default"  # the majority's; without one the leader's


class ConsistencyProtocol:
    """Whether replicas agree, by rank."""

    def check(self, states: Mapping[int, Any]) -> Judgement:
        """The ranks that agree with each other, the largest group first."""
        return judge({rank: _digest(rank, state) for rank, state in states.items()})

    def require_equal(self, states: Mapping[int, Any]) -> None:
        """:class:`UnequalError` where they do not, with the ranks that differ."""
        judgement = self.check(states)
        if not judgement.is_equal:
            alike, *odd = judgement.groups
            names = "; ".join(f"rank {', '.join(map(str, group))}" for group in odd)
            raise UnequalError(f"{names} differs from rank {', '.join(map(str, alike))}")


class ConsistencyRecovery:
    """Choose a state where replicas differ.

    Args:
        strategy: ``majority``, ``leader`` or ``default``.
        leader: whose state ``leader`` takes; None: the lowest rank's.
    """

    def __init__(self, strategy: str | Strategy = Strategy.DEFAULT, *, leader: int | None = None) -> None:
        if strategy not in tuple(Strategy):
            raise UsageError(
                f"ConsistencyRecovery(strategy={strategy!r}): expected {', '.join(Strategy)}. Fix: name one of them"
            )
        self.strategy = Strategy(strategy)
        self._leader = leader

    def recover(self, states: Mapping[int, Any]) -> Any:
        """The state that all are to take.

        Raises:
            UsageError: there is none, or the leader's is missing.
            UnequalError: the strategy is ``majority``, and no more than half agree.
        """
        judgement = ConsistencyProtocol().check(states)
        if not judgement.groups:
            raise UsageError("ConsistencyRecovery.recover: no states were given")
        if self.strategy is not Strategy.LEADER and judgement.has_majority:
            return states[judgement.groups[0][0]]
        if self.strategy is Strategy.MAJORITY:
            groups = " against ".join(f"rank {', '.join(map(str, group))}" for group in judgement.groups)
            raise UnequalError(f"no majority: {groups}. Fix: take a checkpoint that all held, or strategy='leader'")
        leader = min(states) if self._leader is None else self._leader
        if leader not in states:
            raise UsageError(f"ConsistencyRecovery.recover: rank {leader}, the leader, has given no state")
        return states[leader]


def _digest(rank: int, state: Any) -> bytes:
    return xxhash.xxh3_128_digest(_packed(f"the state of rank {rank}", state))


def _packed(name: str, value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(_in_order(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{name}: {error}. Fix: give plain values (numbers, texts, bytes, lists, dicts); of a tensor its bytes, as "
            "tensor.numpy().tobytes()"
        ) from None
    return packed


def _in_order(value: Any) -> Any:
    """Dicts by their keys: two that are equal are packed alike."""
    if isinstance(value, Mapping):
        return {key: _in_order(value[key]) for key in sorted(value, key=lambda key: (str(type(key)), key))}
    return [_in_order(one) for one in value] if isinstance(value, list | tuple) else value


def _unpacked(packed: bytes) -> Any:
    return msgpack.unpackb(packed, strict_map_key=False)


def _version(version: Any) -> int:
    if type(version) is not int or version < 1:
        raise ValueError(f"a version of {version!r}")
    return version
