"""Both ends of the wire on loopback, with bounded waits; no job, no scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from samebits.net.client import Client, Up
from samebits.net.curve import ClusterKeys
from samebits.net.server import MAX_SOCKETS, Incoming, Server
from tests.system.processes import free_port

PATIENCE_S = 30.0
_Seen = TypeVar("_Seen")


def until(step: Callable[[], Sequence[object]], wanted: Callable[[object], bool]) -> list[object]:
    """Collect what ``step`` returns until it includes the wanted, within a bounded wait."""
    seen: list[object] = []
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        seen += step()
        if any(wanted(item) for item in seen):
            return seen
    raise AssertionError(f"not seen within {PATIENCE_S} s; seen: {seen}")


def listened(client: Client) -> list[object]:
    """Return what the client hears now."""
    client.wait(0.05)
    return list(client.drain())


class Ends:
    """A server and its clients."""

    def __init__(
        self,
        keys: ClusterKeys | None = None,
        *,
        address: str = "127.0.0.1",
        silence_s: float = 5.0,
        most_connections: int = MAX_SOCKETS,
    ) -> None:
        self.address = address
        self.port = free_port()
        self.silence_s = silence_s
        self.server = Server([address], self.port, silence_s, keys=keys, most_connections=most_connections)
        self.has_server = True
        self.clients: list[Client] = []
        self.aside: list[Incoming] = []  # what the server heard while a client was polled
        self._pool = ThreadPoolExecutor(max_workers=1)

    def client(self, identity: str, keys: ClusterKeys | None = None) -> Client:
        client = Client(self.address, self.port, identity, self.silence_s, keys=keys)
        self.clients.append(client)
        return client

    def heard(self) -> list[Incoming]:
        """Return what the server hears now."""
        self.server.wait(0.1)
        return list(self.server.drain())

    def got(self, client: Client) -> Callable[[], list[object]]:
        """Return what the client hears, while the server keeps answering handshakes."""

        def step() -> list[object]:
            listening = self._pool.submit(listened, client)
            while not listening.done():
                self.server.wait(0.01)
                self.aside += self.server.drain()
            return listening.result()

        return step

    def connected(self, identity: str, keys: ClusterKeys | None = None) -> Client:
        client = self.client(identity, keys)
        until(self.got(client), lambda item: isinstance(item, Up))
        return client

    def end_server(self) -> None:
        """Close the server but not its clients."""
        self.server.close()
        self.has_server = False

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self._pool.shutdown()
        if self.has_server:
            self.server.close()
