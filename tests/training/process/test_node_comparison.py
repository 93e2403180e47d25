"""The node check's exchange over the scheduler's keys: bounds, remains, and false reports."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

import msgspec
import pytest
import torch

from samebits import config
from samebits.core.agent.agent_events import KeyAsk
from samebits.core.keys.key_store import KeyStore
from samebits.core.messages import MAX_VALUE_BYTES, SCHEMA, Admitted, Credential, KeyAnswer, KeyCall, KeyOp
from samebits.core.watch.node_check import SILENT, UNMET, WRONG, NodeReport, NodeTimings, Sum
from samebits.errors import KeyValueError, KeyValueTimeoutError, PreflightError
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
        assert is_wait == (ask.op is KeyOp.WAIT) and timeout_s > 0
        with self.desk.changed:
            is_there = ask.op is not KeyOp.WAIT or self.desk.changed.wait_for(
                lambda: ask.key in self.desk.store.keys and self.desk.store.keys[ask.key].version > ask.version,
                timeout_s,
            )
            if not is_there:
                raise KeyValueTimeoutError(f"no answer for {ask.key!r}")
            self._number += 1
            sender = Credential("job", self.node, self._session, 1)
            call = KeyCall(
                *(sender, self._number, self._number, ask.op, ask.key, ask.value, ask.version),
                is_durable=ask.is_durable,
            )
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
    monkeypatch.setattr(node_comparison._Check, "_sum", lambda check, pair, until_s: Sum(0.01))
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
        node_comparison._Check, "_sum", lambda check, pair, until_s: Sum(0.0, SILENT) if 2 in pair else Sum(0.01)
    )


def report_in(desk: Desk, slot: int) -> NodeReport:
    return msgspec.msgpack.decode(desk.store.keys[f"samebits/preflight/report/{slot}".encode()].value, type=NodeReport)


def test_only_the_reports_remain_among_the_keys(compare: Compare) -> None:
    desk = Desk()
    with ThreadPoolExecutor(8) as threads:
        nodes = list(threads.map(lambda slot: compare(desk, slot, 8), range(8)))
    assert desk.names() == {f"report/{slot}" for slot in range(8)}
    assert not any(node.left or node.told for node in nodes)
    assert desk.begun == set(map(str, range(8)))
    assert [report_in(desk, slot).why for slot in range(8)] == [""] * 8


def test_late_node_does_not_wait(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The late node came while the others had finished."""
    monkeypatch.setattr(node_comparison, "ROUND_S", 0.1)
    monkeypatch.setattr(node_comparison, "LAST_LOOK_S", 0.1)
    desk = Desk()
    with ThreadPoolExecutor(3) as threads:
        told = [text for node in threads.map(lambda slot: compare(desk, slot), range(3)) for text in node.told]
    assert told == ["pre-flight: the node of slot 3 did not report in time and was not compared"]
    monkeypatch.setattr(node_comparison, "ROUND_S", 3600.0)
    last = compare(desk, 3)
    assert (last.left, last.told) == ("", [])


def test_second_process_in_a_slot_is_not_compared(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would meet partners that have the address of the first one."""
    desk = Desk()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda slot: compare(desk, slot), range(4)))
    desk.begun.clear()
    monkeypatch.setattr(node_comparison._Check, "_sum", lambda check, pair, until_s: pytest.fail("it was compared"))
    assert compare(desk, 2, node="4").left == compare(desk, 2, incarnation=2).left == ""
    assert desk.begun == set()


def test_address_of_an_earlier_process_is_not_replaced(compare: Compare) -> None:
    desk = Desk()
    Node(desk, "9").call_keys(KeyAsk(KeyOp.PUT, b"samebits/preflight/meet/0/2/2", b"old"), 1.0)
    part = node_comparison._Check(cast(Any, None), cast(Any, Node(desk, "2")), 2, 4, CPU)
    with pytest.raises(KeyValueError, match="an earlier process in this slot has published its address"):
        node_comparison._Meeting(part, (0, 2), 1, 0.0).publish(b"new")
    assert desk.store.keys[b"samebits/preflight/meet/0/2/2"].value == b"old"


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


def test_node_that_never_meets_is_reported_but_not_blamed(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_comparison._Check, "_sum", lambda check, pair, until_s: Sum(0.0, UNMET))
    desk = Desk()
    with ThreadPoolExecutor(2) as threads:
        told = [text for node in threads.map(lambda slot: compare(desk, slot, 2), range(2)) for text in node.told]
    assert told == [f"pre-flight: the node of slot {slot} found no partner for a sum in time" for slot in range(2)]


def test_reports_survive_the_scheduler(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler dies after both nodes have summed wrongly and one has reported."""
    desk, other_reported = Desk(), threading.Event()
    put = Node.call_keys

    def call_keys(node: Node, ask: KeyAsk, timeout_s: float, *, is_wait: bool = False) -> KeyAnswer:
        if ask.op is KeyOp.PUT and node.node == "1":
            assert other_reported.wait(30.0)
            with desk.changed:
                records, desk.store = list(desk.store.snapshot()), KeyStore(2)
                for record in records:
                    desk.store.apply(record)
                assert b"samebits/preflight/report/0" in desk.store.keys
        answer = put(node, ask, timeout_s, is_wait=is_wait)
        if ask.op is KeyOp.PUT:
            other_reported.set()
        return answer

    monkeypatch.setattr(Node, "call_keys", call_keys)
    monkeypatch.setattr(node_comparison._Check, "_sum", lambda check, pair, until_s: Sum(0.0, WRONG))
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda slot: is_named(compare, desk, slot, size=2), range(2))) == [True, True]


