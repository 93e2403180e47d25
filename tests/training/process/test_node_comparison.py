"""The node check's exchange over the scheduler's keys: bounds, remains, and false reports."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Protocol, cast

import msgspec
import pytest
import torch

from samebits import config
from samebits.core.agent.agent_events import KeyAsk
from samebits.core.keys.key_store import KeyStore
from samebits.core.messages import MAX_VALUE_BYTES, SCHEMA, Admitted, Credential, KeyAnswer, KeyCall, KeyOp, KeyOutcome
from samebits.core.watch.node_check import (
    MOST_PLANS,
    MOST_SAID,
    SILENT,
    UNMET,
    WRONG,
    Judge,
    NodeReport,
    NodeTimings,
    Pair,
    Sum,
)
from samebits.errors import KeyValueTimeoutError, PreflightError
from samebits.training.process import node_comparison

WELL = NodeTimings(0.05, 0.02, 0.02)
CPU = torch.device("cpu")


class Desk:
    """The scheduler's keys, for threads."""

    def __init__(self) -> None:
        self.store = KeyStore(1)
        self.changed = threading.Condition()
        self.begun: set[str] = set()  # nodes that wait for the round before they report

    def names(self) -> set[str]:
        return {key.decode().removeprefix("samebits/preflight/") for key in self.store.keys}


class Node:
    """An agent of one thread."""

    def __init__(self, desk: Desk, node: str) -> None:
        self.desk, self.node, self.left = desk, node, ""
        self.told: list[str] = []
        self._number, self._session = 0, uuid.uuid4().hex

    def call_keys(self, ask: KeyAsk, timeout_s: float, *, is_wait: bool = False) -> KeyAnswer:
        assert is_wait == (ask.op is KeyOp.WAIT)
        with self.desk.changed:
            is_there = ask.op is not KeyOp.WAIT or self.desk.changed.wait_for(
                lambda: ask.key in self.desk.store.keys, timeout_s
            )
            if not is_there:
                raise KeyValueTimeoutError(f"no answer for {ask.key!r}")
            self._number += 1
            sender = Credential("job", self.node, self._session, 1)
            call = KeyCall(sender, self._number, self._number, ask.op, ask.key, ask.value, is_durable=ask.is_durable)
            self.desk.changed.notify_all()
            received = SCHEMA.unpack(SCHEMA.pack(call))  # its bounds hold
            assert isinstance(received, KeyCall)
            return self.desk.store.take(received).answers[0]

    def wait_for_round(self) -> None:
        self.desk.begun.add(self.node)

    def report_anomaly(self, step: int, text: str) -> None:
        self.told.append(text)

    def leave(self, *, on_purpose: bool, text: str, status: int | None) -> None:
        assert not on_purpose, "such a seat would wait for its holder"
        self.left = text


class Compare(Protocol):
    def __call__(
        self,
        desk: Desk,
        slot: int | None,
        size: int = 4,
        figures: NodeTimings = WELL,
        machine: str = "",
        node: str = "",
        incarnation: int = 1,
        generation: int = 0,
    ) -> Node: ...


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Compare:
    monkeypatch.setattr(node_comparison._Check, "_sum", lambda check, pair, number: Sum(0.01))
    monkeypatch.setattr(node_comparison, "LOOK_S", 0.05)
    here = threading.local()
    monkeypatch.setattr(node_comparison, "machine_id", lambda: here.machine)
    settings, _ = config.read({"WORKER_NUM": "4"}, role_required=False)

    def compare(
        desk: Desk,
        slot: int | None,
        size: int = 4,
        figures: NodeTimings = WELL,
        machine: str = "",
        node: str = "",
        incarnation: int = 1,
        generation: int = 0,
    ) -> Node:
        here.machine = (machine or f"m{slot}").encode()
        agent = Node(desk, node or str(slot))
        admitted = Admitted("s", "job", 1, slot, incarnation, size, None, generation)
        node_comparison.compare(settings, cast(Any, agent), admitted, CPU, figures)
        return agent

    return compare


def is_named(compare: Compare, desk: Desk, slot: int | None, **more: Any) -> bool:
    try:
        compare(desk, slot, **more)
    except PreflightError:
        return True
    return False


