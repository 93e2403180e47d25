"""Find the addresses on which the scheduler listens, and the process that uses a port.

Names are resolved once, when the scheduler starts, and never on accept.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from samebits.errors import ListenError
from samebits.net.address_book import addresses_now
from samebits.printable import printable
from samebits.scheduler_hosts import NotHostsError

BACKLOG = 4096
_ATTEMPTS = 16
_GREETING, _GREETING_S = b"\xff", 2.0  # the first byte that ZeroMQ sends on a new connection
_LOOPBACK, _LOOPBACK_V6 = "127.0.0.1", "::1"
_SHOWN_CHARACTERS = 80
_SCHEDULER = (
    "-m samebits scheduler",
    "-m runtime scheduler",
)  # part of a scheduler's command line; the second form is that of an earlier release


class Listening(NamedTuple):
    """The addresses and the port on which the scheduler listens."""

    addresses: list[str]
    port: int


def listening(
    host: str, port: int, bind: str | None = None, held: Collection[tuple[str, int]] = frozenset()
) -> Listening:
    """Return the addresses of this machine to which SCHED_HOST or ``bind`` resolves, and the port.

    If SCHED_HOST names several hosts, the first one that is this machine is used. If several are this machine, for
    example for one scheduler on each of two ports, the first one whose port is free is used.

    Args:
        host: SCHED_HOST.
        port: SCHED_PORT.
        bind: SCHED_BIND, if it is set.
        held: addresses and ports on which this process is already listening.

    Raises:
        ListenError: the name does not resolve to an address of this machine, or the file of addresses is unusable.
    """
    try:
        named = addresses_now(host, port)
    except NotHostsError as error:
        raise ListenError(str(error)) from None
    if bind is not None:
        own = next((one.port for one in named if _local(one.host)), named[0].port)
        return Listening(_local_or_raise(bind, f"SCHED_BIND={bind}"), own)
    if len(named) == 1:
        return Listening(_local_or_raise(named[0].host, f"SCHED_HOST={host}"), named[0].port)
    places = [Listening(addresses, one.port) for one in named if (addresses := _local(one.host))]
    if not places:
        raise ListenError(
            f"SCHED_HOST={host}: none of {', '.join(map(str, named))} is this machine. Fix: start the "
            "scheduler on one of these hosts, or set SCHED_BIND to the local address to listen on"
        )
    return next((place for place in places if _is_free(place, held)), places[0])


def _local_or_raise(host: str, asked: str) -> list[str]:
    try:
        addresses = _resolved(host)
    except socket.gaierror as error:
        raise ListenError(
            f"{asked} cannot be resolved ({error.strerror}). Fix: set it to an address of this machine"
        ) from None
    local = [address for address in addresses if is_local(address)]
    if not local:
        here = loopback()
        fix = "start the scheduler on that host, or set SCHED_BIND to the local address to listen on"
        if here == _LOOPBACK_V6 and all(ipaddress.ip_address(one).is_loopback for one in addresses):
            fix = f"this machine has no IPv4, so export SCHED_HOST={here}"
        raise ListenError(
            f"{asked} resolves to {', '.join(addresses)}, and none of these is an address of this machine. Fix: {fix}"
        )
    return local


def _local(host: str) -> list[str]:
    try:
        return [address for address in _resolved(host) if is_local(address)]
    except socket.gaierror:
        return []


def _resolved(host: str) -> list[str]:
    return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def _is_free(place: Listening, held: Collection[tuple[str, int]]) -> bool:
    try:
        check_free([one for one in place.addresses if (one, place.port) not in held], place.port)
    except ListenError:
        return False
    return True


def loopback() -> str:
    """Return this machine's loopback address, which is IPv6 only if there is no IPv4 loopback address."""
    return _LOOPBACK if is_local(_LOOPBACK) or not is_local(_LOOPBACK_V6) else _LOOPBACK_V6


