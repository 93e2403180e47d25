"""Report slow workers, with hysteresis.

A worker counts as slow, or as recovered, only after several seconds, so that brief slowness is not reported. ``pace``
defines what slow means; ``health_judge`` decides which workers leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from samebits.core.ledger import Ledger
from samebits.core.messages import ReportEnvelope
from samebits.core.reports import StepTime, StepTiming
from samebits.core.state import Seat
from samebits.core.watch.pace import STEPS, Slowness, compare, own_us, sentence

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