def test_others_wait_idle_while_a_slow_node_measures_again(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do afterwards, such as reading a data set, could slow it down."""
    desk, measures, may_end = Desk(), threading.Event(), threading.Event()

    def measured(check: Any) -> NodeTimings:
        measures.set()
        assert may_end.wait(30.0)
        return WELL

    monkeypatch.setattr(node_comparison._Check, "_measured", measured)
    slow_one = NodeTimings(0.5, 0.02, 0.02)
    with ThreadPoolExecutor(3) as threads:
        nodes = [threads.submit(compare, desk, slot, 3, figures=slow_one if slot == 1 else WELL) for slot in range(3)]
        assert measures.wait(30.0)
        assert not any(node.done() for node in nodes)
        may_end.set()
        assert [node.result(30.0).left for node in nodes] == [""] * 3


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
        (0, {"generation": 1}),
    ],
)
def test_uncompared_node_waits_for_none_and_writes_nothing(
    compare: Compare, slot: int | None, more: dict[str, Any]
) -> None:
    """A spare, a world of one, one that comes later."""
    desk = Desk()
    assert compare(desk, slot, **more).left == ""
    assert desk.names() == set() and desk.begun == set()


def test_longest_report_fits_into_a_value() -> None:
    name = "worker " + "ż" * 128
    report = NodeReport(name, b"m" * 64, WELL, {slot: Sum(0.1, SILENT) for slot in range(3)}, 3 * name + "x" * 300)
    assert len(msgspec.msgpack.encode(report)) < MAX_VALUE_BYTES // 16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
def test_invalid_measurement_is_ignored(compare: Compare, value: float) -> None:
    desk = Desk()
    with ThreadPoolExecutor(4) as threads:
        odd = NodeTimings(value, value, value)
        found = list(threads.map(lambda slot: is_named(compare, desk, slot, figures=(WELL, odd)[slot == 1]), range(4)))
    assert found == [False] * 4 and len(desk.names()) == 4


NONSENSE = [
    *(b"\xc1", b"", b"\x93\x01\x02\x03", b"\xa2\xff\xfe", b"\xdd\xff\xff\xff\xff"),
    msgspec.msgpack.encode({"why": 3, "name": 7}),
    msgspec.msgpack.encode({"figures": [1, 2]}),
    msgspec.msgpack.encode({"machine": "no bytes"}),
    msgspec.msgpack.encode({"sums": {"soon": 1}}),
    msgspec.msgpack.encode({"figures": [[], [], []]}),
    msgspec.msgpack.encode({"sums": {0: [0.1, 3]}}),
]


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_invalid_report_in_the_own_slot_ends_nothing(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, nonsense: bytes
) -> None:
    said: list[str] = []
    monkeypatch.setattr(node_comparison.log, "warn", said.append)
    desk = Desk()
    Node(desk, "9").call_keys(KeyAsk(KeyOp.PUT, b"samebits/preflight/report/0", nonsense), 1.0)
    assert compare(desk, 0).left == ""
    (text,) = said
    assert text.startswith("this node was not compared with the others before the start: the report of slot 0 is inv")


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_node_with_invalid_reports_is_excluded_and_the_others_compared(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, nonsense: bytes
) -> None:
    silent_two(monkeypatch)
    desk = Desk()
    Node(desk, "9").call_keys(KeyAsk(KeyOp.PUT, b"samebits/preflight/report/3", nonsense), 1.0)
    told: list[str] = []
    monkeypatch.setattr(Node, "report_anomaly", lambda node, step, text: told.append(text))
    with ThreadPoolExecutor(3) as threads:
        nodes = list(threads.map(lambda slot: is_named(compare, desk, slot), range(3)))
    assert nodes == [False, False, True]
    assert told == ["pre-flight: the node of slot 3 did not report in time and was not compared"]


def test_meeting_is_skipped_if_the_partner_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    Node(desk, "9").call_keys(KeyAsk(KeyOp.PUT, b"samebits/preflight/report/2", b""), 1.0)
    monkeypatch.setattr(node_comparison, "Group", lambda *args, **more: pytest.fail("it was formed"))
    check = node_comparison._Check(cast(Any, None), cast(Any, Node(desk, "0")), 0, 4, CPU)
    assert check._sum((0, 2), 0.0) == Sum(0.0, UNMET)


def test_report_that_is_there_is_fetched_even_after_its_time() -> None:
    desk = Desk()
    Node(desk, "9").call_keys(KeyAsk(KeyOp.PUT, b"samebits/preflight/report/1", b"here"), 1.0)
    check = node_comparison._Check(cast(Any, None), cast(Any, Node(desk, "0")), 0, 4, CPU)
    assert check.take("report/1", 0.0).value == b"here"
