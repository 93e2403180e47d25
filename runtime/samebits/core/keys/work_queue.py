"""A queue of work that a job's ranks share, whose items count as done with the commit of the step that used them.

Here lives one queue's state and what a put, a take and a new generation make of it; pure. Never here: where the state
is kept (``samebits.kv``) and how two that change it at once agree (by its version). Three ideas:

* There is no "done" to be said and no time to run out. Who takes an item at ``step`` completed steps uses it for the
  next one, so the item is in every state with more steps than that on the same line, and in no other.
* A new generation goes on from ``restore`` completed steps: what was taken at fewer has been trained on, all else comes
  back, whoever took it and whether he lives. So an item is lost with the step that was lost, and never without it.
* It may be given back as long as the job may go back behind it: until every rank's disk holds a later point.
"""

from __future__ import annotations

from typing import Annotated

from samebits.core.values import Count, Meta, Schema, Value, replace

MAX_PUTS = 512
DIGEST_BYTES = 16
MAX_RUNS = 1024
"""Of neighbouring items that were taken at like steps, or came back; a generation that begins may split a few more."""

Run = tuple[Count, Count]
"""Numbers of items: from the first to the one before the second."""


class Put(Value, frozen=True):
    """Items that were put together, and not all are done with."""

    key: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]  # a digest of it
    first: Count
    end: Count


class Taken(Value, frozen=True):
    """Items that were taken in one generation: as many at each of some steps in a row."""

    generation: Count
    step: Count  # the first of them
    first: Count
    end: Count
    steps: Annotated[int, Meta(ge=1, le=2**63 - 1)] = 1

    def split(self, step: int) -> tuple[Taken | None, Taken | None]:
        """Those of the steps before this one, and the others."""
        before = min(max(step - self.step, 0), self.steps)
        if not before:
            return None, self
        if before == self.steps:
            return self, None
        cut = self.first + (self.end - self.first) // self.steps * before
        return (
            Taken(self.generation, self.step, self.first, cut, before),
            Taken(self.generation, self.step + before, cut, self.end, self.steps - before),
        )

    def with_next(self, other: Taken) -> Taken | None:
        """Both in one, where the other is the next step and alike."""
        is_next = (other.generation, other.step, other.first) == (self.generation, self.step + self.steps, self.end)
        if not is_next or (other.end - other.first) * self.steps != (self.end - self.first) * other.steps:
            return None
        return Taken(self.generation, self.step, self.first, other.end, self.steps + other.steps)


class WorkState(Value, frozen=True):
    """One queue. Items are numbered as they were put."""

    puts: Annotated[tuple[Put, ...], Meta(max_length=MAX_PUTS)] = ()
    end: Count = 0  # numbers below are given to items
    next: Count = 0  # the first that was never taken
    returned: Annotated[tuple[Run, ...], Meta(max_length=2 * MAX_RUNS)] = ()  # to be taken before it; rising, apart
    taken: Annotated[tuple[Taken, ...], Meta(max_length=2 * MAX_RUNS)] = ()  # and may come back; in the order of taking
    generation: Count = 0  # the last that is settled

    @property
    def waiting(self) -> int:
        """How many items may be taken now."""
        return self.end - self.next + sum(end - first for first, end in self.returned)

    @property
    def open(self) -> int:
        """How many were taken and may yet come back."""
        return sum(one.end - one.first for one in self.taken)

    def put_of(self, number: int) -> Put:
        """What the item was put with."""
        return next(one for one in self.puts if one.first <= number < one.end)


SCHEMA: Schema[WorkState] = Schema(WorkState)


def put(state: WorkState, key: bytes, count: int) -> WorkState | None:
    """With so many more items; the same where this key has been put. None: there is no room for another put."""
    if any(one.key == key for one in state.puts) or not count:
        return state
    if len(state.puts) >= MAX_PUTS:
        return None
    return replace(state, puts=(*state.puts, Put(key, state.end, state.end + count)), end=state.end + count)


def settle(state: WorkState, generation: int, restore: int) -> WorkState:
    """In this generation, which has gone on from so many completed steps; again does nothing."""
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


def forget(state: WorkState, durable: int) -> tuple[WorkState, tuple[Put, ...]]:
    """Without what no rank can go back behind, as every disk holds so many steps; and the puts that are done with.

    Those are in the state yet, so that whoever deletes their items can be killed between the two: ``dropped``.
    """
    kept = tuple(after for one in state.taken if (after := one.split(durable)[1]) is not None)
    state = state if kept == state.taken else replace(state, taken=kept)
    first = min((state.next, *(run[0] for run in state.returned), *(one.first for one in kept)))
    return state, tuple(one for one in state.puts if one.end <= first)


def dropped(state: WorkState, done: tuple[Put, ...]) -> WorkState:
    """Without these puts, whose items are deleted."""
    keys = {one.key for one in done}
    return replace(state, puts=tuple(one for one in state.puts if one.key not in keys)) if keys else state


def take(state: WorkState, count: int, generation: int, step: int) -> tuple[WorkState, list[int]] | None:
    """The next items for this step, at most so many; None: there is no room to remember one more taking.

    Args:
        state: settled in this generation.
        count: 1 or more.
        generation, step: of who takes them, ``step`` its completed steps at its last commit.
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
                taken[-2:] = [both]  # the last step is through: nobody takes for it any more
            taken.append(Taken(generation, step, first, end))
    if len(taken) + len(returned) > MAX_RUNS:
        return None
    return replace(state, next=following, returned=tuple(returned), taken=tuple(taken)), numbers


def _merged(runs: list[Run]) -> tuple[Run, ...]:
    """Rising, and neighbours made one."""
    merged: list[Run] = []
    for first, end in sorted(runs):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    return tuple(merged)
