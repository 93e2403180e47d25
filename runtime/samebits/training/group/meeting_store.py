"""A ``Store`` that needs a single exchange, in which the ranks of a generation learn each other's addresses.

All keys that a rank sets while its group forms are known before it has to read any. Each rank therefore sends its keys
in one message, and all ranks read from memory. Later keys (``dist.new_group`` in a user's function, NCCL's IDs) cannot
be known in advance. Rank 0 stores them (``generation_store``), and its message contains the address and password for
requesting them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgpack
from torch._C._distributed_c10d import Store

from samebits.errors import CommunicationError
from samebits.training.group.breaker import Breaker, run_breakable
from samebits.training.group.generation_store import KeyServer, RemoteKeys
from samebits.training.group.gloo import Address, Endpoints, address_in

__all__ = ["Exchange", "MeetingStore"]


class Exchange(Protocol):
    """Distributes the single message that each rank of a generation sends to all others."""

    def publish(self, blob: bytes) -> None:
        """Send this rank's contribution; called once."""

    def wait(self) -> Sequence[bytes]:
        """Wait until every rank's message has arrived, and return the messages in rank order.

        Raises:
            GenerationEndedError: the generation was cancelled meanwhile.
        """


class MeetingStore(Store):
    """The store of one generation. Keys set before the first read are in the message; later keys are stored by rank 0.

    Args:
        exchange: carries the message.
        rank: this process's rank, 0-based.
        world_size: messages to expect.
        address: where rank 0 listens for requests of later keys: a numeric IP address of this host.
        breaker: ends waits for later keys.
        endpoints: collects every address seen, so that its connections can be cut.
        timeout: default timeout of waits for later keys.
        info: this rank's own data, in addition to what gloo and torch set.
        meshes: number of gloo meshes that are begun with this store; each sets one key before it reads any.

    Attributes:
        all_info: every rank's ``info``, by rank, after the meeting.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        world_size: int,
        address: str,
        breaker: Breaker,
        endpoints: Endpoints,
        timeout: timedelta,
        info: bytes = b"",
        meshes: int = 0,
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._info = info
        self.all_info: list[bytes] = []
        self._rank = rank
        self._world_size = world_size
        self._listen_address = address
        self._breaker = breaker
        self._endpoints = endpoints
        self._timeout = timeout
        self._lock = threading.Lock()
        self._own: dict[str, bytes] = {}
        self._awaited = meshes
        self._has_changed = threading.Condition(self._lock)
        self._published = False
        self._union: dict[str, bytes] | None = None
        self._later: RemoteKeys | None = None

    def meet(self) -> dict[str, bytes]:
        """Publish the keys that were set so far, once, and return those of all ranks."""
        with self._lock:
            while self._union is None and len(self._own) < self._awaited:
                self._has_changed.wait()
            if self._union is None:
                self._breaker.check()
                if self._published:
                    raise CommunicationError(f"the meeting of {self._breaker.name} failed")
                server = self._listen_for_later() if self._rank == 0 and self._world_size > 1 else None
                self._published = True
                later = None if self._later is None else self._later.words
                self._exchange.publish(msgpack.packb({"keys": self._own, "later": later, "words": self._info}))
                if server is not None:
                    server.start()
                self._union = self._read(self._exchange.wait())
        return self._union

    def await_one_less(self) -> None:
        """Do not wait for the key of a mesh that has failed."""
        with self._lock:
            self._awaited -= 1
            self._has_changed.notify_all()

    def _read(self, blobs: Sequence[bytes]) -> dict[str, bytes]:
        if len(blobs) != self._world_size:
            raise CommunicationError(
                f"the meeting of {self._breaker.name} brought {len(blobs)} messages, expected {self._world_size}"
            )
        union: dict[str, bytes] = {}
        for rank, blob in enumerate(blobs):
            message: dict[str, Any] = msgpack.unpackb(blob)
            union.update(message["keys"])
            self.all_info.append(bytes(message["words"]))
            if rank == 0 != self._rank:
                self._later = RemoteKeys.from_words(message["later"])
                self._endpoints.peers.add(self._later.address)
        for key, value in union.items():
            self._note(value, self._endpoints.own if key in self._own else self._endpoints.peers)
        return union

    def _note(self, value: bytes, where: set[Address]) -> None:
        address = address_in(value)
        if address is not None:
            where.add(address)

    # --- later keys -----------------------------------------------------------------------------------------------

    def _listen_for_later(self) -> KeyServer:
        server = KeyServer(self._listen_address, self._breaker)
        self._endpoints.own.add(server.address)
        self._later = RemoteKeys(server.address, server.password)
        return server

    def _ask(self, what: str, keys: list[str], *words: bytes | int, timeout: timedelta | None = None) -> Any:
        self.meet()
        with self._lock:
            if self._later is None:  # a world of one has no other rank to announce the server to
                self._listen_for_later().start()
            assert self._later is not None
            later, limit = self._later, timeout or self._timeout
        return run_breakable(self._breaker, lambda: later.ask(limit, what, keys, *words), "samebits-store")

    # --- dist.Store -----------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Before the meeting, add the key to this rank's message; afterwards, set it in rank 0's store."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            if self._union is None:
                self._own[key] = data
                self._has_changed.notify_all()
                return
        self._note(data, self._endpoints.own)
        self._ask("set", [key], data)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        union = self.meet()
        if key in union:
            return union[key]
        value = bytes(self._ask("get", [key]))
        self._note(value, self._endpoints.peers)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys exist."""
        union = self.meet()
        missing = [key for key in keys if key not in union]
        if missing:
            self._ask("wait", missing, timeout=timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        union = self.meet()
        missing = [key for key in keys if key not in union]
        return not missing or bool(self._ask("check", missing))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: the ``multi_`` calls are supported."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a counter in rank 0's store, and return its new value."""
        return int(self._ask("add", [key], amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value in rank 0's store."""
        self._ask("append", [key], value.encode() if isinstance(value, str) else bytes(value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value in rank 0's store if it is the expected one, and return the resulting value."""
        return bytes(self._ask("compare_set", [key], expected.encode(), desired.encode()))

    def delete_key(self, key: str) -> bool:
        """Delete a key of rank 0's table."""
        return bool(self._ask("delete_key", [key]))

    def num_keys(self) -> int:
        """Return the number of keys in rank 0's store."""
        return int(self._ask("num_keys", []))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waits for later keys."""
        self._timeout = timeout
