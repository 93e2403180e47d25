"""Whose a connection over loopback is: a port on 127.0.0.1 is open to every user of the machine.

Only the kernel's table of connections is read here; what its user may see is ``guard``'s. The one idea: both ends of
the connection are on this machine, so the row that has the other end as its own names the user of that socket
(proc_net(5)). Both addresses are compared: a socket of another connection may have had the same port before.
"""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

End = tuple[str, int]


def uid_of(client: End | None, server: End | None, folder: Path = Path("/proc/net")) -> int | None:
    """The user id of the client's socket; None where it is not known.

    Args:
        client: the other end's address and port.
        server: this end's.
        folder: with the tables ``tcp`` and ``tcp6``.
    """
    if client is None or server is None:
        return None
    for table, version in (("tcp", 4), ("tcp6", 6)):
        try:
            ends = [_as_there(client, version), _as_there(server, version)]
            rows = (line.split() for line in (folder / table).read_text().splitlines()[1:])
            return next(int(row[7]) for row in rows if row[1:3] == ends)
        except (OSError, ValueError, IndexError, StopIteration):
            continue
    return None


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
