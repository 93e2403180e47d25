"""Groups of real processes: formed, used, broken during use or formation, dropped and formed again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import WarmStarter
from tests.training.hub import Hub, hub

SCRIPT = Path(__file__).with_name("group_ranks.py")
REPEATS = int(os.environ.get("KILL_REPEATS", "1"))  # raise it for a campaign


@pytest.fixture
def ranks(tmp_path: Path, warm: WarmStarter) -> Iterator[Hub]:
    with hub(SCRIPT, tmp_path, warm) as one:
        yield one


def started(ranks: Hub, nodes: list[int], scenario: str, **arguments: object) -> None:
    for node in nodes:
        ranks.start(node, scenario, **arguments)
    ranks.await_events("hello", nodes)


def test_every_kind_of_collective_works_on_the_default_group_and_on_subgroups(ranks: Hub) -> None:
    nodes = [0, 1, 2]
    started(ranks, nodes, "many_calls")
    ranks.plan(0, nodes)
    ranks.await_events("done", nodes, broken=False)
    ranks.tell(nodes, "end")
    assert [ranks.exit_code(node) for node in nodes] == [0, 0, 0], ranks.logs()  # also right after a drop


@pytest.mark.parametrize("kind", ["all_reduce", "backward"] * REPEATS)
def test_kill_9_of_one_of_four_frees_all_survivors(ranks: Hub, kind: str) -> None:
    nodes, survivors = [0, 1, 2, 3], [0, 2, 3]
    started(ranks, nodes, "loop", kinds=[kind])
    ranks.plan(0, nodes)
    ranks.await_events("looping", nodes)
    ranks.kill(1)
    ranks.break_(survivors)
    for left in ranks.await_events("left", survivors):
        assert left["lost"], left["error"]
    ranks.tell(survivors, "end")
    assert [ranks.exit_code(node) for node in survivors] == [0, 0, 0], ranks.logs()


KINDS = [
    *("all_reduce", "backward", "plain backward", "buffers", "broadcast", "pairwise"),
    *("future", "subgroup", "objects", "monitored_barrier", "reduce_scatter", "reduce_scatter of a list"),
]


@pytest.mark.parametrize("forgotten", [False, True], ids=["cut", "forgotten by gloo"])
def test_stopped_peer_blocks_no_rank_once_the_group_is_broken(ranks: Hub, forgotten: bool) -> None:
    """The next generation forms, even if gloo never learns that the connection ended and still waits."""
    nodes, survivors = [0, 1, 2], [0, 1]
    started(ranks, nodes, "loop", kinds=KINDS, forgotten=forgotten)
    for generation, kind in enumerate(KINDS):
        ranks.plan(generation, nodes)
        ranks.await_events("looping", nodes, generation=generation)
        ranks.kill(2, signal.SIGSTOP)
        ranks.break_(survivors)
        for left in ranks.await_events("left", survivors, generation=generation):
            assert left["lost"], (kind, left["error"])
        ranks.kill(2, signal.SIGCONT)
        ranks.break_([2])
        ranks.await_event("left", 2, generation=generation)


def test_breaking_while_data_flows_frees_all_ranks(ranks: Hub) -> None:
    """gloo forgets its waiters when a message is cut off midway; a large broadcast shows it most often."""
    nodes, times = [0, 1, 2, 3], 5
    started(ranks, nodes, "loop", kinds=["broadcast"] * times, elements=1_000_000)
    for generation in range(times):
        ranks.plan(generation, nodes)
        ranks.await_events("looping", nodes, generation=generation)
        ranks.break_(nodes)
        for left in ranks.await_events("left", nodes, generation=generation):
            assert left["lost"], left["error"]


def test_peers_notice_a_broken_group_by_its_connections(ranks: Hub) -> None:
    """There is no scheduler here, so the failure travels from neighbour to neighbour.

    gloo limits this: it forgets a message that it accepts just as the connection ends, and only the scheduler can wake
    the process waiting for it, as the tests above show. So no message is on the way here.
    """
    started(ranks, [0, 1], "loop", kinds=["all_reduce"], elements=1, kept=True, rests=True)
    ranks.plan(0, [0, 1])
    ranks.await_events("looping", [0, 1])
    ranks.break_([0])
    for left in ranks.await_events("left", [0, 1]):
        assert left["lost"], left["error"]


def test_peer_that_dies_between_its_message_and_its_connections_blocks_no_rank(ranks: Hub) -> None:
    nodes = [0, 1, 2, 3]
    ranks.hold_exchange = True
    started(ranks, nodes, "forming")
    ranks.plan(0, nodes)
    ranks.await_events("blob", nodes, generation=0)
    ranks.kill(1)
    ranks.deliver(0)
    ranks.hold_exchange = False
    ranks.start(9, "forming")
    ranks.await_event("hello", 9)
    ranks.plan(1, [0, 9, 2, 3])
    ranks.await_events("left", [0, 2, 3], generation=0)
    assert {done["total"] for done in ranks.await_events("done", [0, 9, 2, 3])} == {4.0}


def test_cancelled_exchange_ends_the_formation(ranks: Hub) -> None:
    ranks.hold_exchange = True
    started(ranks, [0, 1], "forming")
    ranks.plan(0, [0, 1])
    ranks.await_events("blob", [0, 1], generation=0)
    ranks.hold_exchange = False
    ranks.plan(1, [1, 0])
    ranks.await_events("left", [0, 1], generation=0)
    assert {done["total"] for done in ranks.await_events("done", [0, 1])} == {2.0}


def test_subgroup_that_waits_for_a_member_ends_with_its_generation(ranks: Hub) -> None:
    nodes, survivors = [0, 1, 2], [0, 1]
    started(ranks, nodes, "subgroup_forming", absent=2)
    ranks.plan(0, nodes)
    ranks.await_events("looping", nodes)
    ranks.break_(survivors)
    for left in ranks.await_events("left", survivors):
        assert left["lost"], left["error"]


def test_cycles_of_forming_and_dropping_leave_no_descriptor_or_thread(ranks: Hub) -> None:
    nodes, count = [0, 1], 50
    started(ranks, nodes, "cycles", count=count)
    for generation in range(count + 1):
        ranks.plan(generation, nodes)
        if generation < count:
            ranks.await_events("ready", nodes, generation=generation)
    for one in ranks.await_events("left open", nodes):
        for before, after in zip(one["before"], one["after"], strict=True):
            assert after < before + count // 5, one  # the kernel takes a moment to end a thread that has been joined


@pytest.mark.parametrize("pending", ["future", "backward", "pairwise", "unending"])
def test_process_keeps_its_exit_status_whatever_is_pending(ranks: Hub, pending: str) -> None:
    started(ranks, [0, 1], "ending", pending=pending)
    ranks.plan(0, [0, 1])
    ranks.await_event("pending", 0)
    assert ranks.exit_code(0) == 7, ranks.logs()