def is_local(address: str) -> bool:
    """Return whether this literal address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:  # another machine's address, or the kernel lacks the address family
        return False
    return True


def endpoint(address: str, port: int) -> str:
    """Return the address as ZeroMQ writes it, such as ``tcp://127.0.0.1:8118`` or ``tcp://[::1]:8118``."""
    bare = address.strip("[]")
    try:
        is_v6 = ipaddress.ip_address(bare.partition("%")[0]).version == 6
    except ValueError:
        is_v6 = False
    return f"tcp://[{bare}]:{port}" if is_v6 else f"tcp://{bare}:{port}"


def port_holder(port: int) -> str:
    """Describe the process that listens on a local TCP port, for example as ``pid 12 (python train.py)``.

    The description is vague if this user may not see the process.
    """
    if (pid := _holder(port)) is not None:
        return f"pid {pid} ({printable(_command_of(pid), _SHOWN_CHARACTERS)})"
    if _listeners(port):
        return "an unknown program, of another user or in another container (this user may not see its pid)"
    return "another process, or one that ended a moment ago"


def may_be_a_scheduler(address: str, port: int, at_once: bool = False) -> bool:
    """Return whether the process that listens on a local TCP port may be a scheduler, or about to start one.

    Args:
        address: the local address.
        port: the port.
        at_once: whether a process that loads ZeroMQ, or cannot be examined, may still start a scheduler. Otherwise it
            must answer as ZeroMQ does.
    """
    listeners = _listeners(port)
    pid = next((pid for pid in listeners if pid is not None), None)
    if not listeners or (pid is not None and any(words in _command_of(pid) for words in _SCHEDULER)):
        return True
    try:
        if pid is not None and (maps := Path(f"/proc/{pid}/maps").read_text(errors="replace")) and "zmq" not in maps:
            return False  # a process that is ending has no maps, and still holds its sockets for a moment
        if at_once:
            return True
        with socket.create_connection((address, port), _GREETING_S) as one:
            return one.recv(1) == _GREETING
    except FileNotFoundError:
        return True  # it has ended
    except OSError:
        return at_once


def folder_of_holder(port: int) -> Path | None:
    """Return the working directory of the process that listens on a local TCP port.

    Return None if it is unknown.
    """
    pid = _holder(port)
    try:
        return None if pid is None else Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None  # the process ended meanwhile


def listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on one TCP port on all these addresses. Port 0 means any port that is free on all of them.

    Raises:
        ListenError: this process cannot listen on the port; no socket is left open.
    """
    if port:
        return _listen(addresses, port)
    for _ in range(_ATTEMPTS):
        first = _listen(addresses[:1], 0)
        try:
            return first + _listen(addresses[1:], port_of(first))
        except ListenError:
            close_all(first)
    raise ListenError(f"no port is free on all of {', '.join(addresses)}. Fix: set SCHED_PORT to a free port")


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            sockets.append(_bound(address, port))
            sockets[-1].listen(BACKLOG)
    except BaseException:
        close_all(sockets)
        raise
    return sockets


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((address, port))
    except OSError as error:
        one.close()
        raise cannot_listen(address, port, error.errno, error.strerror) from None
    return one


def taken_over(descriptors: Iterable[int]) -> list[socket.socket]:
    """Return the sockets that this process inherited under these descriptors.

    Raises:
        ListenError: one of the descriptors is not a listening TCP socket.
    """
    sockets: list[socket.socket] = []
    for number in descriptors:
        try:
            kind = os.fstat(number).st_mode
            one = socket.socket(fileno=number) if stat.S_ISSOCK(kind) else None
        except OSError as error:
            raise _not_inherited(number, f"is not open in this process ({error.strerror})") from None
        if one is None:
            raise _not_inherited(number, "is not a socket")
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            raise _not_inherited(number, f"is a socket of kind {_name_of(one.family)}, {_name_of(one.type)}")
        if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise _not_inherited(number, "does not listen")
        one.set_inheritable(False)
        sockets.append(one)
    return sockets


def place_of(one: socket.socket) -> tuple[str, int]:
    """Return the address and port of a TCP socket."""
    address = one.getsockname()
    return str(address[0]), int(address[1])


def not_to_listen_on(surplus: socket.socket, wanted: Sequence[tuple[str, int]]) -> ListenError:
    """Return the error for an inherited socket that listens on none of the ``wanted`` addresses."""
    host, port = place_of(surplus)
    places = ", ".join(f"{host}, port {port}" for host, port in wanted)
    return _not_inherited(
        surplus.fileno(),
        f"listens on {host}, port {port}, but this job's scheduler must listen on {places}",
        "start it again if what SCHED_HOST names has just changed; else ",
    )


def _not_inherited(number: int, what: str, first: str = "") -> ListenError:
    return ListenError(
        f"LISTEN_FDS: descriptor {number} {what}. Fix: {first}`unset LISTEN_FDS`, or pass TCP sockets that listen "
        "where SCHED_HOST, SCHED_PORT and SCHED_BIND say"
    )


def _name_of(constant: int) -> str:
    return getattr(constant, "name", str(constant))


def port_of(sockets: Sequence[socket.socket]) -> int:
    """Return the port of sockets from :func:`listen`."""
    return int(sockets[0].getsockname()[1])


def close_all(sockets: Sequence[socket.socket]) -> None:
    """Close these sockets in this process. A process that has inherited them keeps listening."""
    for one in sockets:
        one.close()


def free_port(addresses: Sequence[str]) -> int:
    """Return a TCP port that is currently free on all of these addresses.

    Raises:
        ListenError: no port is free on all of them.
    """
    sockets = listen(addresses, 0)
    try:
        return port_of(sockets)
    finally:
        close_all(sockets)


def _listeners(port: int) -> list[int | None]:
    """Return the pids of the processes that listen on a local TCP port; None for another user's process."""
    import psutil  # type: ignore[import-untyped]  # slow to import

    found = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return [one.pid for one in found if one.laddr.port == port]


def _holder(port: int) -> int | None:
    return next((pid for pid in _listeners(port) if pid is not None), None)


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended meanwhile"
    return " ".join(words).strip()


def check_free(addresses: Sequence[str], port: int) -> None:
    """Raise :class:`ListenError`, which names the process, if the port is in use on one of the addresses."""
    for address in addresses:
        _bound(address, port).close()


def cannot_listen(address: str, port: int, number: int | None, reason: str | None) -> ListenError:
    """Return the error for a failed bind.

    ``number`` is the bind's errno (bind(2), ip(7)), and ``reason`` the text of the error.
    """
    found = f"SCHED_PORT={port} on {address} cannot be listened on ({reason})"
    if number == errno.EADDRINUSE:
        return ListenError(f"{found}: {_held(port)}", is_taken=True)
    if number == errno.EACCES:
        return ListenError(
            f"{found}, because this user may not listen on ports below 1024. Fix: set SCHED_PORT to one from 1024 "
            "to 65535 in every process"
        )
    if number == errno.EADDRNOTAVAIL:
        return ListenError(
            f"{found}, because this machine does not have that address. Fix: set SCHED_BIND to the local address "
            "to listen on"
        )
    return ListenError(f"{found}. Fix: set SCHED_BIND to the local address to listen on, or SCHED_PORT to another port")


def _held(port: int) -> str:
    """Describe the process that uses the port, with a fix that works while this job's processes run."""
    pid, other_port = _holder(port), "set SCHED_PORT to a free port in every process of this job"
    command = "" if pid is None else _command_of(pid)
    if not any(words in command for words in _SCHEDULER):
        return f"held by {port_holder(port)}. Fix: end that process, or {other_port}"
    folder = folder_of_holder(port)
    where = f", started in {folder}" if folder is not None else ""
    there = f"`samebits stop` in {folder}" if folder is not None else "ending that job"
    return (
        f"held by pid {pid}, another job's scheduler{where}. Fix: {there} frees the port; or end what is left "
        f"of this job, and {other_port}"
    )
