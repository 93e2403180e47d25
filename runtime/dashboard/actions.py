"""What the page may have done to the job, where it may: one route that takes a small order and says what became of it.

Here lives reading the order and who it is from; what may be done is ``ops.acting``'s, who may ask ``guard``'s. The one
idea: an order is a few bytes of JSON of one shape, read only after the guard has judged the request, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pwd
import socket
import sys
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.requests import ClientDisconnect, Request

from runtime.config import Settings
from runtime.errors import SameBitsError
from runtime.ops.acting import Deed, act

MOST_BYTES = 512


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an order, for the page."""

    status: HTTPStatus
    text: str


class Actions:
    """On the job of this folder, one after the other."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._one_at_a_time = asyncio.Lock()

    async def take(self, request: Request) -> Done:
        """Do what the request orders; the guard has let it through."""
        body = bytearray()
        with contextlib.suppress(ClientDisconnect):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return Done(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"an order has at most {MOST_BYTES} bytes")
        ordered = order_in(bytes(body))
        if ordered is None:
            expected = " or ".join(f'{{"do": "{deed}", "node": "1"}}' for deed in Deed)
            return Done(HTTPStatus.BAD_REQUEST, f"expected {expected}")
        deed, node = ordered
        asker = asker_of(request)
        async with self._one_at_a_time:
            try:
                return Done(HTTPStatus.OK, await asyncio.to_thread(act, self._settings, deed, node, asker))
            except SameBitsError as error:
                return Done(HTTPStatus.CONFLICT, str(error))


def order_in(body: bytes) -> tuple[Deed, str] | None:
    """What is ordered, and of whom; None where it is no order."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or told.get("do") not in list(map(str, Deed)):
        return None
    node = told.get("node", "")
    return (
        (Deed(told["do"]), node)
        if isinstance(node, str) and len(node) <= 128 and told.keys() <= {"do", "node"}
        else None
    )


def asker_of(request: Request) -> str:
    """Whose request it is, as far as this machine knows: an address, and on loopback the user of the connection."""
    if request.client is None:
        return "the page"
    host, port = request.client.host, request.client.port
    user = user_of(host, port) if host.startswith("127.") else None
    return f"the page at {host}" + (f", user {user}" if user is not None else "")


def user_of(host: str, port: int, table: Path = Path("/proc/net/tcp")) -> str | None:
    """The user of this machine whose socket this is (proc_net(5)); None where it is not known."""
    own = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        uid = next(int(row[7]) for row in rows if row[1] == own)
        return pwd.getpwuid(uid).pw_name
    except (OSError, ValueError, IndexError, StopIteration, KeyError):
        return None
