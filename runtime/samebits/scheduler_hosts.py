"""Parse SCHED_HOST: up to two relays, then one or more hosts, each with an optional port, or a file of hosts.

The setting is kept as text in canonical form; this module extracts its addresses. It resolves no name and opens no
file.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import NamedTuple

FILE = "file:"
RELAY = "relay:"
RELAY_CHOICES = {"on": True, "off": False}
"""Whether this host's launcher starts a relay; otherwise the size of the job decides."""
MOST_HOSTS = 64
_LONGEST_NAME = 253  # RFC 1035, section 2.3.4
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_WITH_PORT = re.compile(r"(\[[^\]]*\]|[^:]*):([0-9]{1,5})")


class NotHostsError(ValueError):
    """The text names no hosts; the message gives the reason, if there is one."""


class SchedulerAddress(NamedTuple):
    """A scheduler's address: a name or a literal address, without brackets, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def one_host(text: str) -> str:
    """Return a host name or a literal address in canonical form: no brackets, addresses in shortest form.

    Raises:
        NotHostsError: ``text`` is neither, or has a port.
    """
    value = text.strip()
    if "://" in value or _WITH_PORT.fullmatch(value):
        raise NotHostsError("only the host belongs here, the port goes into SCHED_PORT")
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    try:
        return str(ipaddress.IPv6Address(bare) if bare != value else ipaddress.ip_address(bare))
    except ValueError:
        # RFC 1123 labels, and the underscore that compose files put in service names. A name whose last label is a
        # number is a mistyped IPv4 address (RFC 3696, section 2), so it is not resolved.
        labels = value.removesuffix(".").split(".")
        if len(value) > _LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdigit():
            raise NotHostsError() from None
        return value


class HostParts(NamedTuple):
    """The parts of SCHED_HOST.

    Attributes:
        relay: the address of this host's relay, if the text names one.
        starts_relay: the choice of RELAY_CHOICES, if the text has one.
        inner_relay: the address of the inner relay to which this host's relay connects, if the text names one.
        hosts: the scheduler's hosts.
    """

    relay: SchedulerAddress | None
    starts_relay: bool | None
    inner_relay: SchedulerAddress | None
    hosts: str


def split_relay(text: str) -> HostParts:
    """Split SCHED_HOST's canonical text."""
    relay, rest = _first_relay(text)
    inner, hosts = _first_relay(rest)
    above = None if inner is None else _relay_at(inner)
    if relay is None or relay in RELAY_CHOICES:
        return HostParts(None, None if relay is None else RELAY_CHOICES[relay], above, hosts)
    return HostParts(_relay_at(relay), None, above, hosts)


def with_relay(relay: SchedulerAddress | None, hosts: str, inner_relay: SchedulerAddress | None = None) -> str:
    """Return SCHED_HOST's canonical text for the scheduler's hosts, preceded by the relays that are given."""
    return "".join(f"{RELAY}{one}," for one in (relay, inner_relay) if one is not None) + hosts


def _first_relay(text: str) -> tuple[str | None, str]:
    """Return the relay with which the text begins, without its prefix, and the rest."""
    value = text.strip()
    if not value.startswith(RELAY):
        return None, value
    relay, _, rest = value.removeprefix(RELAY).partition(",")
    return relay.strip(), rest


def _relay_at(text: str) -> SchedulerAddress:
    named = listed(text)
    if len(named) != 1 or named[0][1] is None:
        raise NotHostsError(f"expected {RELAY}host:port, {RELAY}on or {RELAY}off, and then the scheduler's host")
    return SchedulerAddress(named[0][0], named[0][1])


