"""The network interface that a job of several hosts uses, and whether this host has a faster one.

Only what the kernel says of this host is read here. The one idea: gradients go over the interface that leads to
SCHED_HOST, so an address in the slow one of two networks makes a training slow, and nothing else tells.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7)
_IFREQ = struct.Struct("16sH2x4s16x")
SYSTEM = Path("/sys/class/net")
ENOUGH = 2.0  # times as fast: then it is worth a word


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface that is up and has an address.

    Attributes:
        addresses: literal ones, of both families.
        mbit: its speed in Mbit/s; None where the kernel does not say, as of a virtual or a wireless one.
    """

    name: str
    addresses: frozenset[str]
    mbit: int | None


def interfaces(system: Path = SYSTEM) -> list[Interface]:
    """Those of this host, but for loopback."""
    found = []
    six = _ipv6_addresses()
    for _, name in socket.if_nameindex():
        addresses = frozenset([*_ipv4_address(name), *six.get(name, [])])
        if addresses and not addresses & {"127.0.0.1", "::1"}:
            found.append(Interface(name, addresses, _mbit(system / name / "speed")))
    return found


def slower(used: str, known: list[Interface]) -> tuple[Interface, Interface] | None:
    """The interface with this address and a faster one, where there is one; None where there is none, or none knows."""
    ours = next((one for one in known if used in one.addresses), None)
    if ours is None or ours.mbit is None:
        return None
    faster = [one for one in known if one.mbit is not None and one.mbit >= ENOUGH * ours.mbit]
    return (ours, max(faster, key=lambda one: one.mbit or 0)) if faster else None


def _mbit(path: Path) -> int | None:
    try:
        speed = int(path.read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None  # -1: unknown (Documentation/ABI/testing/sysfs-class-net)


def _ipv4_address(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode(), socket.AF_INET, bytes(4)))
        except OSError:
            return []
    return [socket.inet_ntop(socket.AF_INET, answer[20:24])]


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        digits, *_, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
