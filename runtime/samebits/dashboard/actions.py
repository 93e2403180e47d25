"""What the page may have done to the job, where it may: one route that takes a small order and says what became of it.

Here lives reading the order and who it is from; what may be done is ``ops.acting``'s, who may ask ``guard``'s. The one
idea: an order is a few bytes of JSON of one shape, read only after the guard has judged the request, one at a time.
"""

from __future__ import annotations

import asyncio
import pwd
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request

from samebits import strict_json
from samebits.config import Settings
from samebits.dashboard.neighbour import uid_of
from samebits.errors import SameBitsError
from samebits.ops.acting import Deed, act

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
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return Done(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"an order has at most {MOST_BYTES} bytes")
        except ClientDisconnect:
            return Done(HTTPStatus.BAD_REQUEST, "the connection ended before the order did")
        ordered = order_in(bytes(body))
        if ordered is None:
            expected = " or ".join(f'{{"do": "{deed}", "node": "1"}}' for deed in Deed)
            return Done(HTTPStatus.BAD_REQUEST, f"this is no order. Fix: send {expected}, with a node's name")
        deed, node = ordered
        asker = asker_of(request)
        async with self._one_at_a_time:
            try:
                return Done(HTTPStatus.OK, await asyncio.to_thread(act, self._settings, deed, node, asker))
            except SameBitsError as error:
                return Done(HTTPStatus.CONFLICT, str(error))


def order_in(body: bytes) -> tuple[Deed, str] | None:
    """Return what is ordered and the node it is for, or None if the body is no order."""
    try:
        told = strict_json.loads(body)
    except ValueError:
        return None
    if not isinstance(told, dict) or told.get("do") not in list(map(str, Deed)) or told.keys() - {"do", "node"}:
        return None
    node = told.get("node", "")
    # A lone surrogate is not printable either, and could not be sent back in the answer.
    is_name = isinstance(node, str) and len(node) <= 128 and node.isprintable()
    return (Deed(told["do"]), node) if is_name else None


def asker_of(request: Request) -> str:
    """Whose request it is, as far as this machine knows: an address, and on loopback the user of the connection."""
    if request.client is None:
        return "the page"
    uid = uid_of(request.client, request.scope.get("server"))
    return f"the page at {request.client.host}" + (f", user {_name_of(uid)}" if uid is not None else "")


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