def silent_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Withhold every answer of node 2."""
    monkeypatch.setattr(
        node_comparison._Check, "_sum", lambda check, pair, number: Sum(0.0, SILENT) if 2 in pair else Sum(0.01)
    )


def test_only_the_verdict_remains_among_the_keys(compare: Compare) -> None:
    desk = Desk()
    with ThreadPoolExecutor(8) as threads:
        nodes = list(threads.map(lambda slot: compare(desk, slot, 8), range(8)))
    assert desk.names() == {"last"} and not any(node.left or node.told for node in nodes)
    assert desk.begun == set(map(str, range(8)))
    assert msgspec.msgpack.decode(desk.store.keys[b"samebits/preflight/last"].value)["bad"] == {}


def test_late_node_gets_the_verdict_after_the_keys_are_deleted(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late node waited for a plan while the others had finished."""
    desk = Desk()
    late = threading.Event()

    def summed(check: Any, pair: Pair, number: int) -> Sum:
        if check._slot == 3:
            late.wait(30.0)
        return Sum(0.01)

    monkeypatch.setattr(node_comparison._Check, "_sum", summed)
    monkeypatch.setattr(node_comparison, "WAIT_S", 0.5)
    with ThreadPoolExecutor(4) as threads:
        last = threads.submit(compare, desk, 3)
        others = [threads.submit(compare, desk, slot) for slot in range(3)]
        told = [text for one in others for text in one.result(30.0).told]
        late.set()
        assert last.result(30.0).left == ""
    assert desk.names() == {"last"}
    assert told == ["pre-flight: the nodes of these slots did not report in time and were not compared: 3"]


def test_named_node_leaves_and_is_refused_again_only_on_that_machine(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk()
    silent_two(monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda slot: is_named(compare, desk, slot), range(4)))
    assert found == [False, False, True, False]
    assert is_named(compare, desk, 2, incarnation=2, generation=1)
    assert not is_named(compare, desk, 1) and not is_named(compare, desk, 2, machine="another", incarnation=2)
    assert is_named(compare, desk, 2, node="of-no-name", machine="m2"), "another node that takes the slot there"


def test_replacement_is_refused_on_a_named_machine_and_a_distinct_spare_is_not(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk()
    silent_two(monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda slot: is_named(compare, desk, slot), range(4)))
    assert is_named(compare, desk, None, node="2.1", machine="m2")
    assert not is_named(compare, desk, None, node="2.1", machine="another")
    assert not is_named(compare, desk, None, node="4", machine="m2")
    assert not is_named(compare, desk, None, node="1.1", machine="m1")


def test_nodes_that_missed_each_other_sum_again(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        node_comparison._Check, "_sum", lambda check, pair, number: Sum(0.0, WRONG if number else UNMET)
    )
    desk = Desk()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda slot: is_named(compare, desk, slot, size=2), range(2))) == [True, True]


def test_node_that_never_meets_is_reported_but_not_blamed(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_comparison._Check, "_sum", lambda check, pair, number: Sum(0.0, UNMET))
    desk = Desk()
    with ThreadPoolExecutor(2) as threads:
        told = [text for node in threads.map(lambda slot: compare(desk, slot, 2), range(2)) for text in node.told]
    assert told == ["pre-flight: the nodes of these slots found no partner for a sum in time: 0, 1"]


