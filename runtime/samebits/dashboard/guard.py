"""Decide whether a request may be answered, from its method and headers alone.

Every web site that the user opens in a browser can reach a page on loopback. A request must therefore name this server
as its host (DNS rebinding uses one of the attacker's names) and must not come from another site. Without actions, a
request can only read. If the job has a secret, the request must carry a token derived from the secret. If not, other
users of this machine need a random token. An action, if actions are enabled, always needs a token and must declare that
it comes from this page.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from samebits.net.curve import ClusterKeys

Endpoint = tuple[str, int]
Ends = tuple[Endpoint | None, tuple[str, int | None] | None]
PROC_NET = Path("/proc/net")


def uid_of(client: Endpoint | None, server: tuple[str, int | None] | None, folder: Path = PROC_NET) -> int | None:
    """Return the user ID that owns the client's socket, or None if unknown.

    Args:
        client: address and port of the other end.
        server: address and port of this end.
        folder: the folder with the tables ``tcp`` and ``tcp6``.
    """
    return uids_of([(client, server)], folder)[0]


def uids_of(connections: Sequence[Ends], folder: Path = PROC_NET) -> list[int | None]:
    """Return the user IDs for many (client, server) connections. Each table is read once."""
    found: list[int | None] = [None] * len(connections)
    for table, version in (("tcp", 4), ("tcp6", 6)):
        sought: dict[tuple[str, str], int] = {}
        for index, (client, server) in enumerate(connections):
            if client is None or server is None or server[1] is None or found[index] is not None:
                continue
            with contextlib.suppress(ValueError):  # the table has no such address
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


def _as_there(end: Endpoint, version: int) -> str:
    """Convert an address to the table's form: hexadecimal 4-byte numbers in host byte order.

    An IPv6 socket's IPv4 address has the form ``::ffff:127.0.0.1`` (RFC 4291, section 2.5.5.2).

    Raises:
        ValueError: the table of this version has no such address.
    """
    address = ipaddress.ip_address(end[0])
    if address.version == 4 and version == 6:
        address = ipaddress.ip_address(f"::ffff:{end[0]}")
    if address.version != version:
        raise ValueError(end[0])
    packed = address.packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"


COOKIE = "samebits_token"
ACTION = "/api/act"
ACTION_TYPE = "application/json"
"""A form on another site cannot send this type, and a script needs a preflight (fetch.spec.whatwg.org, CORS)."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Why a request is refused. The text is for the user and contains no secret."""

    status: HTTPStatus
    text: str


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules for requests to one server.

    Attributes:
        names: host names of this server, besides addresses and localhost.
        token: the token that every reader needs; None if none is needed.
        action_token: the token that an action needs; None if actions are disabled.
        others_token: without ``token``, the token that other users of this machine need; None if none is needed.
    """

    names: frozenset[str]
    token: str | None
    action_token: str | None = None
    others_token: str | None = None

    def judge(
        self, method: str, headers: Mapping[str, str], token: str | None, *, is_anothers: bool = False
    ) -> RequestRefused | None:
        """Return why the request is refused, or None if it is admitted.

        ``headers`` have lower-case names.
        """
        if method not in ("GET", "HEAD") and (self.action_token is None or method != "POST"):
            return RequestRefused(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "this page is read-only: only GET and HEAD are answered. Fix: start it with DASHBOARD=actions to "
                "allow actions",
            )
        host = headers.get("host", "")
        if not self._is_own(host):
            return RequestRefused(
                HTTPStatus.MISDIRECTED_REQUEST,
                "the request is for a host name that does not belong to this server. Fix: use its address, as "
                "http://127.0.0.1",
            )
        origin = headers.get("origin")
        from_elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        is_click = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if (origin is not None and origin.lower() != f"http://{host.lower()}") or (from_elsewhere and not is_click):
            return RequestRefused(
                HTTPStatus.FORBIDDEN, "requests from another site are refused. Fix: open this page by its address"
            )
        if self.token is not None and not _shows(self.token, headers, token):
            return RequestRefused(
                HTTPStatus.UNAUTHORIZED,
                "the job has a CLUSTER_SECRET, and this request has no token derived from it. Fix: open the address "
                "that `samebits dashboard` printed",
            )
        if is_anothers and self.others_token is not None and not _shows(self.others_token, headers, token):
            return RequestRefused(
                HTTPStatus.UNAUTHORIZED,
                "only the job's owner may read this page without a token, and this connection is another user's. "
                "Fix: ask that user for the address with a token that `samebits dashboard` printed",
            )
        return self._judge_action(headers) if method == "POST" else None

    def _judge_action(self, headers: Mapping[str, str]) -> RequestRefused | None:
        """Decide whether an action is admitted.

        Its token must be in a header or a cookie, not in a URL, which others may have seen.
        """
        if headers.get("origin") is None:
            return RequestRefused(HTTPStatus.FORBIDDEN, "an action needs an Origin header, and this request has none")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != ACTION_TYPE:
            return RequestRefused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"an action must be {ACTION_TYPE}")
        if not self.may_act(headers):
            return RequestRefused(
                HTTPStatus.UNAUTHORIZED,
                "an action needs the page's token. Fix: open the address that `samebits dashboard` printed",
            )
        return None

    def may_act(self, headers: Mapping[str, str]) -> bool:
        """Return whether a page that sends these headers may request actions."""
        return self.action_token is not None and _shows(self.action_token, headers, None)

    def knows(self, token: str) -> bool:
        """Return whether the token allows reading or actions."""
        tokens = (self.token, self.action_token, self.others_token)
        return any(_shows(own, {}, token) for own in tokens if own is not None)

    def _is_own(self, host: str) -> bool:
        name = host_name(host)
        if name is None:
            return False
        if name == "localhost" or name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str | None:
    """Return the name or address in a Host header, without port and brackets; None if invalid."""
    if host.startswith("["):
        name, closed, rest = host[1:].partition("]")
        is_sound = closed and (not rest or (rest.startswith(":") and rest[1:].isdecimal()))
    else:
        name, colon, port = host.partition(":")
        is_sound = not colon or port.isdecimal()
    return name.lower().removesuffix(".") if is_sound and name else None


def token_of(keys: ClusterKeys | None) -> str | None:
    """Return the token derived from the job's secret, or None if the job has no secret.

    The token does not reveal the secret.
    """
    if keys is None:
        return None
    return hashlib.blake2b(key=keys.scheduler.secret, person=b"dashboard", digest_size=24).hexdigest()


def action_token_of(keys: ClusterKeys | None, *, is_on: bool) -> str | None:
    """Return the token for actions, which is random if the job has no secret."""
    return (token_of(keys) or secrets.token_hex(24)) if is_on else None


def others_token_of(token: str | None, action_token: str | None) -> str | None:
    """Return the token for other users of this machine, or None if all readers need a token anyway."""
    return None if token is not None else action_token or secrets.token_hex(24)


def _shows(expected: str, headers: Mapping[str, str], token: str | None) -> bool:
    shown = token or _bearer(headers) or _cookie(headers)
    return shown is not None and hmac.compare_digest(shown.encode(errors="replace"), expected.encode())


def _bearer(headers: Mapping[str, str]) -> str | None:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value.strip() else None


def cookie_of(host: str) -> str:
    """Return the name of the cookie for a Host header.

    A browser sends an address's cookies to all of its ports (RFC 6265, section 8.5). The name contains the port, so
    that the pages of two jobs do not overwrite each other's token.
    """
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() and port.isascii() else COOKIE


def _cookie(headers: Mapping[str, str]) -> str | None:
    expected = cookie_of(headers.get("host", ""))
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == expected and value:
            return value
    return None
