"""Where the ranks of one generation learn each other's addresses: a ``Store`` over a single exchange.

Here live the protocol of that exchange and the store gloo and torch read and write. Never here: connections, groups,
how the exchange travels. The one idea: what a rank has to say when its group forms is known before it has to read
anything, so it says it in one message, and everybody reads the union from memory. What comes later (``dist.new_group``
in a user's function, NCCL's ids) cannot be known beforehand; for that rank 0 keeps an ordinary ``TCPStore``, whose
address travels in its message, and to which the others connect when they first need it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgpack
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from runtime.errors import CommunicationError
from runtime.training.group.breaker import Breaker, run_breakable
from runtime.training.group.gloo import Address, Endpoints, address_in

__all__ = ["Exchange", "MeetingStore"]

T = TypeVar("T")

_BACKLOG = 1024
_CONNECT_TIMEOUT = timedelta(seconds=30)


class Exchange(Protocol):
    """The one message each rank of a generation sends to all."""

    def publish(self, blob: bytes) -> None:
        """Send this rank's contribution; called once."""

    def wait(self) -> Sequence[bytes]:
        """Block until every rank's contribution is in and return them in rank order.

        Raises:
            GenerationEndedError: the generation was cancelled meanwhile.
        """


class MeetingStore(Store):
    """The store of one generation. Keys set before the first read travel in the one message, later ones over TCP.

    Args:
        exchange: carries the message.
        rank: of this process, 0-based.
        world_size: messages to expect.
        address: where rank 0's later store listens: a numeric IP address of this host.
        breaker: ends waiting for later keys.
        endpoints: told every address that passes through, so that its connections can be cut.
        timeout: of waiting for a later key where the caller gives none.
        info: what this rank has to say besides what gloo and torch set.

    Attributes:
        all_info: everybody's, by rank, once they have met.
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
        self._published = False
        self._union: dict[str, bytes] | None = None
        self._later_address: Address | None = None
        self._later: Any = None  # a Store; torch's stubs miss half of its methods

    def meet(self) -> dict[str, bytes]:
        """Publish what was set so far, once, and return what all ranks published."""
        with self._lock:
            if self._union is None:
                self._breaker.check()
                if self._published:
                    raise CommunicationError(f"the meeting of {self._breaker.name} did not come about")
                listener = self._listen_for_later() if self._rank == 0 else None
                self._published = True
                self._exchange.publish(
                    msgpack.packb({"keys": self._own, "later": self._later_address, "words": self._info})
                )
                if listener is not None:
                    self._serve_later(listener)
                self._union = self._read(self._exchange.wait())
        return self._union

    def _read(self, blobs: Sequence[bytes]) -> dict[str, bytes]:
        if len(blobs) != self._world_size:
            raise CommunicationError(
                f"the meeting of {self._breaker.name} brought {len(blobs)} messages, expected {self._world_size}"
            )
        union: dict[str, bytes] = {}
        for blob in blobs:
            message: dict[str, Any] = msgpack.unpackb(blob)
            union.update(message["keys"])
            self.all_info.append(bytes(message["words"]))
            if message["later"] is not None:
                host, port = message["later"]
                self._later_address = (host, port)
        for key, value in union.items():
            self._note(value, self._endpoints.own if key in self._own else self._endpoints.peers)
        return union

    def _note(self, value: bytes, where: set[Address]) -> None:
        address = address_in(value)
        if address is not None:
            where.add(address)

    # --- later keys -----------------------------------------------------------------------------------------------

    def _listen_for_later(self) -> socket.socket | None:
        if self._world_size == 1:
            self._later = HashStore()
            return None
        family = socket.AF_INET6 if ":" in self._listen_address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((self._listen_address, 0))
        listener.listen(_BACKLOG)  # who comes before the store serves waits in the kernel
        self._later_address = (self._listen_address, listener.getsockname()[1])
        self._endpoints.own.add(self._later_address)
        return listener

    def _serve_later(self, listener: socket.socket) -> None:
        assert self._later_address is not None
        host, port = self._later_address
        self._later = TCPStore(
            host, port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _later_store(self) -> Any:
        self.meet()
        with self._lock:
            if self._later is None:
                assert self._later_address is not None
                host, port = self._later_address
                self._endpoints.peers.add(self._later_address)
                self._later = run_breakable(
                    self._breaker,
                    lambda: TCPStore(host, port, None, False, _CONNECT_TIMEOUT, wait_for_workers=False),
                    "samebits-store",
                )
                self._later.set_timeout(self._timeout)
            return self._later

    def _on_later(self, call: Callable[[Any], T]) -> T:
        store = self._later_store()
        return run_breakable(self._breaker, lambda: call(store), "samebits-store")

    # --- dist.Store -----------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Before the meeting: remember for the message. After it: set in rank 0's store."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            if self._union is None:
                self._own[key] = data
                return
        self._note(data, self._endpoints.own)
        self._on_later(lambda store: store.set(key, data))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        union = self.meet()
        if key in union:
            return union[key]
        value = bytes(self._on_later(lambda store: store.get(key)))
        self._note(value, self._endpoints.peers)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there."""
        union = self.meet()
        missing = [key for key in keys if key not in union]
        if missing:
            self._on_later(lambda store: store.wait(missing, timeout or self._timeout))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        union = self.meet()
        missing = [key for key in keys if key not in union]
        return not missing or bool(self._on_later(lambda store: store.check(missing)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether the multi- calls work."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a counter in rank 0's store and return its new value."""
        return int(self._on_later(lambda store: store.add(key, amount)))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value in rank 0's store."""
        self._on_later(lambda store: store.append(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value in rank 0's store if it is the expected one; return what it then is."""
        return bytes(self._on_later(lambda store: store.compare_set(key, expected, desired)))

    def delete_key(self, key: str) -> bool:
        """Delete a key of rank 0's store."""
        return bool(self._on_later(lambda store: store.delete_key(key)))

    def num_keys(self) -> int:
        """How many keys rank 0's store has."""
        return int(self._on_later(lambda store: store.num_keys()))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long later keys are waited for."""
        self._timeout = timeout
