"""Build gloo meshes, identify their sockets, and close them.

gloo announces its listening address only through the store, which is ours. Every connection of a generation and its
subgroups is therefore known by its address. Once a mesh is complete, its listener accepts no more connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo

from samebits.errors import UsageError
from samebits.service import log
from samebits.training import torch_private

__all__ = ["Address", "Endpoints", "address_in", "close_copies", "close_to_newcomers", "connect", "cut"]

READER_NICE = 10
"""Niceness added to the reading thread. Of 3, 5, 7, 10, 19 and SCHED_BATCH, only 10 was never slower than 0.

At 19 a rank with a busy DataLoader takes three times as long, and under SCHED_BATCH twice as long.
"""

Address = tuple[str, int]
"""An IP address in its shortest text form, and a TCP port."""

_SIZE = struct.Struct("=Q")  # gloo writes a size_t before each field, in the machine's own byte order
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")
_SOCKADDR_STORAGE_BYTES = 128
_OPEN_FILES = Path("/proc/self/fd")

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python has no name for it
_DROP_EVERYTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction, BPF_RET | BPF_K: keep 0 bytes (bpf(4))


class Endpoints:
    """The addresses that one generation listens on: this process's and its peers'."""

    __slots__ = ("own", "peers")

    def __init__(self) -> None:
        self.own: set[Address] = set()
        self.peers: set[Address] = set()


def address_in(value: bytes) -> Address | None:
    """Return the address that gloo has published for one rank, or None if the value is something else.

    The format is that of gloo's ``Rank::bytes`` (gloo/transport/tcp/context.cc): a size and the host name, a size and
    an ``Address`` that begins with a ``sockaddr_storage``, then one number per rank.
    """
    host_bytes, start = _field(value, 0)
    if host_bytes is None:
        return None
    sockaddr, _ = _field(value, start)
    if sockaddr is None or len(sockaddr) < _SOCKADDR_STORAGE_BYTES:
        return None
    (family,) = _FAMILY.unpack_from(sockaddr)
    (port,) = _PORT.unpack_from(sockaddr, 2)
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(sockaddr[4:8])), port
    if family == socket.AF_INET6:
        return str(ipaddress.IPv6Address(sockaddr[8:24])), port
    return None


def _field(value: bytes, start: int) -> tuple[bytes | None, int]:
    if len(value) < start + _SIZE.size:
        return None, start
    (size,) = _SIZE.unpack_from(value, start)
    begin = start + _SIZE.size
    if size > len(value) - begin:
        return None, start
    return value[begin : begin + size], begin + size


def connect(
    store: Store, rank: int, world_size: int, address: str, connect_timeout: timedelta, timeout: timedelta
) -> ProcessGroupGloo:
    """Listen at ``address``, exchange addresses through ``store``, and connect to all ranks.

    Args:
        store: where gloo publishes its own address and waits for the others'.
        rank: this process's rank, 0-based.
        world_size: ranks in the mesh.
        address: a numeric IP address of this host that all peers reach.
        connect_timeout: maximum time for one connection.
        timeout: timeout of each collective afterwards.

    Raises:
        RuntimeError: from gloo, if a connection was not made in time.
    """
    # Lazy connections would be made inside some later collective, where an error could not be explained.
    with ThreadPoolExecutor(1, "samebits-gloo") as aside:  # a thread cannot undo its own niceness
        device = aside.submit(_device_with_nice_reader, address).result()
    mesh = torch_private.gloo_mesh(store, rank, world_size, device, connect_timeout, timeout)
    key = torch_private.key_of_gloo_rank(rank)  # checked first: get() of a wrong name would wait forever
    own = address_in(bytes(store.get(key))) if store.check([key]) else None
    if own is not None and sys.platform == "linux":
        close_to_newcomers(own)
    return mesh


def close_to_newcomers(own: Address) -> bool:
    """Accept no further connections on this process's listener at ``own``; return whether there is such a listener.

    gloo accepts any connection while the mesh lives, keeps those that have sent eight bytes, and aborts the process
    when no descriptor is left or accept fails. So the listener stays open, also in gloo's epoll set, but the kernel
    drops every packet to it (socket(7), SO_ATTACH_FILTER), beginning with the first of a handshake: a client gets no
    answer. Existing connections are not affected.
    """
    for descriptor in _OPEN_FILES.iterdir():
        listener = _socket_of(int(descriptor.name))
        if listener is None:
            continue
        with listener:
            if _is_listening(listener) and _address(listener.getsockname()) == own:
                _drop_everything(listener)
                return True
    return False


def _drop_everything(listener: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_EVERYTHING)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EPERM):
            raise
        log.warn(
            f"this system does not let a socket drop packets ({error.strerror}), so any host that reaches port "
            f"{listener.getsockname()[1]} can use up this process's descriptors. Fix: let only the job's hosts reach "
            "it, as docs/how-to/secure-a-job.md shows"
        )


def _device_with_nice_reader(address: str) -> Any:
    """Create a gloo device whose reading thread yields to the group's other threads.

    That thread polls epoll continuously while another thread sends on the connection with pending data. If it takes the
    sender's core, both wait for the end of a time slice; without niceness, four ranks on two cores lose a quarter of a
    step this way. Under SCHED_BATCH the reader would not preempt the sender, but would wait for a full slice of
    anything else on that core, such as a DataLoader's worker or another job, and a step would take twice as long.
    """
    if sys.platform == "linux":  # elsewhere niceness applies to the whole process
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + READER_NICE)
    return torch_private.gloo_device(address)


def check_address(address: str) -> None:
    """Raise UsageError unless ``address`` is numeric, because a name would be looked up whenever a group forms."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(
            f"a group's address must be a numeric IP address of this host, not {address!r}. Fix: pass the local "
            "address of the connection to the scheduler"
        ) from None


