"""Both ends of the wire on loopback: messages, lost connections, garbage, IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import zmq

from samebits.core.messages import Pending, StatusQuery, StopJob
from samebits.errors import ListenError
from samebits.net import address
from samebits.net.address import cannot_listen, check_free, endpoint, folder_of_holder, listening, port_holder
from samebits.net.client import Client, Down, Got, Up
from samebits.net.server import Arrived, ConnectionLost, Garbled, Incoming, Server
from tests.net.ends import PATIENCE_S, Ends, free_port, listened, until

PORT = 8118


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_message_has_its_connections_identity_and_the_answer_returns_to_it(ends: Ends) -> None:
    client = ends.connected("session-a")
    client.send(StopJob("the test"))
    seen = until(ends.heard, lambda item: isinstance(item, Arrived))
    assert seen == [Arrived("session-a", StopJob("the test"))]
    ends.server.send("session-a", Pending("session-a", 1, 2, 4))
    assert Got(Pending("session-a", 1, 2, 4)) in until(ends.got(client), lambda item: isinstance(item, Got))


def test_close_is_reported_after_the_messages_of_the_connection(ends: Ends) -> None:
    client = ends.connected("session-a")
    client.send(StatusQuery(follow=False))
    client.close()
    ends.clients.remove(client)
    seen = until(ends.heard, lambda item: isinstance(item, ConnectionLost))
    assert seen == [Arrived("session-a", StatusQuery(follow=False)), ConnectionLost("session-a")]


def test_close_of_a_silent_peer_is_not_reported(ends: Ends) -> None:
    silent, speaking = ends.connected("silent"), ends.connected("speaking")
    speaking.send(StatusQuery(follow=False))
    silent.close()
    speaking.close()
    ends.clients.clear()
    seen = until(ends.heard, lambda item: item == ConnectionLost("speaking"))
    assert ConnectionLost("silent") not in seen


def test_connection_without_an_answer_is_begun_anew() -> None:
    """Otherwise, a host that was cut off for a while would be reached only at the kernel's next, late attempt."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        number = full.getsockname()[1]
        for _ in range(4):  # as many as the kernel takes without accept(), and more
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", number))
        process = psutil.Process()
        before, tried = {one.laddr.port for one in process.net_connections("tcp")}, set[int]()
        client = Client("127.0.0.1", number, "worker", 1.0)
        stack.callback(client.close)

        def attempts() -> list[int]:
            listened(client)
            calls = [one for one in process.net_connections("tcp") if one.raddr and one.raddr.port == number]
            tried.update(one.laddr.port for one in calls if one.status == psutil.CONN_SYN_SENT)
            return [len(tried - before)]

        until(attempts, lambda seen: isinstance(seen, int) and seen >= 2)


def test_client_learns_that_the_server_is_gone_and_that_one_is_back(ends: Ends) -> None:
    client = ends.connected("session-a")
    ends.server.close()
    until(lambda: listened(client), lambda item: isinstance(item, Down))
    ends.server = Server(["127.0.0.1"], ends.port, silence_s=5.0)
    until(ends.got(client), lambda item: isinstance(item, Up))
    client.send(StatusQuery(follow=True))
    until(ends.heard, lambda item: item == Arrived("session-a", StatusQuery(follow=True)))


@pytest.mark.parametrize(
    "frames", [[b"no msgpack \xff"], [b"\x91\x63"], [b""], [b"one", b"two"], [b"\x92" * 2000]], ids=repr
)
def test_invalid_bytes_are_counted_against_their_sender(ends: Ends, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.ROUTING_ID, b"stranger")
        stranger.linger = 0
        stranger.connect(endpoint("127.0.0.1", ends.port))
        stranger.send_multipart(frames)
        seen = until(ends.heard, lambda item: isinstance(item, Garbled))
        assert [item.peer for item in seen if isinstance(item, Garbled)] == ["stranger"]


