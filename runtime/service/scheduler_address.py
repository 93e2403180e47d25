"""Where the scheduler's name leads: to which addresses, and from which address of this host.

Names are looked up here and in ZeroMQ, which does so at each attempt to connect. The one idea: a name comes and goes
with what stands behind it (a Kubernetes Service has none while its pod is away), so the first look-up waits for it, and
later ones remember what it was.
"""

from __future__ import annotations

import functools
import socket
import time
from typing import Any

from runtime.config import Settings
from runtime.errors import SchedulerUnreachableError
from runtime.service import log

_RETRY_S = 0.5
_DATAGRAM = socket.SOCK_DGRAM

Found = tuple[socket.AddressFamily, Any]
"""A family and a socket address of it, as ``socket.connect`` takes one."""


def wait_for_name(settings: Settings) -> None:
    """Return when SCHED_HOST is an address, or a name that has one; at most after TOPO_TIMEOUT.

    Raises:
        SchedulerUnreachableError: it has none still.
    """
    deadline = time.monotonic() + settings.topo_timeout_s
    said = ""
    while True:
        try:
            _addresses(settings.sched_host, settings.sched_port)
            return
        except socket.gaierror as error:
            why = f"SCHED_HOST={settings.sched_host} has no address ({error.strerror})"
        if time.monotonic() > deadline:
            raise SchedulerUnreachableError(
                f"{why} after {settings.topo_timeout_s:g} s (TOPO_TIMEOUT). Fix: export SCHED_HOST=<the address of the "
                "scheduler's host>, or a name that this host can look up"
            )
        if why != said:
            said = why
            log.warn(f"{why} yet; this worker looks again for at most {settings.topo_timeout_s:g} s (TOPO_TIMEOUT)")
        time.sleep(_RETRY_S)


def addresses_of(host: str, port: int) -> frozenset[str]:
    """All addresses of the scheduler's host: those it has now, or, where the name has none, those it had last.

    Raises:
        socket.gaierror: it never had one in this process.
    """
    return frozenset(str(address[0]) for _, address in _addresses(host, port))


def address_towards(host: str, port: int) -> str:
    """The local address from which this machine reaches ``host``: where its peers reach this one.

    Raises:
        socket.gaierror: the name never had an address in this process.
    """
    family, address = _addresses(host, port)[0]
    with socket.socket(family, _DATAGRAM) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _addresses(host: str, port: int) -> list[Found]:
    try:
        found = _look_up(host, port)
    except socket.gaierror:
        known = _last_known(host, port)
        if not known:
            raise
        return known
    _last_known(host, port)[:] = found
    return found


def _look_up(host: str, port: int) -> list[Found]:
    found = socket.getaddrinfo(host.strip("[]"), port, type=_DATAGRAM)
    return [(family, address) for family, _, _, _, address in found]


@functools.cache
def _last_known(host: str, port: int) -> list[Found]:
    """What the name was last; empty before it was anything."""
    return []
