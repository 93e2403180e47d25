"""The page's connections: those held open by others block no user, and no request causes a 500."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as tried
from hypothesis import strategies as st

from samebits.config import Settings
from samebits.dashboard import connections as module
from samebits.dashboard.actions import Actions
from samebits.dashboard.command import _listen, server_of
from samebits.dashboard.connections import DESCRIPTORS_EACH, Connections, _network_of
from samebits.dashboard.guard import ACTION, Ends, Guard
from samebits.dashboard.watching import JobWatch
from samebits.dashboard.web_app import Pages, app_of

MOST = 16
WAIT_S = 60
TOKEN = "t0ken"
IDLE = b""
HALF_A_HEAD = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "
HALF_A_BODY = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\nx"


class Served:
    """The page of an ended job on a real socket; clients from ``others`` count as another user."""

    def __init__(self, settings: Settings) -> None:
        self.others: set[int] = set()
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(_listen("127.0.0.1", 0))
        guard = Guard(frozenset(), None, TOKEN, TOKEN)
        app = app_of(Pages(JobWatch(settings, None)), guard, lambda: "", Actions(settings))
        self._server = server_of(app, Connections(MOST * DESCRIPTORS_EACH, self._uids))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    def _uids(self, connections: Sequence[Ends]) -> list[int | None]:
        ports = [client[1] if client is not None else 0 for client, _ in connections]
        return [os.geteuid() + (port in self.others) for port in ports]

    def connect(self, said: bytes = IDLE, *, is_anothers: bool = False) -> socket.socket:
        connection = self._stack.enter_context(socket.socket())
        connection.settimeout(WAIT_S)
        if is_anothers:
            connection.bind(("127.0.0.1", 0))
            self.others.add(connection.getsockname()[1])
        connection.connect(self._listener.getsockname())
        connection.sendall(said)
        return connection

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._stack.close()


@contextmanager
def served_of(settings: Settings) -> Iterator[Served]:
    served = Served(settings)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture
def served(make_folder: Callable[..., Settings]) -> Iterator[Served]:
    with served_of(make_folder()) as one:
        yield one


def ask(connection: socket.socket, path: str = "/api/health") -> int:
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    return status_of(connection)


def status_of(connection: socket.socket) -> int:
    """Return the answer's status, or 0 if the connection was closed without one."""
    heard = b""
    with suppress(ConnectionResetError):
        while b"\r\n" not in heard and (part := connection.recv(1 << 16)):
            heard += part
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", heard)
    return int(found[1]) if found else 0


def is_closed(connection: socket.socket) -> bool:
    """Read until the connection is closed, whether or not a request was answered before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_idle_connections_of_others_do_not_block_the_page(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_S", WAIT_S)  # only the bound closes connections
    before = served.connect()
    strangers = [
        served.connect(said, is_anothers=True) for _ in range(2 * MOST) for said in (IDLE, HALF_A_HEAD, HALF_A_BODY)
    ]
    assert ask(served.connect()) == 200
    assert ask(before) == 200, "the oldest of all, and this user's"
    assert ask(served.connect(is_anothers=True), "/metrics") == 200
    assert all(is_closed(stranger) for stranger in strangers[: 2 * MOST]), "the oldest of the largest crowd are closed"


def test_idle_connections_of_this_users_program_do_not_block_the_page(served: Served) -> None:
    stream = served.connect()
    assert ask(stream, "/api/stream") == 200
    leaking = [served.connect() for _ in range(5 * MOST)]
    assert ask(served.connect()) == 200
    assert is_closed(leaking[0])
    stream.settimeout(WAIT_S)
    while b"event: state" not in stream.recv(1 << 16):
        pass  # the page that is being read stays open


@pytest.mark.parametrize(
    "said", [IDLE, HALF_A_HEAD, HALF_A_BODY, b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /metrics HTTP"]
)
def test_request_that_does_not_arrive_in_time_ends_its_connection(
    served: Served, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.3)
    connection, drip = served.connect(said), b"x"
    connection.settimeout(0.05)
    for _ in range(int(WAIT_S / 0.05)):  # trickling bytes do not extend the time
        with suppress(TimeoutError):
            try:
                if connection.recv(1 << 16) == b"":
                    return
                if said:
                    connection.sendall(drip)
            except (ConnectionResetError, BrokenPipeError):
                return
    pytest.fail("it stays open")


def test_bound_leaves_most_descriptors_free() -> None:
    assert Connections(1 << 20).most == module.MOST_CONNECTIONS
    assert Connections(64).most == 8 and Connections(1).most == 1


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("127.3.2.1", "loopback"),
        ("::1", "loopback"),
        ("fd00:1:2:3:4::5", "fd00:1:2:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "unknown"),
    ],
)
def test_addresses_available_to_one_host_are_counted_together(address: str, network: str) -> None:
    assert _network_of((address, 1)) == network


# ---- arbitrary requests

TEXTS = st.text(max_size=20) | st.sampled_from(
    ["\ud800", "\0", "\x1b[2J", "\u2028", "worker_0", "../x", "1e999", "%ff"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from(["kill", "drain", "drill", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.sampled_from(["do", "node"]), inner),
    max_leaves=6,
)
ORDERS = st.builds(lambda do, node: {"do": do, "node": node}, st.sampled_from(["kill", "drain"]) | VALUES, VALUES)
BODIES = st.binary(max_size=600) | (ORDERS | VALUES).map(lambda value: json.dumps(value).encode())
PATHS = st.sampled_from(
    ["/", "/api/everything", "/api/log?name=", "/api/health", "/metrics", "/report", ACTION, "/?token=", "/page.js"]
)
VISIBLE = st.binary(max_size=40).map(lambda value: bytes(byte for byte in value if byte not in b" \r\n\t\0\x0b\x0c"))
NAMES = st.sampled_from(["host", "origin", "cookie", "authorization", "content-type", "sec-fetch-site", "range", "te"])


@tried(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "OPTIONS"]),
    path=PATHS,
    query=VISIBLE,
    headers=st.lists(st.tuples(NAMES, VISIBLE), max_size=3),
    body=BODIES,
)
@example("POST", ACTION, b"", [], b'{"do":"kill","node":"\\ud800"}')
@example("POST", ACTION, b"", [], b'{"do":"kill","node":"1"')
@example("POST", ACTION, b"", [], b'\xff\xfe{"do"')
@example("GET", "/api/log?name=", b"%ed%a0%80", [], b"")
def test_no_request_makes_the_page_fail(
    served: Served, method: str, path: str, query: bytes, headers: list[tuple[str, bytes]], body: bytes
) -> None:
    given = {"host": b"127.0.0.1", "origin": b"http://127.0.0.1", "content-type": b"application/json"}
    given |= {"authorization": f"Bearer {TOKEN}".encode(), "connection": b"close", **dict(headers)}
    head = [
        f"{method} {path}".encode() + query + b" HTTP/1.1",
        *(name.encode() + b": " + it for name, it in given.items()),
    ]
    connection = served.connect(b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body]))
    status = status_of(connection)
    connection.close()
    assert 200 <= status < 500
