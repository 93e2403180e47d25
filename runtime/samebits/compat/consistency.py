"""Merge versioned values of replicas, compare replicas' states, and choose one if they differ.

``StateSynchronization`` merges by version (``core.keys.key_store.newest``). ``ConsistencyProtocol`` and
``ConsistencyRecovery`` use ``core.watch.equality.judge``, as a job does with the digests of its ranks. States are
compared by the xxh3_128 hash of their msgpack encoding; nothing is pickled or evaluated.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgpack
import xxhash

from samebits.core.keys.key_store import StoredValue, newest
from samebits.core.watch.equality import Judgement, differs, judge, ranks_of
from samebits.errors import UnequalError, UsageError

MAX_SERIALIZED_BYTES = 1 << 30
"""``deserialize_state`` refuses larger data, so that a wrong file does not fill the memory."""


class Replica(Protocol):
    """A node whose state can be read and set."""

    def get_state(self) -> Any:
        """Return the state, which consists of plain values."""

    def set_state(self, state: Any) -> Any:
        """Replace the state with this one."""


class StateSynchronization:
    """Hold named values that several processes change and exchange.

    Each value has a version, so a merge never loses a newer value. Values must be types that msgpack can encode:
    numbers, strings, bytes, and lists and dicts of these. Any other type raises ``UsageError``.

    Attributes:
        version: increases with every change; after :meth:`sync_state`, at least the other process's version.

    Example::

        ours, theirs = samebits.StateSynchronization(), samebits.StateSynchronization()
        ours.update("lr", 0.1)
        theirs.merge(ours.export())
        assert theirs.get("lr") == 0.1
    """

    def __init__(self) -> None:
        self._state: dict[bytes, StoredValue] = {}
        self.version = 0

    @property
    def state(self) -> dict[str, Any]:
        """All values."""
        return {key.decode(): _unpacked(held.value) for key, held in self._state.items()}

    def update_state(self, key: str, value: Any) -> None:
        """Set a value, like :meth:`update`."""
        self.update(key, value)

    def get_state(self, key: str) -> Any:
        """Return a value, or None if it is not set."""
        return self.get(key)

    def sync_state(self, other_state: Mapping[str, Any]) -> None:
        """Adopt another process's values.

        New names are always adopted, existing ones only if ``"version"`` is above this object's version. Use
        :meth:`merge` if both processes have changed values: it compares the version of each name.

        Args:
            other_state: the other process's values and version: ``{**other.state, "version": other.version}``.

        Raises:
            UsageError: ``"version"`` is missing or not a number.
        """
        theirs = other_state.get("version")
        if type(theirs) is not int or theirs < 0:
            raise UsageError(
                f"StateSynchronization.sync_state: 'version' is {theirs!r}, expected the number of changes. Fix: "
                "sync_state({**other.state, 'version': other.version})"
            )
        mine = self.version
        for key, value in other_state.items():
            if key != "version" and (theirs > mine or key.encode() not in self._state):
                self.update(key, value)
        self.version = max(mine, theirs)

    def serialize_state(self) -> bytes:
        """Return all values and versions as msgpack, for :meth:`deserialize_state`."""
        packed: bytes = msgpack.packb([self.version, self.export()])
        return packed

    def deserialize_state(self, serialized: bytes) -> None:
        """Replace all values with those that :meth:`serialize_state` returned.

        Raises:
            UsageError: these are different bytes, or more than 1 GiB; nothing was changed.
        """
        if len(serialized) > MAX_SERIALIZED_BYTES:
            raise UsageError(f"StateSynchronization.deserialize_state: {len(serialized)} bytes are more than 1 GiB")
        try:
            version, exported = msgpack.unpackb(serialized)
            if type(version) is not int or version < 0 or not isinstance(exported, bytes):
                raise ValueError("it has a different shape")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise UsageError(
                f"StateSynchronization.deserialize_state: these are not the bytes of serialize_state() ({error})"
            ) from None
        loaded = StateSynchronization()
        loaded.merge(exported)
        self._state, self.version = loaded._state, version

    def update(self, name: str, value: Any) -> int:
        """Set a value and return its version, which is one above the last version of this name."""
        key = name.encode()
        version = self._state[key].version + 1 if key in self._state else 1
        self._state[key] = StoredValue(_packed(name, value), version)
        self.version += 1
        return version

    def get(self, name: str, default: Any = None) -> Any:
        """Return the newest known value of a name, or ``default``."""
        held = self._state.get(name.encode())
        return default if held is None else _unpacked(held.value)

    def export(self) -> bytes:
        """Return all values and versions as msgpack (name → [value, version]), for :meth:`merge`."""
        packed: bytes = msgpack.packb({key: [held.value, held.version] for key, held in self._state.items()})
        return packed

    def merge(self, exported: bytes) -> None:
        """Merge the values that another process has exported.

        The higher version of each name wins, and the greater encoded value if versions are equal, so that the order of
        merges does not matter.

        Raises:
            UsageError: ``exported`` is not the bytes of an export; nothing was changed.
        """
        try:
            found = msgpack.unpackb(exported, raw=True, strict_map_key=False)
            theirs = {
                bytes(key): StoredValue(bytes(value), _version(version)) for key, (value, version) in found.items()
            }
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise UsageError(f"StateSynchronization.merge: these are not the bytes of an export ({error})") from None
        ties = {
            key: max(held, theirs[key])
            for key, held in self._state.items()
            if key in theirs and theirs[key].version == held.version
        }
        self._state = newest(self._state | ties, theirs)
        self.version = max(self.version, sum(held.version for held in self._state.values()))


class Strategy(enum.StrEnum):
    """Which state all replicas take if their states differ."""

    MAJORITY = "majority"  # the state of more than half of the replicas
    LEADER = "leader"  # the state of the lowest rank, or of the given leader
    DEFAULT = "default"  # the majority's state or, without a majority, the leader's


class ConsistencyProtocol:
    """Compare the states, or the sequence numbers, of replicas.

    States are compared by an xxh3_128 hash of their msgpack encoding; pass a tensor as ``tensor.numpy().tobytes()``.

    Args:
        capacity: number of node ids, starting at 0, for which sequence numbers are kept.

    Raises:
        UsageError: ``capacity`` is below 1.

    Example::

        protocol = samebits.ConsistencyProtocol()
        found = protocol.check({0: b"weights", 1: b"weights", 2: b"other"})
        assert found.groups == ((0, 1), (2,)) and found.has_majority
    """

    def __init__(self, capacity: int = 65536) -> None:
        if capacity < 1:
            raise UsageError(f"ConsistencyProtocol(capacity={capacity!r}): expected a number of nodes, 1 or more")
        self._capacity = capacity
        self._numbers: dict[int, int] = {}

    def get_sequence_number(self, node_id: int) -> int:
        """Return the node's sequence number; 0 if there is none."""
        return self._numbers.get(node_id, 0)

    def update_sequence_number(self, node_id: int, sequence_number: int) -> int:
        """Set a node's sequence number; return 0, or -1 if ``node_id`` is beyond ``capacity``."""
        if not 0 <= node_id < self._capacity:
            return -1
        self._numbers[node_id] = sequence_number
        return 0

    def check_consistency(self) -> bool:
        """Return whether all nodes that have a sequence number have the same one."""
        return len(set(self._numbers.values())) <= 1

    def check(self, states: Mapping[int, Any]) -> Judgement:
        """Group the ranks whose states are equal.

        The result has ``groups`` (tuples of ranks, the largest first), ``is_equal`` and ``has_majority``.

        Raises:
            UsageError: a state cannot be encoded.
        """
        return judge({rank: _digest(rank, state) for rank, state in states.items()})

    def require_equal(self, states: Mapping[int, Any]) -> None:
        """Raise unless all states are equal.

        Raises:
            UnequalError: the states differ; the message names the ranks.
        """
        judgement = self.check(states)
        if not judgement.is_equal:
            alike, *odd = judgement.groups
            names, differ = "; ".join(map(ranks_of, odd)), differs(rank for group in odd for rank in group)
            raise UnequalError(f"{names} {differ} from {ranks_of(alike)}")


