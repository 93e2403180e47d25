"""Look up the addresses of the scheduler's hosts, and the local address that reaches them.

A name may have no address for a while (a Kubernetes Service has none while its pod is away). The first look-up
therefore waits for an address, and later ones fall back on the last known address. ZeroMQ resolves names at each
attempt to connect.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Collection
from typing import Any

from samebits.config import Settings, require_secret
from samebits.errors import SchedulerUnreachableError
from samebits.net.address import Listening, listening
from samebits.net.address_book import addresses_now
from samebits.net.client import SEARCH_S
from samebits.scheduler_hosts import NotHostsError, SchedulerAddress, names_one
from samebits.service import log

_RETRY_S = 0.5
_DATAGRAM = socket.SOCK_DGRAM

ResolvedAddress = tuple[socket.AddressFamily, Any]
"""An address family and a socket address for ``socket.connect``."""


def wait_for_name(settings: Settings) -> None:
    """Wait, at most TOPO_TIMEOUT, until SCHED_HOST is an address or a name that has one.

    One of several hosts is enough; a file must exist and name a host.

    Raises:
        SchedulerUnreachableError: no host has an address after that time.
    """
    deadline = time.monotonic() + settings.topo_timeout_s
    said = ""
    while True:
        why = _why_unknown(settings)
        if not why:
            return
        if time.monotonic() > deadline:
            raise SchedulerUnreachableError(
                f"{why} after {settings.topo_timeout_s:g} s (TOPO_TIMEOUT). Fix: export SCHED_HOST=<the address of the "
                "scheduler's host>, or a name that this host can look up"
            )
        if why != said:
            said = why
            log.warn(f"{why} yet; this worker looks again for at most {settings.topo_timeout_s:g} s (TOPO_TIMEOUT)")
        time.sleep(_RETRY_S)


def addresses_of(host: str, port: int) -> frozenset[tuple[str, int]]:
    """Return all addresses of the scheduler's hosts with their ports.

    For a name that currently has no address, the last known ones are returned.

    Args:
        host: SCHED_HOST.
        port: SCHED_PORT.

    Raises:
        socket.gaierror: no host has had an address since this process started.
    """
    return frozenset((str(address[0]), int(address[1])) for _, address in _of_every(host, port))


def address_towards(host: str, port: int) -> str:
    """Return the local address from which this machine reaches ``host``, for use by its peers.

    Of several hosts, the first reachable one counts, wherever the scheduler runs, so that the group stays in one
    network when the scheduler moves.

    Args:
        host: SCHED_HOST.
        port: SCHED_PORT.

    Raises:
        socket.gaierror: the name has had no address since this process started.
        OSError: there is no route to the host.
    """
    *others, last = _of_every(host, port)
    for found in others:
        with contextlib.suppress(OSError):
            return _own_address(found)
    return _own_address(last)


def search_s(host: str, port: int) -> float:
    """Return how many seconds a worker may spend on the scheduler's other addresses, or 0 if it has no others.

    Args:
        host: SCHED_HOST.
        port: SCHED_PORT.
    """
    return 0.0 if names_one(host) else SEARCH_S * len(_named(host, port))


def _own_address(towards: ResolvedAddress) -> str:
    family, address = towards
    with socket.socket(family, _DATAGRAM) as probe:
        probe.connect(address)  # UDP: nothing is sent
        return str(probe.getsockname()[0])


def _why_unknown(settings: Settings) -> str:
    """Return why there is no address to connect to, or "" if there is one."""
    try:
        named = addresses_now(settings.sched_host, settings.sched_port)
    except NotHostsError as error:
        return str(error).partition(". Fix: ")[0]
    why = ""
    for one in named:
        try:
            _addresses(*one)
        except socket.gaierror as error:
            why = why or f"SCHED_HOST={one.host} has no address ({error.strerror})"
        else:
            return ""
    return why


def _of_every(host: str, port: int) -> list[ResolvedAddress]:
    every: list[ResolvedAddress] = []
    missing: socket.gaierror | None = None
    for one in _named(host, port):
        try:
            every += _addresses(*one)
        except socket.gaierror as error:
            missing = error
    if missing is not None and not every:
        raise missing
    return every


def _named(host: str, port: int) -> tuple[SchedulerAddress, ...]:
    """Return the hosts in SCHED_HOST, or the last known ones while its file is unusable."""
    try:
        named = addresses_now(host, port)
    except NotHostsError as error:
        named = tuple(_last_named(host, port))
        if not named:
            raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    else:
        _last_named(host, port)[:] = named
    return named


@functools.cache
def _last_named(host: str, port: int) -> list[SchedulerAddress]:
    """Return the mutable, cached list of the last known hosts; empty at first."""
    return []


def _addresses(host: str, port: int) -> list[ResolvedAddress]:
    try:
        found = _look_up(host, port)
    except socket.gaierror:
        known = _last_known(host, port)
        if not known:
            raise
        return known
    _last_known(host, port)[:] = found
    return found


def _look_up(host: str, port: int) -> list[ResolvedAddress]:
    found = socket.getaddrinfo(host.strip("[]"), port, type=_DATAGRAM)
    return [(family, address) for family, _, _, _, address in found]


@functools.cache
def _last_known(host: str, port: int) -> list[ResolvedAddress]:
    """Return the mutable, cached list of the name's last known addresses; empty at first."""
    return []


def listening_place(settings: Settings, held: Collection[tuple[str, int]] = frozenset()) -> Listening:
    """Return where to listen: on SCHED_BIND if it is set, otherwise on the local addresses of SCHED_HOST.

    Args:
        settings: the job's settings.
        held: addresses on which this process is already listening.
    """
    place = listening(settings.sched_host, settings.sched_port, settings.sched_bind, held)
    require_secret(place.addresses, settings)
    return place