def test_scheduler_death_blames_no_node_for_lost_reports(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, both = Desk(), threading.Barrier(2)

    def summed(check: Any, pair: Pair, number: int) -> Sum:
        both.wait(30.0)
        if check._slot == 0:
            with desk.changed:
                desk.store = KeyStore(2)
        both.wait(30.0)
        return Sum(0.0, SILENT)

    monkeypatch.setattr(node_comparison._Check, "_sum", summed)
    with ThreadPoolExecutor(2) as threads:
        told = [text for node in threads.map(lambda slot: compare(desk, slot, 2), range(2)) for text in node.told]
    assert told == ["pre-flight: the nodes were not compared: their scheduler died meanwhile"]
    assert desk.names() == {"last"}


def test_fix_is_sent_to_the_scheduler_too(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(Node, "leave", lambda node, *, on_purpose, text, status: left.append(text))
    slow_one = NodeTimings(0.5, 0.02, 0.02)
    monkeypatch.setattr(node_comparison._Check, "_measured", lambda check: slow_one if check._slot == 1 else WELL)
    desk = Desk()
    with ThreadPoolExecutor(3) as threads:
        list(
            threads.map(
                lambda slot: is_named(compare, desk, slot, size=3, figures=(WELL, slow_one)[slot == 1]), (0, 1, 2)
            )
        )
    (text,) = left
    assert text == (
        "the pre-flight rejected it: it is slow (computes: 500 ms, the others 50 ms). Fix: start this node on another "
        "host, or without preflight in HEALTH"
    )


@pytest.mark.parametrize(
    ("slot", "more"),
    [
        (None, {"node": "4"}),
        (0, {"size": 1}),
        (0, {"size": node_comparison.MOST_NODES + 1}),
        (0, {"incarnation": 2}),
        (0, {"generation": 1}),
    ],
)
def test_uncompared_node_waits_for_none_and_writes_nothing(
    compare: Compare, slot: int | None, more: dict[str, Any]
) -> None:
    """A spare, a world of one, too many nodes, one that returns during the check, one that comes later."""
    desk = Desk()
    assert compare(desk, slot, **more).left == ""
    assert desk.names() == set() and desk.begun == set()


def test_verdict_of_the_largest_world_fits_into_a_value(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are named, or all but one are silent, and their names are long."""
    size = node_comparison.MOST_NODES
    slots = range(size)
    report = NodeReport("worker " + "ż" * 128, b"4444", WELL)
    judge = Judge(dict.fromkeys(slots, report), slots, shares_all=True)
    wrong = NodeReport(sum=Sum(0.0, WRONG))
    for _ in range(MOST_PLANS):
        plan = judge.plan()
        assert plan.is_sound(size)
        assert len(msgspec.msgpack.encode(plan)) <= MAX_VALUE_BYTES
        if plan.is_last:
            break
        judge.take(plan, dict.fromkeys(plan.asked, wrong))
    assert plan.is_last and len(plan.bad) == size and len(plan.why) == MOST_SAID
    few = Judge({0: report}, slots, shares_all=True).plan()
    assert few.is_last and few.bad == {}
    silent, unmet = few.said
    assert "did not report in time and were not compared: 1, 2, 3," in silent
    assert silent.endswith("31, 32 and 4063 more")
    assert unmet == "the nodes of these slots found no partner for a sum in time: 0"
    assert len(msgspec.msgpack.encode(few)) <= MAX_VALUE_BYTES


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
def test_invalid_measurement_is_ignored(compare: Compare, value: float) -> None:
    desk = Desk()
    with ThreadPoolExecutor(4) as threads:
        odd = NodeTimings(value, value, value)
        found = list(threads.map(lambda slot: is_named(compare, desk, slot, figures=(WELL, odd)[slot == 1]), range(4)))
    assert found == [False] * 4 and desk.names() == {"last"}


NONSENSE = [
    *(b"\xc1", b"", b"\x93\x01\x02\x03", b"\xa2\xff\xfe", b"\xdd\xff\xff\xff\xff"),
    msgspec.msgpack.encode({"is_last": "perhaps", "name": 7}),
    msgspec.msgpack.encode({"pairs": [[0, 4]], "figures": [1, 2]}),
    msgspec.msgpack.encode({"pairs": [[0, 0]], "machine": "no bytes"}),
    msgspec.msgpack.encode({"pairs": [[0, 1], [1, 2]], "took_s": "soon"}),
    msgspec.msgpack.encode({"again": [-1], "figures": [[], [], []]}),
    msgspec.msgpack.encode({"is_last": True, "bad": {9: b"m"}, "problem": 3}),
]


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("name", ["last", "plan0"])
def test_invalid_plan_is_reported_and_ends_nothing(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, name: str, nonsense: bytes
) -> None:
    monkeypatch.setattr(node_comparison, "WAIT_S", 0.1)
    said: list[str] = []
    monkeypatch.setattr(node_comparison.log, "warn", said.append)
    desk = Desk()
    Node(desk, "9").call_keys(KeyAsk(KeyOp.PUT, f"samebits/preflight/{name}".encode(), nonsense), 1.0)
    assert compare(desk, 0).left == ""
    assert any("the nodes were not compared before the start" in one for one in said)


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_node_with_invalid_reports_is_excluded_and_the_others_compared(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, nonsense: bytes
) -> None:
    monkeypatch.setattr(node_comparison, "WAIT_S", 2.0)
    silent_two(monkeypatch)
    desk = Desk()
    Node(desk, "9").call_keys(KeyAsk(KeyOp.PUT, b"samebits/preflight/alone/3", nonsense), 1.0)
    with ThreadPoolExecutor(3) as threads:
        nodes = list(threads.map(lambda slot: is_named(compare, desk, slot), range(3)))
    assert nodes == [False, False, True]
    last = msgspec.msgpack.decode(desk.store.keys[b"samebits/preflight/last"].value)
    assert last["said"] == ["the nodes of these slots did not report in time and were not compared: 3"]


def test_endless_plans_are_given_up(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_comparison, "WAIT_S", 0.1)
    said: list[str] = []
    monkeypatch.setattr(node_comparison.log, "warn", said.append)
    desk = Desk()
    for number in range(100):
        plan = msgspec.msgpack.encode({"pairs": []})
        Node(desk, "9").call_keys(KeyAsk(KeyOp.PUT, f"samebits/preflight/plan{number}".encode(), plan), 1.0)
    assert compare(desk, 3).left == ""
    assert said == [f"the nodes were not compared before the start: {MOST_PLANS} rounds led to no verdict"]


def test_key_is_polled_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def call_keys(ask: KeyAsk, timeout_s: float, *, is_wait: bool = False) -> KeyAnswer:
        if is_wait:
            asked.append(timeout_s)
            now[0] += timeout_s
            raise KeyValueTimeoutError("it was never written")
        return KeyAnswer("s", 1, 1, KeyOutcome.ABSENT)

    now = [0.0]
    monkeypatch.setattr(node_comparison.time, "monotonic", lambda: now[0])
    check = node_comparison._Check(cast(Any, None), cast(Any, SimpleNamespace(call_keys=call_keys)), 0, 4, CPU)
    with pytest.raises(KeyValueTimeoutError, match="no other node has written plan0 in time"):
        check._wait("plan0", 60.0)
    assert asked == [1.0, 2.0, 4.0, *[8.0] * 6, 5.0]