def canonical(text: str) -> str:
    """Return SCHED_HOST in canonical form: a host, ``a,b:8119,[fd00::1]:8119``, or ``file:/path``.

    ``relay:host:port,``, ``relay:on,`` or ``relay:off,`` may precede each form. An inner relay, ``relay:host:port,``,
    may follow the first two.

    Raises:
        NotHostsError: ``text`` is none of these.
    """
    relay, rest = _first_relay(text)
    if relay is not None:
        inner, hosts = _first_relay(rest)
        if not hosts.strip() or _first_relay(hosts)[0] is not None or (inner is not None and relay == "off"):
            raise NotHostsError(f"expected {RELAY}host:port, and then the scheduler's host")
        above = "" if inner is None else f"{RELAY}{_relay_at(inner)},"
        return f"{RELAY}{relay if relay in RELAY_CHOICES else _relay_at(relay)},{above}{canonical(hosts)}"
    value = rest
    if value.startswith(FILE):
        path = value.removeprefix(FILE)
        if not path.startswith("/"):
            raise NotHostsError(f"expected an absolute path after {FILE}")
        return value
    if "," not in value:
        return one_host(value)
    return ",".join(_written(host, port) for host, port in listed(value))


def addresses_in(text: str, port: int) -> tuple[SchedulerAddress, ...]:
    """Return the addresses in SCHED_HOST's canonical text, in order; none if it names a file.

    Args:
        text: from :func:`canonical`.
        port: SCHED_PORT, for hosts without a port of their own.
    """
    if file_in(text) is not None:
        return ()
    if "," not in text:
        return (SchedulerAddress(text.strip("[]"), port),)
    return tuple(SchedulerAddress(host, own or port) for host, own in listed(text))


def file_in(text: str) -> Path | None:
    """Return the file in SCHED_HOST's canonical text; None if it names hosts."""
    return Path(text.removeprefix(FILE)) if text.startswith(FILE) else None


def addresses_of_file(content: str, port: int) -> tuple[SchedulerAddress, ...]:
    """Return the addresses in a file of SCHED_HOST: one or more per line, separated by commas; ``#`` begins a comment.

    Raises:
        NotHostsError: the file is empty, or may be incomplete because its last line has no line break.
    """
    if not content.endswith("\n"):
        raise NotHostsError(
            "it is empty" if not content else "its last line has no line break, so it may be incomplete"
        )
    lines = (line.partition("#")[0].strip() for line in content.splitlines())
    text = ",".join(line.strip(",") for line in lines if line)
    if not text:
        raise NotHostsError("it names no host")
    try:
        return tuple(SchedulerAddress(host, own or port) for host, own in listed(text))
    except NotHostsError as error:
        raise NotHostsError(str(error) or "it names an invalid host") from None


def names_one(text: str) -> bool:
    """Return whether SCHED_HOST leaves no choice: it names one host, and no file."""
    return "," not in text and file_in(text) is None


def shown(text: str, port: int) -> str:
    """Describe the scheduler's address as set by SCHED_HOST and SCHED_PORT, for messages."""
    file = file_in(text)
    if file is not None:
        return f"one of the addresses in {file} (SCHED_HOST)"
    if names_one(text):
        return f"{text}, port {port} (SCHED_HOST, SCHED_PORT)"
    return f"{' or '.join(map(str, addresses_in(text, port)))} (SCHED_HOST)"


def listed(text: str) -> list[tuple[str, int | None]]:
    """Return each host of ``a,b:8119`` and its own port, without duplicates.

    Raises:
        NotHostsError: a part is neither a host nor a host with its port.
    """
    found: dict[tuple[str, int | None], None] = {}
    for word in text.split(","):
        item = word.strip()
        with_port = _WITH_PORT.fullmatch(item)
        port = None if with_port is None else int(with_port[2])
        if port is not None and not 0 < port < 1 << 16:
            raise NotHostsError(f"{item!r} has no port from 1 to 65535")
        try:
            found[one_host(item if with_port is None else with_port[1]), port] = None
        except NotHostsError:
            raise NotHostsError(f"{item[:80]!r} is neither a host nor a host:port") from None
    if len(found) > MOST_HOSTS:
        raise NotHostsError(f"{len(found)} hosts are more than {MOST_HOSTS}")
    return list(found)


def _written(host: str, port: int | None) -> str:
    return host if port is None else str(SchedulerAddress(host, port))
