"""Report slow workers, with hysteresis.

A worker counts as slow, or as recovered, only after several seconds, so that brief slowness is not reported.
``health_judge`` decides which workers leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from samebits.core.ledger import Ledger
from samebits.core.messages import ReportEnvelope
from samebits.core.reports import MAX_STEP_US, StepTime, StepTiming
from samebits.core.state import Seat

LEAST_S = 5.0
"""Seconds for which a rank must be slow, or keep up again, before that is reported."""
LOOK_S = 1.0
NAMED = 16


@dataclass(slots=True)
class _NodePace:
    """How long, and for how many steps, a node's speed has contradicted its last reported state."""

    text: str = ""  # the last message about the node; "": the node keeps up
    other_us: int = 0
    other_steps: int = 0

    def take(self, *, differs: bool, timing: StepTiming) -> bool:
        """Add new timings, and return whether the node has been slow, or normal again, for long enough."""
        time = timing.time
        spent_us = (own_us(time) + time.communication_us) * timing.steps
        self.other_us, self.other_steps = (
            (self.other_us + spent_us, self.other_steps + timing.steps) if differs else (0, 0)
        )
        return self.other_us >= LEAST_S * 1e6 and self.other_steps >= STEPS


class Stragglers:
    """The slow workers of one job. Not written to the journal, because workers repeat their reports."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told: dict[str, tuple[int, StepTiming]] = {}  # node → generation and last window
        self._new: set[str] = set()  # nodes with a window not compared yet
        self._watched: dict[str, _NodePace] = {}
        self._look_at: float | None = None

    def take(self, seat: Seat, body: StepTiming, said: ReportEnvelope) -> None:
        """Record a member's step times."""
        if self._ledger.policy.straggler_factor is None or said.generation != self._ledger.state.generation_number:
            return
        self._told[seat.node] = said.generation, body
        self._new.add(seat.node)
        if self._look_at is None:
            self._look_at = self._ledger.now + LOOK_S

    def forget(self, node: str) -> None:
        """Forget a node whose process is gone."""
        self._told.pop(node, None)
        self._watched.pop(node, None)
        self._new.discard(node)

    def deadline(self) -> float | None:
        """Return when ``tick`` is due, or None."""
        return self._look_at

    def slow(self) -> dict[str, str]:
        """Return the slow nodes, each with its message."""
        return {node: one.text for node, one in sorted(self._watched.items()) if one.text}

    def lines(self) -> list[str]:
        """Return the messages about slow nodes for a status: at most NAMED, then a count."""
        found = list(self.slow().values())
        more = len(found) - NAMED
        return [*found[:NAMED], *([f"{more} more workers are slow"] if more > 0 else [])]

    def tick(self) -> None:
        """Compare new timings once all members have reported, and announce changes."""
        factor, committed = self._ledger.policy.straggler_factor, self._ledger.state.generation
        if self._look_at is None or self._ledger.now < self._look_at:
            return
        self._look_at = None
        if factor is None or committed is None:
            return
        times = self._times(node for node, _ in committed.members)
        if times is None:
            return
        for node, found in compare(times, self._new).items():
            self._judge(node, found, factor)
        self._new.clear()

    def _times(self, nodes: Iterable[str]) -> dict[str, StepTime] | None:
        times: dict[str, StepTime] = {}
        for node in nodes:
            told = self._told.get(node)
            if told is None or told[0] != self._ledger.state.generation_number:
                return None
            times[node] = told[1].time
        return times if len(times) > 1 else None

    def _judge(self, node: str, found: Slowness, factor: float) -> None:
        watched, (_, timing) = self._watched.setdefault(node, _NodePace()), self._told[node]
        is_slow = bool(watched.text)
        calm = 1.0 + (factor - 1.0) / 2
        differs = not found.exceeds(calm) if is_slow else found.exceeds(factor)
        if not watched.take(differs=differs, timing=timing):
            return
        steps, self._watched[node] = watched.other_steps, _NodePace()
        if is_slow:
            self._ledger.announce(f"worker {node} keeps up with the others again")
        else:
            self._watched[node].text = text = sentence(node, found, steps)
            self._ledger.announce(text)


# ---- how long each rank's own part of a step takes
#
# Ranks that train together end every step at the same moment. Only the time in which a rank does *not* wait for others
# shows which rank is slow. The slowest and fastest steps are left out of the mean, so that a save or a pause of the
# host has no effect.

STEPS = 20
"""Steps in a window. Fast ranks are compared over a multiple of this number."""
LEFT_OUT = 5
"""Number of the fastest, and of the slowest, steps left out of a window, which gives an interquartile mean."""
LEAST_EXCESS_US = 1000
"""A smaller excess over the median does not count as slow."""
OWN = ("data", "compute", "commit")
"""The parts of a step in which a rank waits for no other."""


def mean_of(steps: Sequence[StepTime]) -> StepTime:
    """Return the mean times, without the slowest and fastest steps."""
    kept = sorted(steps, key=own_us)
    if len(kept) > 2 * LEFT_OUT:
        kept = kept[LEFT_OUT:-LEFT_OUT]
    return StepTime(*(min(sum(part) // len(kept), MAX_STEP_US) for part in zip(*kept, strict=True)))


def own_us(time: StepTime) -> int:
    """Return the time of a step in which the rank did not wait for others, in microseconds."""
    return time.data_us + time.compute_us + time.commit_us


@dataclass(frozen=True, slots=True)
class Slowness:
    """One rank compared with the others.

    Attributes:
        ratio: its own part of a step, relative to the median of all ranks.
        part: the part of the step with the largest excess.
        part_us: its duration.
        usual_us: the median rank's duration of that part.
        excess_us: how far its own part as a whole exceeds the median rank's.
    """

    ratio: float
    part: str
    part_us: int
    usual_us: int
    excess_us: int

    def exceeds(self, factor: float) -> bool:
        """Return whether the rank is slower by this factor and by a noticeable time."""
        return self.ratio > factor and self.excess_us >= LEAST_EXCESS_US


def compare(times: Mapping[str, StepTime], of: Collection[str] | None = None) -> dict[str, Slowness]:
    """Compare each rank with the median rank.

    Of an even number of ranks, the lower middle value is used, so that two ranks can be compared.

    Args:
        times: the times of all ranks.
        of: the ranks to compare; None: all. Of ten thousand ranks, only a few have new times at once.
    """
    if not times:
        return {}
    data, compute, _, commit = zip(*times.values(), strict=True)
    usual = median_low(map(sum, zip(data, compute, commit, strict=True)))
    parts = dict(zip(OWN, map(median_low, (data, compute, commit)), strict=True))
    return {node: _beside(time, usual, parts) for node, time in times.items() if of is None or node in of}


def _beside(time: StepTime, usual_us: int, parts: Mapping[str, int]) -> Slowness:
    own, beyond = own_us(time), {part: getattr(time, f"{part}_us") - parts[part] for part in OWN}
    part = max(OWN, key=beyond.__getitem__)
    return Slowness(own / max(usual_us, 1), part, parts[part] + beyond[part], parts[part], own - usual_us)


def sentence(node: str, slowness: Slowness, steps: int) -> str:
    """Return a text such as ``worker 2 is 1.8 × slower than the median over 20 steps: data (96 ms a step, …)``."""
    times = f"{_ms(slowness.part_us)} a step, {_ms(slowness.usual_us)} elsewhere"
    return (
        f"worker {node} is {slowness.ratio:.1f} × slower than the median over {steps} steps: {slowness.part} ({times})"
    )


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.{0 if microseconds >= 10_000 else 1}f} ms"
