"""Limit the page's open connections, and the time in which a request must arrive.

A connection counts as a guest unless ``guard`` has admitted its request and the request is being answered. If there are
too many guests, some are closed: first the oldest guest of the user or address with the most guests, and this user's
guests last. Idle connections, partial requests and floods by other users therefore do not affect the job's owner.
``net.gate`` protects the scheduler's port by the same rule.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from samebits.dashboard.guard import Ends, uids_of

MOST_CONNECTIONS = 128
REQUEST_S = 10.0
"""Seconds, after the connection was made or the last answer was sent, in which a request and its body must arrive."""
DESCRIPTORS_EACH = 8
"""The kernel's queue can be accepted three times before the first of these connections can be closed."""
TRUST = "samebits_trust"
"""The key, in a request's ``scope["state"]``, of a function to call once ``guard`` admits it to read the job."""
_OWNER = "owner"


class Connections:
    """All open connections of the page. Used only in the event loop.

    Args:
        descriptors: how many descriptors this process may have open.
        uids: finds the users of connections from this machine.
    """

    def __init__(self, descriptors: int, uids: Callable[[Sequence[Ends]], list[int | None]] = uids_of) -> None:
        self.most = max(1, min(MOST_CONNECTIONS, descriptors // DESCRIPTORS_EACH))
        self._uids = uids
        self._open: dict[Connection, None] = {}  # oldest first
        self._is_due = False

    @property
    def protocol(self) -> Any:
        """The value for ``uvicorn.Config(http=...)``."""
        return partial(Connection, connections=self)

    def add(self, connection: Connection) -> None:
        """Add a new connection. When all new ones have been added, close guests beyond the limit."""
        self._open[connection] = None
        if len(self._open) > self.most and not self._is_due:
            self._is_due = True
            connection.loop.call_soon(self._make_room)

    def discard(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.pop(connection, None)

    def _make_room(self) -> None:
        self._is_due = False
        guests = [one for one in self._open if one.is_guest]
        crowds: dict[str, deque[Connection]] = {}
        for guest, party in zip(guests, self._parties(guests), strict=True):
            crowds.setdefault(party, deque()).append(guest)
        for _ in range(min(len(self._open) - self.most, len(guests))):
            largest = max(
                (party for party in crowds if crowds[party]), key=lambda one: (len(crowds[one]), one != _OWNER)
            )
            crowds[largest].popleft().abort()

    def _parties(self, guests: Sequence[Connection]) -> list[str]:
        """Return the user of each local connection, and the network of any other connection."""
        unknown = [one for one in guests if one.party is None]
        for one, uid in zip(unknown, self._uids([(one.client, one.server) for one in unknown]), strict=True):
            if uid in (0, os.geteuid()):
                one.party = _OWNER
            else:
                one.party = _network_of(one.client) if uid is None else f"user {uid}"
        return [one.party or "" for one in guests]


class Connection(H11Protocol):
    """A connection of uvicorn, with a time limit for the arrival of each request."""

    def __init__(self, *args: Any, connections: Connections, **more: Any) -> None:
        super().__init__(*args, **more)
        self.party: str | None = None
        self._connections = connections
        self._is_trusted = False
        self._deadline: asyncio.TimerHandle | None = None
        self.app_state = {**self.app_state, TRUST: self._trust}

    @property
    def is_guest(self) -> bool:
        """Whether this connection may be closed to make room for another."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered or not self._is_trusted

    def abort(self) -> None:
        """Close the connection at once, and drop unsent data."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See :class:`asyncio.Protocol`."""
        super().connection_made(transport)
        self._watch_arrival()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        super().connection_lost(exc)
        self._unset_deadline()
        self._connections.discard(self)

    def handle_events(self) -> None:
        """Answer the requests that have arrived, and start the time limit for the next one."""
        super().handle_events()
        self._watch_arrival()

    def _watch_arrival(self) -> None:
        is_whole = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if is_whole:
            self._unset_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self.abort)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _trust(self) -> None:
        self._is_trusted = True


def _network_of(client: tuple[str, int] | None) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address.

    All loopback addresses count as one.
    """
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0] if client is not None else "")
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is None and not address.is_loopback:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = mapped or address
    return "loopback" if address.is_loopback else str(address)
