"""What the other end of a connection says before anything is agreed on: ZMTP's greeting, which names its mechanism.

Only the one question lives here, asked over a connection of its own. The one idea: ZeroMQ tells a client no more than
that its handshake failed; the greeting (ZMTP 3.1, RFC 37) tells a scheduler with another secret from one without any,
and both from a proxy that has nobody behind it. Our own half is sent after the other has been read, so that the
scheduler knows as well: of two that greet each other at once only one reads the other's to the end.
"""

from __future__ import annotations

import contextlib
import socket
import time

_SIGNATURE_AND_VERSION = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
_MINOR_VERSION = b"\x01"
_AS_CLIENT_AND_FILLER = bytes(32)
_STAY_S = 0.05  # the scheduler looks up who we are as soon as it sees us, and can only while we are there
_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)


def mechanism_at(host: str, port: int, ours: str, timeout_s: float) -> str | None:
    """``CURVE`` or ``NULL``, as the socket there speaks; None where nobody answers in ZMTP 3 within ``timeout_s``.

    ``ours`` is the mechanism that the other end is told.
    """
    greeting, deadline_s = b"", time.monotonic() + timeout_s
    try:
        with socket.create_connection((host.strip("[]"), port), timeout_s) as connection:
            connection.sendall(_SIGNATURE_AND_VERSION)
            while len(greeting) < _GREETING_BYTES:
                connection.settimeout(max(_STAY_S, deadline_s - time.monotonic()))
                more = connection.recv(_GREETING_BYTES - len(greeting))
                if not more or time.monotonic() > deadline_s:
                    break
                greeting += more
            connection.settimeout(_STAY_S)
            with contextlib.suppress(TimeoutError):
                connection.recv(1)
            connection.sendall(_MINOR_VERSION + ours.encode("ascii").ljust(20, b"\0") + _AS_CLIENT_AND_FILLER)
    except OSError:
        return None
    if len(greeting) < _GREETING_BYTES or greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
        return None
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", errors="replace")
