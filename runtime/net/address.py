"""Addresses: where the scheduler listens, and who holds a port that is taken.

Names are resolved here, once, when the scheduler starts; never on accept.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import ListenError

_ATTEMPTS = 16
_SHOWN_CHARACTERS = 80
_SCHEDULER = "-m runtime scheduler"  # a part of its command line


def local_addresses(host: str, bind: str | None = None) -> list[str]:
    """Those addresses that ``bind``, else ``host``, resolves to and that belong to this machine.

    Args:
        host: SCHED_HOST.
        bind: SCHED_BIND, where it is set.

    Raises:
        ListenError: the name does not resolve, or to no address of this machine.
    """
    asked = f"SCHED_BIND={bind}" if bind else f"SCHED_HOST={host}"
    try:
        found = socket.getaddrinfo(bind or host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ListenError(
            f"{asked} cannot be resolved ({error.strerror}). Fix: set it to an address of this machine"
        ) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    local = [address for address in addresses if is_local(address)]
    if not local:
        raise ListenError(
            f"{asked} is {', '.join(addresses)}, and none of these is an address of this machine: "
            "start the scheduler on that host, or set SCHED_BIND to the local address to listen on"
        )
    return local


def is_local(address: str) -> bool:
    """Whether this literal address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def endpoint(address: str, port: int) -> str:
    """ZeroMQ's way to write an address: ``tcp://127.0.0.1:8118``, ``tcp://[::1]:8118``."""
    bare = address.strip("[]")
    try:
        is_v6 = ipaddress.ip_address(bare.partition("%")[0]).version == 6
    except ValueError:
        is_v6 = False
    return f"tcp://[{bare}]:{port}" if is_v6 else f"tcp://{bare}:{port}"


def port_holder(port: int) -> str:
    """Who listens on a local TCP port, as far as this user may read it: ``pid 12 (python train.py)``."""
    process = _holder(port)
    if process is not None:
        return f"pid {process.name} ({_command_of(process)[:_SHOWN_CHARACTERS]})"
    return "another process" if _listening_inodes(port) else "another process, or one that ended a moment ago"


def folder_of_holder(port: int) -> Path | None:
    """Where the process that listens on a local TCP port works; None where this user may not know."""
    process = _holder(port)
    try:
        return None if process is None else (process / "cwd").readlink()
    except OSError:
        return None  # it has ended meanwhile


def free_port(addresses: Sequence[str]) -> int:
    """A TCP port that nobody listens on, on any of these addresses, at this moment.

    Raises:
        ListenError: there is none.
    """
    for _ in range(_ATTEMPTS):
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((addresses[0], 0))
            port = int(probe.getsockname()[1])
        try:
            check_free(addresses, port)
        except ListenError:
            continue
        return port
    raise ListenError(f"no port is free on all of {', '.join(addresses)}. Fix: set SCHED_PORT to one that is")


def _holder(port: int) -> Path | None:
    inodes = _listening_inodes(port)
    processes = (process for process in Path("/proc").iterdir() if process.name.isdigit()) if inodes else ()
    return next((process for process in processes if _holds(process, inodes)), None)


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return False  # another user's
    return any(_inode_of(descriptor) in inodes for descriptor in descriptors)


def _inode_of(descriptor: Path) -> str:
    try:
        link = str(descriptor.readlink())
    except OSError:
        return ""  # closed meanwhile
    return link[8:-1] if link.startswith("socket:[") else ""


def _command_of(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended meanwhile"
    return " ".join(words).strip()


def check_free(addresses: Sequence[str], port: int) -> None:
    """Raise :class:`ListenError`, naming the holder, where ``port`` is taken on one of the addresses."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                raise cannot_listen(address, port, error.errno, error.strerror) from None


def cannot_listen(address: str, port: int, number: int | None, reason: str | None) -> ListenError:
    """The error for a bind that failed: ``number`` is its errno (bind(2), ip(7)), ``reason`` what that means."""
    found = f"SCHED_PORT={port} on {address} cannot be listened on ({reason})"
    if number == errno.EADDRINUSE:
        holder = port_holder(port)
        if _SCHEDULER in holder:  # perhaps a colleague's, whose job would lose it
            fix = (
                "That is the scheduler of a job of its own: set SCHED_PORT to a free port in every process of this one"
            )
        else:
            fix = "End it, or set SCHED_PORT to a free port in every process"
        held = f"held by {holder}. {fix}"
        return ListenError(f"{found}: {held}")
    if number == errno.EACCES:
        return ListenError(
            f"{found}: ports below 1024 take a right that this user has not: set SCHED_PORT to one from 1024 to 65535 "
            "in every process"
        )
    if number == errno.EADDRNOTAVAIL:
        return ListenError(
            f"{found}: that is no address of this machine: set SCHED_BIND to the local address to listen on"
        )
    return ListenError(f"{found}: set SCHED_BIND to the local address to listen on, or SCHED_PORT to another port")
