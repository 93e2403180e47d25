"""A script's work queue on a real key store: what happens once, what is refused, and lost queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import samebits
from samebits.core.keys.key_store import KeyStore
from samebits.core.keys.queue_state import MAX_PUTS
from samebits.core.messages import MAX_VALUE_BYTES, Credential, KeyAnswer, KeyCall
from samebits.core.point import Point
from samebits.errors import GenerationEndedError, KeyValueError, UsageError
from samebits.training.process import context


@dataclass
class Process:
    """A worker as far as a queue sees it; its calls reach the store at once."""

    store: KeyStore
    name: str = "0"
    before_change: Callable[[], None] | None = None  # another process is faster, once
    calls: int = 0
    agent: Any = None
    begins: dict[str, Callable[[Any], object]] = field(default_factory=dict)
    generation: Any = None
    is_over: bool = False
    ending: Any = field(default_factory=lambda: SimpleNamespace(is_through=False))

    def __post_init__(self) -> None:
        self.agent = SimpleNamespace(
            step=0, interrupted=False, committed_point=None, figures=(), call_keys=self.call_keys
        )

    def call_keys(self, ask: Any, timeout_s: float | None, *, is_wait: bool = False) -> KeyAnswer:
        if ask.changes and self.before_change is not None:
            faster, self.before_change = self.before_change, None
            faster()
        self.calls += 1
        sender = Credential("job", self.name, f"s{self.name}", 1)
        call = KeyCall(sender, self.calls, self.calls, ask.op, ask.key, ask.value, ask.version, ask.amount)
        (answer,) = self.store.take(call).answers
        return answer

    def begin(self, generation: int, restore: int) -> None:
        self.generation = SimpleNamespace(generation=generation, restore=Point(restore, generation - 1))
        self.agent.step = restore
        for told in self.begins.values():
            told(self.generation)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made = Process(KeyStore(1))
    monkeypatch.setattr(context, "_process", made)
    yield made


def commit(process: Process) -> None:
    process.agent.step += 1


def test_items_are_taken_once_and_in_order(process: Process) -> None:
    queue = samebits.WorkQueue()
    queue.put(["a", 2, {"three": [3]}])
    process.begin(1, 0)
    assert queue.waiting() == 3
    assert [queue.take(2), queue.take(2), queue.take()] == [["a", 2], [{"three": [3]}], []]


def test_repeated_put_counts_once_even_after_completion(process: Process) -> None:
    queue = samebits.WorkQueue()
    for _ in range(2):
        queue.put(range(3))
    process.begin(1, 0)
    assert queue.take(9) == [0, 1, 2]
    commit(process)
    process.agent.committed_point = Point(1, 1)
    assert queue.take() == []
    queue.put(range(3))
    assert queue.waiting() == 0
    queue.put(range(3), key="the second epoch")
    assert queue.take(9) == [0, 1, 2]
    emptied = [key for key, held in process.store.keys.items() if held.value == msgspec.msgpack.encode(b"")]
    assert len(emptied) == 1, "completed items take no room"


def test_lost_step_returns_its_items_to_a_new_process(process: Process) -> None:
    queue = samebits.WorkQueue()
    queue.put(range(4))
    process.begin(1, 0)
    queue.take()
    commit(process)
    assert queue.take() == [1]
    process.begin(2, 1)
    assert queue.take(9) == [1, 2, 3]


@dataclass(frozen=True)
class Key:
    name: str


def test_simultaneous_takes_get_different_items(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, taken = samebits.WorkQueue(), []
    queue.put(range(4))
    process.begin(1, 0)
    rival = Process(process.store, "1", generation=process.generation)

    def faster() -> None:
        monkeypatch.setattr(context, "_process", rival)
        taken.extend(samebits.WorkQueue().take())
        monkeypatch.setattr(context, "_process", process)

    process.before_change = faster
    taken.extend(queue.take())
    assert taken == [0, 1]


def test_large_put_spans_several_keys(process: Process) -> None:
    queue = samebits.WorkQueue()
    items = [bytes([number]) * 20_000 for number in range(9)]
    queue.put(items)
    process.begin(1, 0)
    assert [queue.take()[0] for _ in items] == items


def test_process_left_behind_by_a_generation_takes_nothing(process: Process) -> None:
    queue = samebits.WorkQueue()
    queue.put(range(4))
    process.begin(2, 0)
    process.generation = SimpleNamespace(generation=1, restore=None)
    with pytest.raises(GenerationEndedError):
        queue.take()
    assert queue.waiting() == 4


def test_lost_queue_does_not_pass_for_an_empty_one(process: Process) -> None:
    queue = samebits.WorkQueue()
    queue.put(range(4))
    process.begin(1, 0)
    process.store = KeyStore(2)
    with pytest.raises(KeyValueError, match=r"is gone.*RECOVERY_PATH was lost\. Fix: "):
        queue.take()


def test_invalid_items_are_refused(process: Process) -> None:
    queue = samebits.WorkQueue()
    with pytest.raises(UsageError, match=r"outside the training function.*Fix: "):
        queue.take()
    process.begin(1, 0)
    for count in (0, -1, 1.5, None):
        with pytest.raises(UsageError, match=r"expected 1 or more.*Fix: "):
            queue.take(count)  # type: ignore[arg-type]
    endless: list[object] = []
    endless.append(endless)
    of_maps = {Key("a"): 1}  # is written as a map with a map for its key, which no rank could read
    for item in (object(), endless, "\ud800", 10**40, of_maps):
        with pytest.raises(UsageError, match=r"msgpack cannot encode.*Fix: "):
            queue.put([1, item])
    assert queue.waiting() == 0
    with pytest.raises(UsageError, match=rf"an item of {MAX_VALUE_BYTES + 5} bytes.*Fix: "):
        queue.put([b"x" * MAX_VALUE_BYTES])
    for one in ("a text", b"bytes", 7):
        with pytest.raises(UsageError, match=r"counts as one item, but several were expected.*Fix: put\(\[item\]\)"):
            queue.put(one)  # type: ignore[arg-type]
    for name in ("", "x" * 193, 7):
        with pytest.raises(UsageError, match=r"1 to 192 bytes.*Fix: "):
            samebits.WorkQueue(name)  # type: ignore[arg-type]
    assert queue.waiting() == 0


def test_uncompleted_puts_are_bounded(process: Process) -> None:
    queue = samebits.WorkQueue()
    for number in range(MAX_PUTS):
        queue.put([number])
    with pytest.raises(KeyValueError, match=r"512 puts are unfinished.*Fix: "):
        queue.put(["one more"])


def test_key_with_another_value_is_named(process: Process) -> None:
    samebits.kv.put("work/mine", 7)
    with pytest.raises(KeyValueError, match=r"'work/mine' does not hold a queue.*Fix: "):
        samebits.WorkQueue("mine").put([1])
