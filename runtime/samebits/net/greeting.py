"""What the other end of a connection says before anything is agreed on: ZMTP's greeting, which names its mechanism.

Only the greeting lives here, over a connection of its own; what follows from it is the client's. The one idea: ZeroMQ
tells a client no more than that its handshake failed; the greeting (ZMTP 3.1, RFC 37) tells a scheduler with another
secret from one without any, and both from a proxy that has nobody behind it. Our own half is sent after the other has
been read, so that the scheduler knows as well: of two that greet each other at once only one reads the other's to the
end.

The connection then stays, as a witness: a scheduler that closes others of ours and not this one, which is older and
says nothing, has an objection to what they say (``net.gate`` says whom it closes for want of room).
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


class Greeted:
    """A connection over which both ends have greeted each other, and nothing more is said.

    Attributes:
        mechanism: ``CURVE`` or ``NULL``, as the socket there speaks.
    """

    def __init__(self, connection: socket.socket, mechanism: str) -> None:
        self._connection = connection
        self.mechanism = mechanism

    def stands(self) -> bool:
        """Whether the other end has not closed it."""
        self._connection.setblocking(False)
        try:
            while self._connection.recv(_GREETING_BYTES):
                continue
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Go."""
        self._connection.close()


def greet(host: str, port: int, ours: str, timeout_s: float) -> Greeted | None:
    """Greet whoever listens there; None where nobody answers in ZMTP 3 within ``timeout_s``.

    ``ours`` is the mechanism that the other end is told.
    """
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
        connection = undo.enter_context(socket.create_connection((host.strip("[]"), port), timeout_s))
        greeting = _read_greeting(connection, deadline_s)
        if len(greeting) < _GREETING_BYTES or greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
            return None
        connection.settimeout(_STAY_S)
        with contextlib.suppress(TimeoutError):
            connection.recv(1)
        connection.sendall(_MINOR_VERSION + ours.encode("ascii").ljust(20, b"\0") + _AS_CLIENT_AND_FILLER)
        undo.pop_all()
        return Greeted(connection, greeting[_MECHANISM].rstrip(b"\0").decode("ascii", errors="replace"))
    return None


def _read_greeting(connection: socket.socket, deadline_s: float) -> bytes:
    greeting = b""
    connection.sendall(_SIGNATURE_AND_VERSION)
    while len(greeting) < _GREETING_BYTES:
        connection.settimeout(max(_STAY_S, deadline_s - time.monotonic()))
        more = connection.recv(_GREETING_BYTES - len(greeting))
        if not more or time.monotonic() > deadline_s:
            break
        greeting += more
    return greeting
