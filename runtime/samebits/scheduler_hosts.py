"""Parse SCHED_HOST: an optional relay, then one or more hosts, each with an optional port, or a file of hosts.

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


def split_relay(text: str) -> tuple[SchedulerAddress | None, bool | None, str]:
    """Split SCHED_HOST's canonical text.

    Returns:
        The address of this host's relay, if the text names one; the choice of RELAY_CHOICES, if it has one; the rest.
    """
    if not text.startswith(RELAY):
        return None, None, text
    relay, _, rest = text.removeprefix(RELAY).partition(",")
    if relay in RELAY_CHOICES:
        return None, RELAY_CHOICES[relay], rest
    ((host, port),) = listed(relay)
    return SchedulerAddress(host, port or 0), None, rest


def with_relay(relay: SchedulerAddress | None, hosts: str) -> str:
    """Return SCHED_HOST's canonical text for the scheduler's hosts, preceded by the relay if there is one."""
    return hosts if relay is None else f"{RELAY}{relay},{hosts}"


def canonical(text: str) -> str:
    """Return SCHED_HOST in canonical form: a host, ``a,b:8119,[fd00::1]:8119``, or ``file:/path``.

    ``relay:host:port,``, ``relay:on,`` or ``relay:off,`` may precede each form.

    Raises:
        NotHostsError: ``text`` is none of these.
    """
    value = text.strip()
    if value.startswith(RELAY):
        relay, _, rest = value.removeprefix(RELAY).partition(",")
        if not rest or rest.strip().startswith(RELAY):
            raise NotHostsError(f"expected {RELAY}host:port, and then the scheduler's host")
        if relay.strip() in RELAY_CHOICES:
            return f"{RELAY}{relay.strip()},{canonical(rest)}"
        named = listed(relay)
        if len(named) != 1 or named[0][1] is None:
            raise NotHostsError(f"expected {RELAY}host:port, {RELAY}on or {RELAY}off, and then the scheduler's host")
        return f"{RELAY}{_written(*named[0])},{canonical(rest)}"
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
