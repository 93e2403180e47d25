"""A client with several addresses finds the one that answers, and leaves it on request."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.core.messages import Pending, StatusQuery
from samebits.errors import ListenError
from samebits.net.address import listening
from samebits.net.client import Client, Down, Got, PassedOver, ShutOut, Up
from samebits.net.curve import cluster_keys
from samebits.net.server import Arrived
from tests.net.ends import Ends, free_port, until

OURS, THEIRS = (
    cluster_keys(secret, None) for secret in ("a secret of ours, long enough", "a secret of theirs, longer")
)

Opener = Callable[..., Client]


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(**options: object) -> Ends:
        made.append(Ends(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def client_of(one: Ends, text: str, **options: object) -> Client:
    """Return a client that is polled while this end serves."""
    client = Client(text, one.port, "session-a", 5.0, **options)  # type: ignore[arg-type]
    one.clients.append(client)
    return client


def is_up(item: object) -> bool:
    return isinstance(item, Up)


def test_address_without_a_listener_is_skipped(ends: Callable[..., Ends]) -> None:
    there = ends()
    client = client_of(there, f"127.0.0.1:{free_port()},127.0.0.1:{free_port()},127.0.0.1")
    until(there.got(client), is_up)
    assert client.address == ("127.0.0.1", there.port)
    assert client.peer == ("127.0.0.1", there.port)


def test_unresponsive_address_is_skipped(ends: Callable[..., Ends]) -> None:
    """A listener with a full queue drops connections (listen(2)), like a host that is gone."""
    there = ends()
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        client = client_of(there, f"127.0.0.1:{full.getsockname()[1]},127.0.0.1")
        until(there.got(client), is_up)
    assert client.address == ("127.0.0.1", there.port)


def test_next_address_is_tried_when_the_scheduler_is_gone(ends: Callable[..., Ends]) -> None:
    first, second = ends(), ends()
    client = client_of(first, f"127.0.0.1,127.0.0.1:{second.port}")
    until(first.got(client), is_up)
    first.end_server()
    seen = until(second.got(client), is_up)
    assert [type(item) for item in seen] == [Down, Up]
    client.send(StatusQuery(follow=False))
    until(second.heard, lambda item: item == Arrived("session-a", StatusQuery(follow=False)))


def test_client_leaves_an_address_on_request_and_hears_no_more_from_it(ends: Callable[..., Ends]) -> None:
    first, second = ends(), ends()
    client = client_of(second, f"127.0.0.1:{first.port},127.0.0.1")
    until(first.got(client), is_up)
    client.send(StatusQuery(follow=False))
    until(first.heard, lambda item: isinstance(item, Arrived))
    first.server.send("session-a", Pending("session-a", 1, 1, 2))
    client.look_elsewhere()
    client.wait(0.3)  # it leaves shortly after: messages that have arrived may still be heard
    first.server.wait(0.3)
    seen = until(second.got(client), is_up)
    downs = [index for index, item in enumerate(seen) if isinstance(item, Down)]
    assert downs and not any(isinstance(item, Got) for item in seen[downs[0] :])
    assert client.address == ("127.0.0.1", second.port)


def test_single_host_is_never_left(ends: Callable[..., Ends]) -> None:
    there = ends()
    client = client_of(there, "127.0.0.1")
    until(there.got(client), is_up)
    client.look_elsewhere()
    client.send(StatusQuery(follow=False))
    until(there.heard, lambda item: isinstance(item, Arrived))
    assert not any(isinstance(item, Down) for item in client.drain())


def test_scheduler_with_another_secret_is_named_and_skipped(ends: Callable[..., Ends]) -> None:
    foreign, own = ends(keys=THEIRS), ends(keys=OURS)
    client = client_of(own, f"127.0.0.1:{foreign.port},127.0.0.1", keys=OURS)
    seen: list[object] = []

    def both() -> list[object]:
        foreign.server.wait(0.01)
        list(foreign.server.drain())
        seen.extend(fresh := own.got(client)())
        return fresh

    until(both, is_up)
    [told] = [item for item in seen if isinstance(item, PassedOver)]
    assert (
        f"the scheduler at 127.0.0.1, port {foreign.port}" in told.text and "refuses this process's secret" in told.text
    )
    assert not any(isinstance(item, ShutOut) for item in seen)


def test_other_secrets_at_all_addresses_are_a_verdict(ends: Callable[..., Ends]) -> None:
    one, other = ends(keys=THEIRS), ends(keys=THEIRS)
    client = client_of(one, f"127.0.0.1,127.0.0.1:{other.port}", keys=OURS)

    def both() -> list[object]:
        other.server.wait(0.01)
        list(other.server.drain())
        return one.got(client)()

    until(both, lambda item: isinstance(item, ShutOut))


def test_file_is_read_again_when_the_connection_is_lost(ends: Callable[..., Ends], tmp_path: Path) -> None:
    first, second = ends(), ends()
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1:{first.port}\n")
    client = client_of(second, f"file:{hosts}")
    until(first.got(client), is_up)
    hosts.write_text(f"127.0.0.1:{second.port}")
    first.end_server()
    seen = until(second.got(client), lambda item: isinstance(item, PassedOver))
    assert any(isinstance(item, PassedOver) and "half written" in item.text for item in seen)
    hosts.write_text(f"127.0.0.1:{second.port}\n")
    until(second.got(client), is_up)
    assert client.address == ("127.0.0.1", second.port)


def test_scheduler_listens_at_its_own_address_of_the_list(ends: Callable[..., Ends], tmp_path: Path) -> None:
    elsewhere, own = "198.51.100.1:7000", f"127.0.0.1:{free_port()}"  # TEST-NET-2 (RFC 5737): belongs to no host
    port = int(own.rpartition(":")[2])
    assert listening(f"{elsewhere},{own}", 8118) == (["127.0.0.1"], port)
    assert listening(f"no-such-host.invalid,{own}", 8118) == (["127.0.0.1"], port)
    assert listening(f"{elsewhere},{own}", 8118, "127.0.0.2") == (["127.0.0.2"], port)
    with pytest.raises(
        ListenError, match=r"none of 198\.51\.100\.1:7000, 198\.51\.100\.2:8118 is this machine\. Fix: start"
    ):
        listening(f"{elsewhere},198.51.100.2", 8118)
    hosts = tmp_path / "hosts"
    with pytest.raises(ListenError, match=r"No such file.*Fix: write one host a line"):
        listening(f"file:{hosts}", 8118)
    hosts.write_text(f"{elsewhere}\n{own}\n")
    assert listening(f"file:{hosts}", 8118) == (["127.0.0.1"], port)


def test_free_one_of_two_own_addresses_is_used(ends: Callable[..., Ends]) -> None:
    taken, free = ends(), free_port()
    text = f"127.0.0.1:{taken.port},127.0.0.1:{free}"
    assert listening(text, 8118).port == free
    taken.end_server()
    assert listening(text, 8118).port == taken.port
