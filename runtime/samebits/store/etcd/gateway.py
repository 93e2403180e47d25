"""Send requests to etcd through its HTTP gateway (etcd 3.4 and later).

This module needs only the standard library and msgspec.

Every request here may be sent twice, or applied late, without harm: a write is a transaction whose comparisons fail
once it has been applied. So a request without an answer is sent to the next member until the time limit, and the caller
reads back whether an earlier attempt was applied.

A member that was suspended during an election can answer a linearizable read from an earlier state (etcd issue 20418;
seen with 3.4.23). So a client rejects every answer whose revision is below the highest that the client has seen. Reads
that follow a client's own claim are therefore complete. Without a claim, reads may be stale but never go back in time.

Nothing here compacts or defragments etcd, or disarms an alarm, because it may be Kubernetes' own etcd.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from samebits.errors import SettingsError, StoreError
from samebits.etcd_place import USUAL_PORT, EtcdAccess, EtcdPlace

PATIENCE_S: Final = 60.0
"""Seconds, longer than an election and a member's restart; workers continue training while a scheduler waits."""

COMMAND_PATIENCE_S: Final = 8.0
"""Seconds for a command, for which a user waits; longer than an election."""

ATTEMPT_S: Final = 2.0
_PAUSE_S: Final = 0.1
_QUIET_S: Final = 3.0
_MOST_ANSWER_BYTES: Final = 16 << 20
_PAGE: Final = 12
"""Values per page of a range: at 512 KiB each, in base64, a page stays below ``_MOST_ANSWER_BYTES``."""

_PASSING: Final = frozenset((1, 4, 10, 13, 14))
"""Temporary errors: gRPC's CANCELLED, DEADLINE_EXCEEDED, ABORTED, INTERNAL and UNAVAILABLE."""
_EXHAUSTED: Final = 8
_PLAINTEXT: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
"""The reasons that OpenSSL gives if the other side does not use TLS."""
_UNAUTHENTICATED: Final = 16
_BRING_BACK: Final = "Fix: bring a majority of its members back"


@dataclass(frozen=True, slots=True)
class EtcdKeyValue:
    """A key, its value, and the revision of its last change.

    A key that does not exist has revision 0 and an empty value.
    """

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Equals:
    """Condition of a transaction: the key has this value or, for None, does not exist."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class PutKey:
    """Change in a transaction: set the key to this value."""

    key: str
    value: bytes
    lease: int = 0
    """The lease after which the key is removed; 0 for none."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Change in a transaction: remove all keys from ``first`` up to, but excluding, ``end``."""

    first: str
    end: str


class _RawKeyValue(msgspec.Struct):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0


class _Header(msgspec.Struct):
    revision: int = 0


class _Response(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)


class _RangeAnswer(_Response):
    kvs: list[_RawKeyValue] = []
    more: bool = False


class _TransactionAnswer(_Response):
    succeeded: bool = False


class _Lease(_Response):
    id: int = msgspec.field(name="ID", default=0)
    seconds: int = msgspec.field(name="TTL", default=0)


class _Renewal(_Response):
    result: _Lease = msgspec.field(default_factory=_Lease)


class _Token(_Response):
    token: str = ""


class _Failure(msgspec.Struct):
    code: int = 0
    message: str = ""
    error: str = ""


_Answer = TypeVar("_Answer", bound=_Response)


class _PassingError(Exception):
    """This attempt failed, and another may succeed."""


