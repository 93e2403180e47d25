"""Find the user of a connection over loopback: a port on 127.0.0.1 is open to every user of the machine.

Both ends of the connection are on this machine, so the row of the kernel's table that has the other end as its own
names that socket's user (proc_net(5)). Both addresses are compared, because a socket of an earlier connection may have
had the same port. What each user may see is ``guard``'s.
"""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

End = tuple[str, int]
Ends = tuple[End | None, tuple[str, int | None] | None]
PROC_NET = Path("/proc/net")


def uid_of(client: End | None, server: tuple[str, int | None] | None, folder: Path = PROC_NET) -> int | None:
    """Return the user id of the client's socket, or None if it is not known.

    Args:
        client: the other end's address and port.
        server: this end's.
        folder: with the tables ``tcp`` and ``tcp6``.
    """
    return uids_of([(client, server)], folder)[0]


def uids_of(connections: Sequence[Ends], folder: Path = PROC_NET) -> list[int | None]:
    """Return what :func:`uid_of` does for many connections, each given as (client, server), in one look."""
    found: list[int | None] = [None] * len(connections)
    for table, version in (("tcp", 4), ("tcp6", 6)):
        sought: dict[tuple[str, str], int] = {}
        for index, (client, server) in enumerate(connections):
            if client is None or server is None or server[1] is None or found[index] is not None:
                continue
            with contextlib.suppress(ValueError):  # that table has no such address
                sought[_as_there(client, version), _as_there((server[0], server[1]), version)] = index
        if not sought:
            continue
        try:
            lines = (folder / table).read_text().splitlines()[1:]
        except (OSError, ValueError):
            continue
        for row in map(str.split, lines):
            if len(row) > 7 and row[7].isdecimal() and (index := sought.get((row[1], row[2]), -1)) >= 0:
                found[index] = int(row[7])
    return found


def _as_there(end: End, version: int) -> str:
    """The end as that version's table has it: each four bytes as a number of this machine's, in hexadecimal digits.

    A socket of version 6 has an address of version 4 as ``::ffff:127.0.0.1`` (RFC 4291, section 2.5.5.2).

    Raises:
        ValueError: that table has no such address.
    """
    address = ipaddress.ip_address(end[0])
    if address.version == 4 and version == 6:
        address = ipaddress.ip_address(f"::ffff:{end[0]}")
    if address.version != version:
        raise ValueError(end[0])
    packed = address.packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"