def cut(endpoints: Endpoints) -> int:
    """Shut down every connection of this process to or from ``endpoints``, and return their number.

    Listening sockets stay open: gloo aborts the process when accept fails. Each descriptor is duplicated before it is
    inspected, so one that is closed and reused meanwhile is never shut down by mistake.
    """
    severed = 0
    for descriptor in _OPEN_FILES.iterdir():
        connection = _socket_of(int(descriptor.name))
        if connection is None:
            continue
        with connection:
            if _is_between(connection, endpoints):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the peer closed it first
                severed += 1
    return severed


def close_copies(endpoints: Endpoints) -> int:
    """In a forked child, close its copies of these connections and their listeners, and return their number.

    Nothing is shut down, because the connections belong to the parent.
    """
    closed = 0
    for name in [entry.name for entry in _OPEN_FILES.iterdir()]:
        copy = _socket_of(int(name))
        if copy is None:
            continue
        with copy:
            is_copy = _is_between(copy, endpoints) or _is_listener(copy, endpoints)
        if is_copy:
            os.close(int(name))
            closed += 1
    return closed


def _is_listener(connection: socket.socket, endpoints: Endpoints) -> bool:
    return _is_tcp(connection) and _address(connection.getsockname()) in endpoints.own


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


def _is_listening(connection: socket.socket) -> bool:
    return _is_tcp(connection) and bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _socket_of(descriptor: int) -> socket.socket | None:
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None  # closed after it was listed
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None  # a file, a pipe, …


def _is_between(connection: socket.socket, endpoints: Endpoints) -> bool:
    if not _is_tcp(connection):
        return False
    try:
        if _is_listening(connection):
            return False
        return _address(connection.getpeername()) in endpoints.peers or (
            _address(connection.getsockname()) in endpoints.own
        )
    except OSError:
        return False  # not connected


def _address(name: tuple[str, int]) -> Address:
    host = name[0].partition("%")[0]  # a link-local address carries its interface
    if host.startswith("::ffff:"):  # torch's own sockets reach IPv4 through IPv6
        host = host.removeprefix("::ffff:")
    return host, name[1]
