"""A work queue shared by a job's ranks, whose items count as done with a step's commit. Pure.

``samebits.kv`` stores the state and resolves concurrent changes by its version. The design:

* Items need no acknowledgement and have no timeout. A rank with ``step`` completed steps uses an item for the next
  step, so the item is contained in exactly those states of the line that have more steps.
* A new generation continues from ``restore`` completed steps. Items taken before that step have been trained on; all
  others return to the queue, whether or not their taker is alive. So an item is lost exactly if its step is lost.
* Taken items are remembered while the job may roll back before them: until every rank's disk has a later point.
"""

from __future__ import annotations

from typing import Annotated

from samebits.core.values import Count, Meta, Schema, Value, replace

MAX_PUTS = 512
DIGEST_BYTES = 16
MAX_RUNS = 1024
"""Most runs of neighbouring items that were taken or have returned. A new generation may split a few more."""

Run = tuple[Count, Count]
"""A range of item numbers; the end is exclusive."""


class PutBatch(Value, frozen=True):
    """Items that were added together, as long as some of them are not done."""

    key: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]  # digest of the put's key
    first: Count
    end: Count


class TakenItems(Value, frozen=True):
    """Items taken in one generation. Each of ``steps`` consecutive steps took the same number of items."""

    generation: Count
    step: Count  # the first step
    first: Count
    end: Count
    steps: Annotated[int, Meta(ge=1, le=2**63 - 1)] = 1

    def split(self, step: int) -> tuple[TakenItems | None, TakenItems | None]:
        """Split into the items of the steps before this one, and the items of the other steps."""
        before = min(max(step - self.step, 0), self.steps)
        if not before:
            return None, self
        if before == self.steps:
            return self, None
        cut = self.first + (self.end - self.first) // self.steps * before
        return (
            TakenItems(self.generation, self.step, self.first, cut, before),
            TakenItems(self.generation, self.step + before, cut, self.end, self.steps - before),
        )

    def with_next(self, other: TakenItems) -> TakenItems | None:
        """Combine with the next step's items, or return None if they do not fit."""
        is_next = (other.generation, other.step, other.first) == (self.generation, self.step + self.steps, self.end)
        if not is_next or (other.end - other.first) * self.steps != (self.end - self.first) * other.steps:
            return None
        return TakenItems(self.generation, self.step, self.first, other.end, self.steps + other.steps)


class WorkState(Value, frozen=True):
    """The state of one queue. Items are numbered in the order in which they were added."""

    puts: Annotated[tuple[PutBatch, ...], Meta(max_length=MAX_PUTS)] = ()
    end: Count = 0  # the number after the last item
    next: Count = 0  # the first item never taken
    returned: Annotated[tuple[Run, ...], Meta(max_length=2 * MAX_RUNS)] = ()  # taken first; ascending, disjoint
    taken: Annotated[
        tuple[TakenItems, ...], Meta(max_length=2 * MAX_RUNS)
    ] = ()  # may still return; in the order of taking
    generation: Count = 0  # the last that is settled

    @property
    def waiting(self) -> int:
        """Return how many items can be taken now."""
        return self.end - self.next + sum(end - first for first, end in self.returned)

    @property
    def open(self) -> int:
        """Return how many items were taken and may still return to the queue."""
        return sum(one.end - one.first for one in self.taken)

    def put_of(self, number: int) -> PutBatch:
        """Return the batch that the item was added with."""
        return next(one for one in self.puts if one.first <= number < one.end)


SCHEMA: Schema[WorkState] = Schema(WorkState)


def put(state: WorkState, key: bytes, count: int) -> WorkState | None:
    """Add items, once per key. Return None if there is no room for another batch."""
    if any(one.key == key for one in state.puts) or not count:
        return state
    if len(state.puts) >= MAX_PUTS:
        return None
    return replace(state, puts=(*state.puts, PutBatch(key, state.end, state.end + count)), end=state.end + count)


def settle(state: WorkState, generation: int, restore: int) -> WorkState:
    """Return the items to the queue that are lost when a generation continues from ``restore`` steps.

    Calling it again has no effect.
    """
    if generation <= state.generation:
        return state
    halves = [one.split(restore) for one in state.taken]
    lost = [(after.first, after.end) for _, after in halves if after is not None]
    return replace(
        state,
        taken=tuple(before for before, _ in halves if before is not None),
        returned=_merged([*state.returned, *lost]),
        generation=generation,
    )


def forget(state: WorkState, durable: int) -> tuple[WorkState, tuple[PutBatch, ...]]:
    """Forget taken items that cannot return to the queue, because every disk has ``durable`` steps.

    Returns the new state and the finished batches. These stay in the state until :func:`dropped` removes them, so that
    their items are deleted even if the process that deletes them is killed.
    """
    kept = tuple(after for one in state.taken if (after := one.split(durable)[1]) is not None)
    state = state if kept == state.taken else replace(state, taken=kept)
    first = min((state.next, *(run[0] for run in state.returned), *(one.first for one in kept)))
    return state, tuple(one for one in state.puts if one.end <= first)


def dropped(state: WorkState, done: tuple[PutBatch, ...]) -> WorkState:
    """Remove these puts, whose items were deleted."""
    keys = {one.key for one in done}
    return replace(state, puts=tuple(one for one in state.puts if one.key not in keys)) if keys else state


def take(state: WorkState, count: int, generation: int, step: int) -> tuple[WorkState, list[int]] | None:
    """Take the next items for this step, or return None if there is no room to record them.

    Args:
        state: settled in this generation.
        count: the largest number of items to take, at least 1.
        generation, step: the taker's generation, and its completed steps at its last commit.
    """
    numbers: list[int] = []
    returned, taken, following = list(state.returned), list(state.taken), state.next
    while len(numbers) < count and (returned or following < state.end):
        first, end = returned[0] if returned else (following, state.end)
        end = min(end, first + count - len(numbers))
        if not returned:
            following = end
        elif end == returned[0][1]:
            del returned[0]
        else:
            returned[0] = (end, returned[0][1])
        numbers += range(first, end)
        last = taken[-1] if taken else None
        if last is not None and (last.generation, last.step, last.steps, last.end) == (generation, step, 1, first):
            taken[-1] = replace(last, end=end)
        else:
            if len(taken) > 1 and (both := taken[-2].with_next(taken[-1])) is not None:
                taken[-2:] = [both]  # the last step is complete: no rank takes items for it any longer
            taken.append(TakenItems(generation, step, first, end))
    if len(taken) + len(returned) > MAX_RUNS:
        return None
    return replace(state, next=following, returned=tuple(returned), taken=tuple(taken)), numbers


def _merged(runs: list[Run]) -> tuple[Run, ...]:
    """Return the runs ascending, with neighbours joined."""
    merged: list[Run] = []
    for first, end in sorted(runs):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    return tuple(merged)