def test_wake_ends_a_wait(ends: Ends) -> None:
    ends.server.wake()
    began = time.monotonic()
    ends.server.wait(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S


def test_taken_port_is_an_error_that_names_its_holder(ends: Ends) -> None:
    with pytest.raises(ListenError, match=r"SCHED_PORT=.* held by pid \d+"):
        Server(["127.0.0.1"], ends.port, silence_s=5.0)


@pytest.mark.parametrize(
    ("number", "found", "expected"),
    [
        (errno.EADDRINUSE, "(Address already in use): held by ", "set SCHED_PORT to a free port in every process"),
        (
            errno.EACCES,
            "(Permission denied), because this user may not listen on",
            "set SCHED_PORT to one from 1024",
        ),
        (
            errno.EADDRNOTAVAIL,
            "(Cannot assign requested address), because this machine does not have",
            "Fix: set SCHED_BIND to",
        ),
        (errno.ENETDOWN, "(Network is down). Fix: set SCHED_BIND to", "or SCHED_PORT to another port"),
    ],
)
def test_unusable_port_is_reported_with_the_reason_and_the_fix(number: int, found: str, expected: str) -> None:
    text = str(cannot_listen("127.0.0.1", free_port(), number, os.strerror(number)))
    assert found in text and expected in text, text
    assert ("held by" in text) == (number == errno.EADDRINUSE)


def test_address_of_another_machine_is_not_checked_here() -> None:
    with pytest.raises(ListenError, match=r"192\.0\.2\.1 cannot be listened on .* does not have that address"):
        check_free(["192.0.2.1"], free_port())  # TEST-NET-1 (RFC 5737): belongs to no host
    with pytest.raises(ListenError, match=r"192\.0\.2\.1 cannot be listened on .* does not have that address"):
        Server(["192.0.2.1"], free_port(), silence_s=5.0)


def test_ipv6_works_like_ipv4() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            assert listening("localhost", PORT).addresses  # this machine has no IPv6, so only IPv4 may be resolved
            return
    ends = Ends(address="::1")
    try:
        client = ends.connected("six")
        client.send(StatusQuery(follow=False))
        until(ends.heard, lambda item: item == Arrived("six", StatusQuery(follow=False)))
    finally:
        ends.close()


def test_name_of_another_machine_is_refused_with_the_fix() -> None:
    with pytest.raises(ListenError, match=r"^SCHED_HOST=192\.0\.2\.1 resolves to .* SCHED_BIND"):
        listening("192.0.2.1", PORT)  # TEST-NET-1 (RFC 5737): belongs to no host
    with pytest.raises(ListenError, match=r"^SCHED_HOST=no-such-host\.invalid cannot be resolved"):
        listening("no-such-host.invalid", PORT)


def test_sched_bind_is_used_and_named_if_set() -> None:
    assert listening("192.0.2.1", PORT, "127.0.0.1") == (["127.0.0.1"], PORT)
    with pytest.raises(ListenError, match=r"^SCHED_BIND=192\.0\.2\.1 resolves to 192\.0\.2\.1, and none of these"):
        listening("127.0.0.1", PORT, "192.0.2.1")
    with pytest.raises(ListenError, match=r"^SCHED_BIND=no-such-host\.invalid cannot be resolved"):
        listening("127.0.0.1", PORT, "no-such-host.invalid")


def test_working_folder_of_a_ports_holder_is_known_for_own_processes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert folder_of_holder(listening.getsockname()[1]) == Path.cwd()
    assert folder_of_holder(free_port()) is None


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]])
def test_free_port_can_be_listened_on(addresses: list[str]) -> None:
    Server(addresses, address.free_port(addresses), silence_s=5.0).close()


def test_port_without_a_holder_is_reported_as_free() -> None:
    assert "ended a moment ago" in port_holder(free_port())


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.2"]])
def test_server_listens_on_inherited_sockets(addresses: list[str]) -> None:
    """The port is never free between the launcher and the scheduler."""
    sockets = address.listen(addresses, 0)
    port = address.port_of(sockets)
    inherited = address.taken_over([os.dup(one.fileno()) for one in sockets])
    address.close_all(sockets)
    server = Server(addresses, port, silence_s=5.0, inherited=inherited)
    try:
        for one in ("127.0.0.1", "127.0.0.2"):
            if one in addresses:
                with pytest.raises(ListenError, match="Address already in use"):
                    address.check_free([one], port)
            else:
                address.check_free([one], port)
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(endpoint(addresses[0], port))
            peer.send(b"no message")
            until(lambda: _heard(server), lambda item: isinstance(item, Garbled))
    finally:
        server.close()
    address.check_free(addresses, port)


def test_this_machine_is_reached_by_ipv6_without_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address.loopback() == "127.0.0.1"
    monkeypatch.setattr(address, "is_local", lambda one: one == "::1")
    assert address.loopback() == "::1"
    assert address.listening("::1", 8118) == (["::1"], 8118)
    with pytest.raises(ListenError, match=r"Fix: this machine has no IPv4, so export SCHED_HOST=::1$"):
        address.listening("127.0.0.1", 8118)
    with pytest.raises(ListenError, match=r"Fix: start the scheduler on that host, or set SCHED_BIND"):
        address.listening("192.0.2.1", 8118)


def test_inherited_socket_of_another_address_is_named() -> None:
    sockets = address.listen(["127.0.0.1", "127.0.0.2"], 0)
    port, other = address.port_of(sockets), sockets[1].fileno()
    text = (
        rf"descriptor {other} listens on 127\.0\.0\.2, port {port}, .* must listen on 127\.0\.0\.1, port {port}\. Fix:"
    )
    with pytest.raises(ListenError, match=text):
        Server(["127.0.0.1"], port, silence_s=5.0, inherited=sockets)
    address.close_all(sockets)


def test_inherited_descriptor_that_does_not_listen_is_named() -> None:
    with (
        socket.socket() as silent,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as unix,
        Path("/dev/null").open() as file,
    ):
        for one, what in (
            (silent, "does not listen"),
            (datagrams, "is a socket of kind AF_INET, SOCK_DGRAM"),
            (unix, "is a socket of kind AF_UNIX, SOCK_STREAM"),
            (file, "is not a socket"),
        ):
            number = os.dup(one.fileno())
            with pytest.raises(ListenError, match=rf"LISTEN_FDS: descriptor {number} {what}\. Fix: `unset LISTEN_FDS`"):
                address.taken_over([number])
    with pytest.raises(ListenError, match=r"LISTEN_FDS: descriptor 9999 is not open in this process"):
        address.taken_over([9999])


def test_host_of_the_inherited_socket_counts_as_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        place, other = one.getsockname(), free_port()
        hosts = f"127.0.0.1:{place[1]},127.0.0.1:{other}"
        assert address.listening(hosts, 8118).port == other
        assert address.listening(hosts, 8118, held=[place]).port == place[1]


def _heard(server: Server) -> list[Incoming]:
    server.wait(0.1)
    return list(server.drain())


def test_only_one_of_two_can_bind_a_port_from_the_start() -> None:
    first = address.listen(["127.0.0.1"], 0)
    with pytest.raises(ListenError) as raised:
        address.listen(["127.0.0.1"], address.port_of(first))
    assert raised.value.is_taken
    address.close_all(first)
