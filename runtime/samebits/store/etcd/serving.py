"""Announce which scheduler serves a job, so that another one can stand by and take over.

::

  <prefix>/serving   the serving scheduler: its process, and where it listens; attached to a lease

The lease only determines when other schedulers take over. A live scheduler whose lease ended during a long pause is
superseded like any other (``etcd_journal``): the claim decides which scheduler may write.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from samebits.errors import StoreError
from samebits.store.etcd.etcd_journal import SERVING, EtcdClaim
from samebits.store.etcd.gateway import Equals, EtcdGateway, PutKey
from samebits.store.lock import LockHolder
from samebits.store.process_identity import host_id
from samebits.store.term_claim import TermClaim

LOOK_S: Final = 1.0
"""Seconds between a waiting scheduler's checks for a stop request, and between its reads of the key.

Usually a change or a closed connection wakes it at once. If a host with the scheduler and the watched etcd member is
lost, neither connection ends, and only the reads show that the lease is over.
"""

_CONNECT_S: Final = 0.5
_RENEWALS: Final = 3


class _Serving(msgspec.Struct, frozen=True):
    holder: bytes
    host: str
    addresses: tuple[tuple[str, int], ...]
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Serving:
    """The current content of the key.

    Attributes:
        holder: the scheduler that serves the job; None if there is none.
        is_gone: there is no such scheduler, or its process was on this host and has ended.
        addresses: where it listens.
        condition: true while the key is unchanged.
    """

    holder: LockHolder | None
    is_gone: bool
    addresses: tuple[tuple[str, int], ...]
    condition: Equals


def serving(gateway: EtcdGateway) -> Serving:
    """Return the scheduler that serves the job.

    Raises:
        StoreError: etcd does not answer, or refuses the request.
    """
    found = gateway.get(_key(gateway))
    condition = Equals(found.key, found.value if found.revision else None)
    with contextlib.suppress(msgspec.DecodeError):
        told = msgspec.msgpack.decode(found.value, type=_Serving)
        holder = LockHolder.parse(told.holder)
        if holder is not None:
            is_gone = told.host == host_id() and not holder.identity.is_alive()
            return Serving(holder, is_gone, told.addresses, condition)
    return Serving(None, True, (), condition)


def wait_for_turn(gateway: EtcdGateway, is_stopped: Callable[[], bool], say: Callable[[str], object]) -> Serving | None:
    """Wait until no scheduler serves the job; return the key's content.

    The end of the other scheduler's connection is noticed at once, the loss of its host when its lease ends.

    Returns:
        None once ``is_stopped()`` is true.

    Raises:
        StoreError: etcd does not answer, or refuses the request.
    """
    said: Serving | None = None
    while not is_stopped():
        now = serving(gateway)
        if now.is_gone:
            return now
        if said is None or said.condition != now.condition:
            say(f"{now.holder} serves this job; this scheduler stands by, and takes over when that one is gone")
            said = now
        with gateway.watched(_key(gateway)) as changes:
            if _is_refused(gateway, now, changes, is_stopped) and serving(gateway).condition == now.condition:
                return now
    return None


class ServingNotice:
    """Announces that this scheduler serves the job, from :meth:`begin` until :meth:`close`.

    Args:
        gateway: a client of etcd, used by this object only.
        holder: the line that describes this process to others.
        addresses: where it listens.
        lease_s: seconds without a renewal after which others take over.
    """

    def __init__(
        self, gateway: EtcdGateway, holder: bytes, addresses: tuple[tuple[str, int], ...], lease_s: int
    ) -> None:
        self._gateway, self._lease_s = gateway, lease_s
        self._value = msgspec.msgpack.encode(_Serving(holder, host_id(), addresses, os.urandom(16)))
        self._lease = 0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def announcement(self) -> PutKey:
        """Return the change that announces this scheduler, with a new lease.

        Raises:
            StoreError: etcd does not answer, or refuses the request.
        """
        self._lease = self._gateway.lease(self._lease_s)
        return PutKey(_key(self._gateway), self._value, self._lease)

    def begin(self, claim: TermClaim) -> None:
        """Keep the announcement alive, in a thread, while the claim is valid."""
        assert claim.in_etcd is not None
        self._thread = threading.Thread(target=self._run, args=(claim.in_etcd,), name="samebits-serving", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the announcement, so that others can take over."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(2 * LOOK_S)

    def _run(self, claim: EtcdClaim) -> None:
        while not self._is_over.wait(self._lease_s / _RENEWALS):
            with contextlib.suppress(StoreError):  # while the etcd is away, others cannot take over either
                if not self._gateway.renew(self._lease):
                    told = self.announcement()
                    if not self._gateway.change([claim.condition], [told]) and not self._gateway.holds(claim.condition):
                        return
        with contextlib.suppress(StoreError), contextlib.closing(self._gateway):
            self._gateway.end_lease(self._lease)


def _is_refused(
    gateway: EtcdGateway, now: Serving, changes: socket.socket | None, is_stopped: Callable[[], bool]
) -> bool:
    """Wait until the scheduler's host refuses a connection or the key may have changed.

    Returns:
        Whether the host refuses a connection.

    Raises:
        StoreError: the etcd does not answer, or refuses the request.
    """
    link: socket.socket | None = None
    try:
        link = _connected(now)
        while not is_stopped():
            ready = select.select([one for one in (link, changes) if one is not None], [], [], LOOK_S)[0]
            if changes in ready:
                return False
            if link in ready and link is not None and _has_ended(link):
                link.close()
                link = _connected(now)
            if not ready and serving(gateway).condition != now.condition:
                return False
    except ConnectionRefusedError:
        return True
    finally:
        if link is not None:
            link.close()
    return False


def _connected(now: Serving) -> socket.socket | None:
    """Return a connection to the scheduler, or None if its host does not answer.

    A scheduler that does not answer may be cut off but alive.

    Raises:
        ConnectionRefusedError: nothing listens there.
    """
    for address in now.addresses:
        try:
            return socket.create_connection(address, _CONNECT_S)
        except ConnectionRefusedError:
            raise
        except OSError:
            continue
    return None


def _has_ended(link: socket.socket) -> bool:
    try:
        return not link.recv(1 << 16)
    except OSError:
        return True


def _key(gateway: EtcdGateway) -> str:
    return f"{gateway.place.prefix}/{SERVING}"
