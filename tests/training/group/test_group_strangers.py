"""Foreign connections at the ports of real rank processes: during formation, during training, and afterwards."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from samebits.training.group import gloo
from tests.hostile.attackers import is_let_in, listening_ports
from tests.system.processes import WarmStarter
from tests.training.hub import Hub, hub

SCRIPT = Path(__file__).with_name("group_ranks.py")
NODES = [0, 1, 2]
IDLE, GARBAGE = 200, 30


@pytest.fixture
def ranks(tmp_path: Path, warm: WarmStarter) -> Iterator[Hub]:
    with hub(SCRIPT, tmp_path, warm) as one:
        yield one


@contextlib.contextmanager
def strangers(addresses: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Connect many silent clients and some that send what gloo takes for a connection's number."""
    with contextlib.ExitStack() as stack:
        for address in addresses:
            for number in range(IDLE + GARBAGE):
                caller = stack.enter_context(socket.create_connection(address, 10))
                if number >= IDLE:
                    caller.sendall(b"\xff" * (number - IDLE + 1))  # up to 30 bytes; from eight on gloo keeps them
        yield


def trained(ranks: Hub) -> str:
    ranks.tell(NODES, "train")
    (sha256,) = {one["sha256"] for one in ranks.await_events("trained", NODES)}
    return str(sha256)


def test_group_forms_and_trains_to_the_same_bits_among_strangers(ranks: Hub) -> None:
    for node in NODES:
        ranks.start(node, "besieged")
    pids = {one["node"]: one["pid"] for one in ranks.await_events("hello", NODES)}
    ranks.hold_exchange = True
    ranks.plan(0, NODES)
    ranks.await_events("blob", NODES, generation=0)
    forming = [address for node in NODES for address in listening_ports(pids[node])]
    assert len(forming) >= len(NODES)
    with strangers(forming):
        ranks.deliver(0)
        ranks.await_events("stands", NODES, generation=0)
        sha256 = trained(ranks)
    ranks.tell(NODES, "drop")
    for one in ranks.await_events("left open", NODES):
        assert one["after"] == one["before"], one
    ranks.tell(NODES, "end")
    assert [ranks.exit_code(node) for node in NODES] == [0, 0, 0], ranks.logs()
    assert sha256 == undisturbed(ranks)


def undisturbed(ranks: Hub) -> str:
    for node in NODES:
        ranks.start(node, "besieged")
    ranks.await_events("hello", NODES)
    ranks.hold_exchange = False
    ranks.plan(1, NODES)
    ranks.await_events("stands", NODES, generation=1)
    return trained(ranks)


def test_formed_group_accepts_no_more_connections_where_gloo_listens(ranks: Hub) -> None:
    for node in NODES:
        ranks.start(node, "besieged")
    pids = {one["node"]: one["pid"] for one in ranks.await_events("hello", NODES)}
    ranks.plan(0, NODES)
    ranks.await_events("stands", NODES, generation=0)
    before = {node: set(listening_ports(pids[node])) for node in NODES}
    assert not any(is_let_in(address) for node in NODES[1:] for address in before[node])
    assert [is_let_in(address) for address in before[0]].count(False) == 1, "rank 0's keys must remain available"
    trained(ranks)  # with a subgroup and DDP, whose own listeners are closed to newcomers as well
    after = {node: set(listening_ports(pids[node])) for node in NODES}
    for node in NODES:
        assert after[node] > before[node], "no subgroup listens"
        assert not any(is_let_in(address) for address in after[node] - before[node])


def test_system_without_socket_filters_is_reported_with_the_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sandboxes may lack the socket option (ENOPROTOOPT)."""
    monkeypatch.setattr(gloo, "_SO_ATTACH_FILTER", 10_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        assert gloo.close_to_newcomers(address)
        assert is_let_in(address)
    assert f"any host that reaches port {address[1]} can use up this process's descriptors. Fix: " in caplog.text
