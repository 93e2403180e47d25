"""Store keys that are set after a generation's ranks have met: rank 0 stores them, the others request them over TCP.

A connection first sends the generation's password: 32 random bytes that only members get, in rank 0's message over the
scheduler. A connection that has not sent the password can only wait. Few of these are kept open, and the oldest is
closed when a new one arrives. Each connection carries one request and its answer, so a rank that waits for a key does
not block the others.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import msgpack
import torch.distributed as dist

from samebits.errors import CommunicationError
from samebits.training.group.breaker import Breaker

__all__ = ["KeyServer", "RemoteKeys"]

PASSWORD_BYTES: Final = 32
MOST_UNPROVEN: Final = 128
"""Limit on connections without a password. Members send theirs on connecting, so they are rarely counted."""
MAX_QUESTION_BYTES: Final = 1 << 20
MAX_TABLE_BYTES: Final = 64 << 20  # NCCL's id has 128 bytes, gloo's data for one rank of a subgroup has some hundreds
_BACKLOG = 1024
_CONNECT_TIMEOUT_S = 30.0
_AGAIN_S = 0.02  # pause before a request that was crowded out by strangers is repeated
_LOOK_S = 1.0  # polling interval on systems where shutting down a listener does not wake its waiter
_READ_BYTES = 1 << 16
_SIZE = struct.Struct("!I")
_OWN_ENTRY_BYTES = 100  # Python's overhead per entry

_WAITS = frozenset({"get", "wait"})


class _Refused(Exception):
    """A request that cannot be served. The text is sent to the rank that asked."""


class _Table:
    """A bounded implementation of ``torch.distributed.Store``; ``get`` and ``wait`` require keys that are present."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0

    def missing(self, keys: list[str]) -> bool:
        return any(key not in self._values for key in keys)

    def perform(self, what: str, keys: list[str], *words: Any) -> Any:
        key = keys[0] if keys else ""
        present = self._values.get(key)
        match what, words:
            case "get", ():
                return present
            case "wait", ():
                return None
            case "check", ():
                return not self.missing(keys)
            case "set", (bytes() as value,):
                return self._put(key, value)
            case "add", (int() as amount,):
                total = int(present or b"0") + amount
                self._put(key, str(total).encode())
                return total
            case "append", (bytes() as value,):
                return self._put(key, (present or b"") + value)
            case "compare_set", (bytes() as expected, bytes() as desired):
                return self._compare_set(key, present, expected, desired)
            case "delete_key", ():
                self._bytes -= _size(key, self._values.pop(key)) if present is not None else 0
                return present is not None
            case "num_keys", ():
                return len(self._values)
        raise _Refused(f"there is no {what!r} of {len(words)} words")

    def _compare_set(self, key: str, present: bytes | None, expected: bytes, desired: bytes) -> bytes:
        if present == expected or (present is None and not expected):
            self._put(key, desired)
            return desired
        return expected if present is None else present

    def _put(self, key: str, value: bytes) -> None:
        before = self._values.get(key)
        total = self._bytes + _size(key, value) - (0 if before is None else _size(key, before))
        if total > MAX_TABLE_BYTES:
            raise _Refused(f"the keys set so far and {key!r} would take more than {MAX_TABLE_BYTES} bytes")
        self._values[key], self._bytes = value, total


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value) + _OWN_ENTRY_BYTES


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection: the bytes received, the keys that it waits for, and the unsent rest of its answer."""

    connection: socket.socket
    heard: bytearray = field(default_factory=bytearray)
    awaits: tuple[str, list[str]] | None = None
    answer: memoryview | None = None


class KeyServer:
    """Rank 0's keys and the thread that serves them, from :meth:`start` until the breaker is thrown.

    The listener is open as soon as the object exists, so earlier connections wait in the backlog.

    Args:
        address: numeric IP address of this host to listen on.
        breaker: ends the server when thrown.

    Attributes:
        address: the address with the port.
        password: given to members only.
    """

    def __init__(self, address: str, breaker: Breaker) -> None:
        self.password = secrets.token_bytes(PASSWORD_BYTES)
        self._table = _Table()
        self._breaker = breaker
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self.address = (address, int(self._listener.getsockname()[1]))
        self._unproven: dict[_Caller, None] = {}  # oldest first
        self._waiting: dict[_Caller, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def start(self) -> None:
        """Start serving in a separate thread.

        Raises:
            GenerationEndedError: the breaker was thrown already; the listener is closed.
        """
        end: Future[None] = Future()
        end.add_done_callback(lambda _: self._wake())
        try:
            self._breaker.watch(end)
        except BaseException:
            self._close()
            raise
        threading.Thread(target=self._serve, name=f"keys of {self._breaker.name}", daemon=True).start()

    def _wake(self) -> None:
        with suppress(OSError):  # the thread has already noticed the end and closed the listener
            self._listener.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        try:
            while not self._breaker.broken:
                for key, _ in self._selector.select(_LOOK_S):
                    caller: _Caller | None = key.data
                    if caller is None:
                        self._accept()
                    elif caller.connection.fileno() < 0:
                        continue  # closed a moment ago
                    elif caller.answer is None:
                        self._hear(caller)
                    else:
                        self._tell(caller)
        finally:
            self._close()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the listener was shut down, or descriptors ran out: close connections without a password
            self._make_room(0)
            time.sleep(_AGAIN_S)
            return
        self._make_room(MOST_UNPROVEN - 1)
        connection.setblocking(False)
        caller = _Caller(connection)
        self._unproven[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._hear(caller)

    def _make_room(self, most: int) -> None:
        while len(self._unproven) > most:
            self._let_go(next(iter(self._unproven)))

    def _let_go(self, caller: _Caller) -> None:
        self._unproven.pop(caller, None)
        self._waiting.pop(caller, None)
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def _hear(self, caller: _Caller) -> None:
        try:
            said = caller.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said or caller.awaits is not None:  # closed, or sending more than one request
            self._let_go(caller)
            return
        caller.heard += said
        if caller in self._unproven:
            if len(caller.heard) < PASSWORD_BYTES:
                return
            if not hmac.compare_digest(caller.heard[:PASSWORD_BYTES], self.password):
                self._let_go(caller)
                return
            del self._unproven[caller], caller.heard[:PASSWORD_BYTES]
        self._understand(caller)

    def _understand(self, caller: _Caller) -> None:
        if len(caller.heard) < _SIZE.size:
            return
        (size,) = _SIZE.unpack_from(caller.heard)
        if size > MAX_QUESTION_BYTES:
            self._answer(caller, False, f"a request of {size} bytes, at most {MAX_QUESTION_BYTES} are allowed")
        elif len(caller.heard) >= _SIZE.size + size:
            try:
                what, keys, *words = msgpack.unpackb(bytes(caller.heard[_SIZE.size : _SIZE.size + size]))
                if not isinstance(what, str) or not all(isinstance(key, str) for key in keys):
                    raise _Refused("expected a request that consists of a command, a list of keys and values")
                if what in _WAITS and self._table.missing(keys):
                    caller.awaits = (what, keys)
                    self._waiting[caller] = None
                    return
                self._answer(caller, True, self._table.perform(what, keys, *words))
            except (_Refused, ValueError, TypeError, msgpack.UnpackException) as error:
                self._answer(caller, False, f"{type(error).__name__}: {error}")
            self._answer_waiting()

    def _answer_waiting(self) -> None:
        for caller in list(self._waiting):
            assert caller.awaits is not None
            what, keys = caller.awaits
            if not self._table.missing(keys):
                del self._waiting[caller]
                self._answer(caller, True, self._table.perform(what, keys))

    def _answer(self, caller: _Caller, done: bool, value: Any) -> None:
        body = msgpack.packb([done, value])
        caller.answer = memoryview(_SIZE.pack(len(body)) + body)
        self._selector.modify(caller.connection, selectors.EVENT_WRITE, caller)
        self._tell(caller)

    def _tell(self, caller: _Caller) -> None:
        assert caller.answer is not None
        try:
            caller.answer = caller.answer[caller.connection.send(caller.answer) :]
        except BlockingIOError:
            return
        except OSError:
            caller.answer = caller.answer[:0]
        if not caller.answer:
            self._let_go(caller)


class RemoteKeys:
    """Access to rank 0's keys from any rank. Each call uses one connection.

    Args:
        address: the server's, with the port.
        password: the server's.
    """

    def __init__(self, address: tuple[str, int], password: bytes) -> None:
        self.address = address
        self._password = password

    @property
    def words(self) -> list[str | int | bytes]:
        """Host, port and password, to be sent to the other ranks."""
        return [*self.address, self._password]

    @classmethod
    def from_words(cls, words: list[Any]) -> RemoteKeys:
        """Rebuild the object from :attr:`words`."""
        host, port, password = words
        return cls((host, port), password)

    def ask(self, timeout: timedelta, what: str, keys: list[str], *words: bytes | int) -> Any:
        """Send one request and return the answer. ``get`` and ``wait`` are answered once their keys exist.

        Raises:
            CommunicationError: rank 0 cannot be reached, or refuses the request.
            DistStoreError: torch's, if no answer came within ``timeout``.
        """
        body = msgpack.packb([what, keys, *words])
        question = self._password + _SIZE.pack(len(body)) + body
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                answer = self._once(question, deadline)
            except TimeoutError:
                raise dist.DistStoreError(f"no {what} of {', '.join(keys)} within {timeout}") from None
            except OSError as error:
                raise CommunicationError(f"rank 0, which keeps later keys, does not answer: {error}") from error
            if answer is not None:
                break
            time.sleep(_AGAIN_S)  # crowded out before the request was read, so nothing was done
        done, value = msgpack.unpackb(answer)
        if not done:
            raise CommunicationError(f"rank 0 refused {what} of {', '.join(keys)}: {value}")
        return value

    def _once(self, question: bytes, deadline: float) -> bytes | None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        with socket.create_connection(self.address, min(_CONNECT_TIMEOUT_S, left_s)) as connection:
            connection.settimeout(left_s)
            try:
                connection.sendall(question)
                head = _read(connection, _SIZE.size)
                return None if head is None else _read(connection, _SIZE.unpack(head)[0])
            except (ConnectionResetError, BrokenPipeError):
                return None


def _read(connection: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            return None
        found += part
    return bytes(found)
