"""A work queue through losses, growth and rollbacks: every item is in the line of steps exactly once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from samebits.core.keys import queue_state
from samebits.core.keys.queue_state import (
    DIGEST_BYTES,
    MAX_PUTS,
    MAX_RUNS,
    SCHEMA,
    WorkState,
    dropped,
    forget,
    put,
    settle,
)
from samebits.core.keys.queue_state import take as take_from
from samebits.core.messages import MAX_VALUE_BYTES
from samebits.core.values import replace

KEY = bytes(DIGEST_BYTES)


def key(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def filled(count: int) -> WorkState:
    state = put(WorkState(), KEY, count)
    assert state is not None
    return state


def take(state: WorkState, count: int, generation: int, step: int) -> tuple[WorkState, list[int]]:
    found = take_from(state, count, generation, step)
    assert found is not None
    return found


def test_items_are_taken_in_order_and_once() -> None:
    state, first = take(filled(5), 2, 1, 0)
    state, second = take(state, 9, 1, 0)
    state, third = take(state, 1, 1, 1)
    assert (first, second, third) == ([0, 1], [2, 3, 4], [])
    assert (state.waiting, state.open) == (0, 5)


def test_items_of_a_lost_step_return_to_the_front() -> None:
    state, _ = take(filled(10), 3, 1, 0)
    state, _ = take(state, 2, 1, 1)
    state = settle(state, 2, 1)  # step 1 counts, step 2 is lost
    assert (state.waiting, state.open) == (7, 3)
    assert take(state, 3, 2, 1)[1] == [3, 4, 5]


def test_generation_is_settled_once_and_an_earlier_one_never() -> None:
    state = settle(filled(4), 3, 0)
    state, _ = take(state, 2, 3, 0)
    assert settle(state, 3, 0) is state
    assert settle(state, 2, 0) is state


def test_repeated_put_counts_once() -> None:
    state = filled(4)
    assert put(state, KEY, 4) is state
    assert put(state, key(1), 0) is state
    wider = put(state, key(1), 3)
    assert wider is not None
    assert [(one.first, one.end) for one in wider.puts] == [(0, 4), (4, 7)]
    assert wider.put_of(5).key == key(1)


def test_puts_are_forgotten_when_every_disk_is_past_them_and_no_sooner() -> None:
    state = put(filled(2), key(1), 2)
    assert state is not None
    state, _ = take(state, 2, 1, 0)
    state, _ = take(state, 1, 1, 1)
    assert forget(state, 0)[1] == ()
    state, done = forget(state, 1)
    assert [one.key for one in done] == [KEY]
    assert dropped(state, done).puts == state.puts[1:]
    assert settle(state, 2, 1).waiting == 2, "a forgotten put does not return"


def test_steps_that_take_the_same_number_are_stored_as_one_run() -> None:
    state = filled(200_000)
    for step in range(5_000):
        for _ in range(4):
            state, _ = take(state, 2, 1, step)
    assert len(state.taken) == 2 and len(SCHEMA.pack(state)) < 100
    back = settle(state, 2, 1_234)
    assert (back.waiting, take(back, 1, 2, 1_234)[1]) == (200_000 - 8 * 1_234, [8 * 1_234])
    assert forget(state, 1_234)[0].open == 8 * (5_000 - 1_234)


def test_bounds_hold() -> None:
    state = WorkState()
    for number in range(MAX_PUTS):
        state = put(state, key(number), 3) or pytest.fail("no room")
    assert put(state, key(MAX_PUTS), 3) is None
    full = replace(filled(3 * MAX_RUNS), puts=state.puts)
    for step in range(MAX_RUNS):
        full, _ = take(full, 1 + step % 3, 1, 2**31 + step)
    assert take_from(full, 1, 1, 2**32) is None
    assert len(SCHEMA.pack(full)) < MAX_VALUE_BYTES
    back = settle(full, 2, 2**31 + MAX_RUNS // 2)
    assert SCHEMA.unpack(SCHEMA.pack(back)) == back


# ---- a job


@dataclass
class Job:
    """The valid line of steps and its queue; ``line[n]`` is what step n + 1 used."""

    draw: random.Random
    state: WorkState = field(default_factory=WorkState)
    generation: int = 1
    line: list[list[int]] = field(default_factory=list)
    durable: int = 0
    is_steady: bool = False  # all take one item in each step
    settles: Callable[[WorkState, int, int], WorkState] = settle
    forgets: Callable[[WorkState, int], tuple[WorkState, tuple[queue_state.PutBatch, ...]]] = forget

    def step(self, workers: int) -> None:
        """Run one step of this many ranks, which may be lost before its commit or with some steps before it."""
        used: list[int] = []
        for _ in range(workers):
            if self.is_steady:
                self.state, numbers = take(self.state, 1, self.generation, len(self.line))
                used += numbers
            elif self.draw.random() < 0.8:
                self.state, numbers = take(self.state, self.draw.choice((1, 1, 3)), self.generation, len(self.line))
                used += numbers
        if self.draw.random() < (0.05 if self.is_steady else 0.25):
            if self.draw.random() < 0.5:  # the commit was done before a rank died
                self.line.append(used)
            self.lose()
        else:
            self.line.append(used)
        if self.draw.random() < 0.2:
            self.durable = self.draw.randint(self.durable, len(self.line))
        self.state, done = self.forgets(self.state, self.durable)
        self.state = dropped(self.state, done)

    def lose(self) -> None:
        """Lose memory after the last commit, or all of it, back to a point on the disks."""
        back_to = len(self.line) if self.draw.random() < 0.7 else self.draw.randint(self.durable, len(self.line))
        del self.line[back_to:]
        self.generation += self.draw.randint(1, 2)  # a generation may end before it has begun
        self.state = self.settles(self.state, self.generation, back_to)


def run(seed: int, **broken: object) -> list[int]:
    """Return how often each item is in the line."""
    job, puts = Job(random.Random(seed), **broken), 0  # type: ignore[arg-type]
    for _ in range(300):
        if job.draw.random() < 0.2 and puts < 80:
            job.state = put(job.state, key(puts), job.draw.randint(1, 12)) or job.state
            puts += 1
        job.is_steady = job.draw.random() < 0.03 or (job.is_steady and job.draw.random() < 0.95)
        job.step(2 if job.is_steady else job.draw.randint(1, 4))
    while job.state.waiting:
        job.state, used = take(job.state, 5, job.generation, len(job.line))
        job.line.append(used)
    assert SCHEMA.unpack(SCHEMA.pack(job.state)) == job.state
    counts = Counter(number for used in job.line for number in used)
    return [counts[number] for number in range(job.state.end)]


@pytest.mark.parametrize("seed", range(40))
def test_every_item_is_in_the_line_once(seed: int) -> None:
    counts = run(seed)
    assert counts and set(counts) == {1}


def _nothing_comes_back(state: WorkState, generation: int, restore: int) -> WorkState:
    return settle(state, generation, 2**62)


def _all_comes_back(state: WorkState, generation: int, restore: int) -> WorkState:
    return settle(state, generation, 0)


def _forgets_too_soon(state: WorkState, durable: int) -> tuple[WorkState, tuple[queue_state.PutBatch, ...]]:
    return forget(state, 2**62)


@pytest.mark.parametrize(
    "broken",
    [{"settles": _nothing_comes_back}, {"settles": _all_comes_back}, {"forgets": _forgets_too_soon}],
    ids=["nothing comes back", "all comes back", "forgets too soon"],
)
def test_broken_queue_is_detected(broken: dict[str, object]) -> None:
    def is_seen(seed: int) -> bool:
        try:
            return set(run(seed, **broken)) != {1}
        except (AssertionError, StopIteration):
            return True

    assert any(is_seen(seed) for seed in range(10))