class ConsistencyRecovery:
    """Choose the state that all replicas should take if they differ.

    Args:
        strategy: ``"majority"``: the state of more than half of the ranks; ``"leader"``: the state of one rank;
            ``"default"``: the majority's state, or the leader's if there is no majority.
        leader: rank of the leader; None for the lowest rank.

    Raises:
        UsageError: the strategy is unknown.

    Example::

        recovery = samebits.ConsistencyRecovery("majority")
        assert recovery.recover({0: b"weights", 1: b"weights", 2: b"other"}) == b"weights"
    """

    def __init__(self, strategy: str | Strategy = Strategy.MAJORITY, *, leader: int | None = None) -> None:
        if strategy not in tuple(Strategy):
            raise UsageError(
                f"ConsistencyRecovery(strategy={strategy!r}): expected {', '.join(Strategy)}. Fix: name one of them"
            )
        self.strategy = Strategy(strategy)
        self._leader = leader

    @property
    def recovery_strategy(self) -> str:
        """The strategy, as a string; it can be set."""
        return self.strategy

    @recovery_strategy.setter
    def recovery_strategy(self, strategy: str) -> None:
        self.strategy = ConsistencyRecovery(strategy).strategy

    def recover_consistency(self, nodes: Sequence[Replica]) -> bool:
        """Choose a state like :meth:`recover`, give each node a copy, and return True.

        Args:
            nodes: objects with ``get_state()`` and ``set_state(state)``; their indices are the ranks.

        Raises:
            UsageError, UnequalError: as for :meth:`recover`; no node was changed.
        """
        chosen = self.recover({rank: node.get_state() for rank, node in enumerate(nodes)})
        for node in nodes:
            node.set_state(copy.deepcopy(chosen))
        return True

    def recover(self, states: Mapping[int, Any]) -> Any:
        """Return the state that all ranks should take.

        Raises:
            UsageError: no states were given, or the leader's is missing.
            UnequalError: the strategy is ``majority``, and no state is that of more than half of the ranks.
        """
        judgement = ConsistencyProtocol().check(states)
        if not judgement.groups:
            raise UsageError("ConsistencyRecovery.recover: no states were given")
        if self.strategy is not Strategy.LEADER and judgement.has_majority:
            return states[judgement.groups[0][0]]
        if self.strategy is Strategy.MAJORITY:
            groups = " against ".join(map(ranks_of, judgement.groups))
            raise UnequalError(
                f"no majority: {groups}. Fix: restore a checkpoint that all ranks saved, or use strategy='leader'"
            )
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
            f"{name}: {error}. Fix: give plain values (numbers, strings, bytes, lists, dicts); for a tensor, give "
            "tensor.numpy().tobytes()"
        ) from None
    return packed


def _in_order(value: Any) -> Any:
    """Sort dicts by their keys, so that equal dicts have equal encodings."""
    if isinstance(value, Mapping):
        return {key: _in_order(value[key]) for key in sorted(value, key=lambda key: (str(type(key)), key))}
    return [_in_order(one) for one in value] if isinstance(value, list | tuple) else value


def _unpacked(packed: bytes) -> Any:
    return msgpack.unpackb(packed, strict_map_key=False)


def _version(version: Any) -> int:
    if type(version) is not int or version < 1:
        raise ValueError(f"a version of {version!r}")
    return version