class EtcdGateway:
    """A client of one etcd, for one thread.

    Args:
        place: the etcd cluster, whose members are tried one after the other.
        access: how this client is admitted.
        on_wait: called with a sentence while no member answers.
        patience_s: how long a request is repeated.

    Attributes:
        on_retry: called before each repetition of a request, after ``on_wait`` was called for that request.

    Raises:
        SettingsError: the files for TLS cannot be used.
    """

    def __init__(
        self,
        place: EtcdPlace,
        access: EtcdAccess,
        on_wait: Callable[[str], object] = lambda _: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.place = place
        self._access = access
        self._on_wait = on_wait
        self._patience_s = patience_s
        self.on_retry: Callable[[], object] = lambda: None
        self._context = _context(access) if access.is_encrypted else None
        self._member = 0
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._revision = 0

    def another(self) -> EtcdGateway:
        """Return another client of the same etcd, for another thread."""
        return EtcdGateway(self.place, self._access, self._on_wait, self._patience_s)

    def get(self, key: str) -> EtcdKeyValue:
        """Return the key's value, never older than what this client has read or written before.

        Raises:
            StoreError: etcd does not answer, or refuses the request.
        """
        answer = self._ask("kv/range", {"key": _coded(key)}, _RangeAnswer)
        for found in answer.kvs:
            self._require_asked(found.key == key.encode())
            return EtcdKeyValue(key, found.value, found.mod_revision)
        return EtcdKeyValue(key, b"", 0)

    def holds(self, condition: Equals) -> bool:
        """Return whether the condition is true. Raises like :meth:`get`."""
        found = self.get(condition.key)
        return found.value == condition.value if found.revision else condition.value is None

    def under(self, prefix: str, *, has_values: bool = True) -> Iterator[EtcdKeyValue]:
        """Yield all keys that begin with ``prefix``, in order.

        If ``has_values`` is false, the values are empty.

        Raises:
            StoreError: etcd does not answer, or refuses the request.
        """
        first, end = prefix.encode(), _after(prefix.encode())
        while True:
            request = {"key": _coded(first), "range_end": _coded(end), "limit": _PAGE, "keys_only": not has_values}
            answer = self._ask("kv/range", request, _RangeAnswer)
            for found in answer.kvs:
                self._require_asked(first <= found.key < end)
                yield EtcdKeyValue(found.key.decode(errors="replace"), found.value, found.mod_revision)
            if not answer.more or not answer.kvs:
                return
            first = answer.kvs[-1].key + b"\0"

    def change(self, conditions: Sequence[Equals], changes: Sequence[PutKey | Remove]) -> bool:
        """Make all changes if all conditions are true, and return whether they were.

        False may also mean that an earlier attempt of the same call was applied, so the caller must read back. An
        attempt without an answer may be applied later, after other changes, so the conditions must make that harmless.

        Raises:
            StoreError: etcd does not answer, or refuses the request; the changes may or may not have been made.
        """
        request = {
            "compare": [_comparison(one) for one in conditions],
            "success": [_change(one) for one in changes],
        }
        return self._ask("kv/txn", request, _TransactionAnswer).succeeded

    def lease(self, seconds: int) -> int:
        """Return a new lease that ends ``seconds`` after its last :meth:`renew`.

        Raises:
            StoreError: etcd does not answer, or refuses the request.
        """
        return self._ask("lease/grant", {"TTL": seconds, "ID": 0}, _Lease).id

    def renew(self, lease: int) -> bool:
        """Renew the lease; return False if it has ended. Raises like :meth:`lease`."""
        return self._ask("lease/keepalive", {"ID": lease}, _Renewal).result.seconds > 0

    def end_lease(self, lease: int) -> None:
        """End a lease, which removes its keys. Raises like :meth:`lease`."""
        self._ask("lease/revoke", {"ID": lease}, _Response)

    @contextlib.contextmanager
    def watched(self, key: str) -> Iterator[socket.socket | None]:
        """Yield a socket that becomes readable when the key changes, and perhaps before.

        None is yielded if etcd does not answer.
        """
        connection = self._connect()
        request = {"create_request": {"key": _coded(key)}}
        try:
            connection.request("POST", "/v3/watch", msgspec.json.encode(request), self._headers())
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            yield None
        else:
            yield connection.sock
        finally:
            connection.close()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, path: str, request: dict[str, Any], kind: type[_Answer]) -> _Answer:
        deadline, quiet_until = time.monotonic() + self._patience_s, time.monotonic() + _QUIET_S
        is_told = False
        while True:
            try:
                return self._attempt(path, request, kind)
            except _PassingError as error:
                self._member = (self._member + 1) % len(self.place.members)
                now = time.monotonic()
                if now >= deadline:
                    raise StoreError(
                        f"{self.place}: no member of the etcd cluster has answered for {self._patience_s:g} s "
                        f"({error}). {_BRING_BACK}; or check the hosts and ports in RECOVERY_PATH and, if the "
                        "etcd uses TLS, ETCDCTL_CACERT"
                    ) from error
                if now >= quiet_until:
                    self._on_wait(
                        f"{self.place}: the etcd does not answer ({error}); waiting up to {self._patience_s:g} s. "
                        f"{_BRING_BACK}"
                    )
                    is_told, quiet_until = True, now + PATIENCE_S / 3
                if is_told:
                    self.on_retry()
                time.sleep(_PAUSE_S)

    def _attempt(self, path: str, request: dict[str, Any], kind: type[_Answer]) -> _Answer:
        if self._access.user and not self._token:
            credentials = {"name": self._access.user, "password": self._access.password}
            self._token = self._post("auth/authenticate", credentials, _Token).token
        return self._post(path, request, kind)

    def _post(self, path: str, request: dict[str, Any], kind: type[_Answer]) -> _Answer:
        member = self.place.members[self._member]
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.request("POST", f"/v3/{path}", msgspec.json.encode(request), self._headers())
            answer = self._connection.getresponse()
            data = answer.read(_MOST_ANSWER_BYTES + 1)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise StoreError(
                f"{self.place}: {member} presents a certificate that is not accepted ({error.verify_message}). "
                "Fix: export ETCDCTL_CACERT=<the certificate of the etcd's authority>"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if isinstance(error, ssl.SSLError):
                self._raise_tls(member, error)
            raise _PassingError(f"{member}: {error or type(error).__name__}") from error
        if len(data) > _MOST_ANSWER_BYTES:
            self.close()
            raise StoreError(f"{self.place}: {member} answered with more than {_MOST_ANSWER_BYTES} bytes")
        if answer.status != http.client.OK:
            self._raise(member, answer.status, data)
        try:
            decoded = msgspec.json.decode(data, type=kind, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.close()
            raise _PassingError(f"{member}: this is not an etcd's answer ({error})") from error
        if path.startswith("kv/"):
            self._require_no_earlier_state(member, decoded.header.revision)
        return decoded

    def _require_no_earlier_state(self, member: object, revision: int) -> None:
        if revision < self._revision:
            self.close()
            raise _PassingError(f"{member}: the answer is from revision {revision}, before revision {self._revision}")
        self._revision = revision

    def _require_asked(self, was_asked: bool) -> None:
        if not was_asked:
            raise StoreError(
                f"{self.place}: etcd returned a key that was not requested. Fix: name an etcd's own client "
                "ports in RECOVERY_PATH, not those of a program in between"
            )

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self.place.members[self._member]
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=ATTEMPT_S)
        return http.client.HTTPSConnection(host, port, timeout=ATTEMPT_S, context=self._context)

    def _raise_tls(self, member: object, error: ssl.SSLError) -> None:
        """Raise if the handshake's failure would recur in every other attempt."""
        reason = error.reason or ""
        if reason in _PLAINTEXT:
            raise StoreError(
                f"{self.place}: {member} does not use TLS. Fix: unset ETCDCTL_CACERT and ETCDCTL_CERT, or name the "
                "etcd's TLS port in RECOVERY_PATH"
            ) from error
        if "CERTIFICATE" in reason:
            raise StoreError(
                f"{self.place}: {member} does not accept this client's certificate ({reason}). Fix: export "
                "ETCDCTL_CERT and ETCDCTL_KEY=<files that the etcd's authority has signed>"
            ) from error

    def _raise(self, member: object, status: int, data: bytes) -> None:
        failure = _Failure()
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            failure = msgspec.json.decode(data, type=_Failure, strict=False)
        text = failure.message or failure.error or f"HTTP status {status}"
        if failure.code == _EXHAUSTED and "space" in text:
            full = StoreError(
                f"{self.place}: the etcd's database is full ({text}); nothing was written. Fix: make room there "
                "(`etcdctl compact`, `etcdctl defrag`, then `etcdctl alarm disarm`, as its operator)"
            )
            full.may_pass = True
            raise full
        if failure.code == _UNAUTHENTICATED and self._token:
            self._token = ""  # a token ends when its member does, or after five minutes
            raise _PassingError(f"{member}: {text}")
        if failure.code in _PASSING or failure.code == _EXHAUSTED or status >= http.client.INTERNAL_SERVER_ERROR:
            raise _PassingError(f"{member}: {text}")
        if not failure.code:
            raise StoreError(
                f"{self.place}: {member} is not a client port of etcd, or its etcd is older than 3.4 ({text}). Fix: "
                f"name the client port in RECOVERY_PATH, usually {USUAL_PORT}"
            )
        raise StoreError(f"{self.place}: {member} refuses: {text}. Fix: give ETCDCTL_USER write access there")


def _context(access: EtcdAccess) -> ssl.SSLContext:
    files = {"ETCDCTL_CACERT": access.authority, "ETCDCTL_CERT": access.certificate, "ETCDCTL_KEY": access.key}
    found = " ".join(f"{name}={file}" for name, file in files.items() if file is not None)
    try:
        for file in files.values():
            if file is not None:
                file.read_bytes()
        context = ssl.create_default_context(cafile=access.authority)
        if access.certificate is not None:
            context.load_cert_chain(access.certificate, access.key)
    except OSError as error:
        raise SettingsError(
            [f"{found}: {error}. Fix: export these as for etcdctl, each the path of a readable PEM file"]
        ) from error
    return context


def _comparison(one: Equals) -> dict[str, Any]:
    if one.value is None:
        return {"key": _coded(one.key), "target": "CREATE", "create_revision": 0}
    return {"key": _coded(one.key), "target": "VALUE", "value": _coded(one.value)}


def _change(one: PutKey | Remove) -> dict[str, Any]:
    if isinstance(one, PutKey):
        return {"request_put": {"key": _coded(one.key), "value": _coded(one.value), "lease": one.lease}}
    return {"request_delete_range": {"key": _coded(one.first), "range_end": _coded(one.end)}}


def _coded(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _after(prefix: bytes) -> bytes:
    """Return the first key after all keys with the prefix, which ends with a plain character."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
