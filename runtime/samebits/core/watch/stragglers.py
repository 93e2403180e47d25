"""Which worker is slower than the others, told and asked for a while; its hysteresis. The scheduler's side of pace.

Here live what each member told last and who is said to be slow; what slow is stands in ``core.watch.pace``, who leaves
because of it in ``host_health``. The one idea: a worker is believed slow, and believed to keep up again, only after
some seconds in a row, so that nobody is named for what was over before it was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from samebits.core.ledger import Ledger
from samebits.core.messages import Said
from samebits.core.reports import StepTime, StepTiming
from samebits.core.state import Seat
from samebits.core.watch.pace import STEPS, Slowness, compare, own_us, sentence

LEAST_S = 5.0
"""A rank is named once it was slow for so long, and keeps up again once it did for so long."""
LOOK_S = 1.0
NAMED = 16


@dataclass(slots=True)
class _Watched:
    """One node: for how long, and how many steps, it has been on the other side of the limit than it is said to be."""

    text: str = ""  # what was said of it; empty: it keeps up
    other_us: int = 0
    other_steps: int = 0

    def take(self, *, differs: bool, timing: StepTiming) -> bool:
        """One more window; whether it has changed sides for good."""
        time = timing.time
        spent_us = (own_us(time) + time.communication_us) * timing.steps
        self.other_us, self.other_steps = (
            (self.other_us + spent_us, self.other_steps + timing.steps) if differs else (0, 0)
        )
        return self.other_us >= LEAST_S * 1e6 and self.other_steps >= STEPS


class Stragglers:
    """Of one job. Nothing of it is written down: workers say it again."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told: dict[str, tuple[int, StepTiming]] = {}  # node → generation, and its last window
        self._new: set[str] = set()  # nodes whose window was not compared yet
        self._watched: dict[str, _Watched] = {}
        self._look_at: float | None = None

    def take(self, seat: Seat, body: StepTiming, said: Said) -> None:
        """Take a member's times of its last steps."""
        if self._ledger.policy.straggler_factor is None or said.generation != self._ledger.state.generation_number:
            return
        self._told[seat.node] = said.generation, body
        self._new.add(seat.node)
        if self._look_at is None:
            self._look_at = self._ledger.now + LOOK_S

    def forget(self, node: str) -> None:
        """The node's process is gone."""
        self._told.pop(node, None)
        self._watched.pop(node, None)
        self._new.discard(node)

    def deadline(self) -> float | None:
        """When ``tick`` is worth calling."""
        return self._look_at

    def slow(self) -> dict[str, str]:
        """Who is slow now, and what was said of it."""
        return {node: one.text for node, one in sorted(self._watched.items()) if one.text}

    def lines(self) -> list[str]:
        """The same, for a status."""
        found = list(self.slow().values())
        more = len(found) - NAMED
        return [*found[:NAMED], *([f"{more} more workers are slow"] if more > 0 else [])]

    def tick(self) -> None:
        """Compare what is new, once all members have told; say who has become slow, and who is so no longer."""
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
        watched, (_, timing) = self._watched.setdefault(node, _Watched()), self._told[node]
        is_slow = bool(watched.text)
        calm = 1.0 + (factor - 1.0) / 2
        differs = not found.exceeds(calm) if is_slow else found.exceeds(factor)
        if not watched.take(differs=differs, timing=timing):
            return
        steps, self._watched[node] = watched.other_steps, _Watched()
        if is_slow:
            self._ledger.announce(f"worker {node} keeps up with the others again")
        else:
            self._watched[node].text = text = sentence(node, found, steps)
            self._ledger.announce(text)
