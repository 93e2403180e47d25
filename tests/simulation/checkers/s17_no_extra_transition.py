"""S17: duplicating or reordering any message adds no further transition.

The same message twice in a row makes no record and opens no round. A generation is broken only for a cause, and
repeated, late or reordered messages are none.
"""

from __future__ import annotations

import re

from samebits.core.ready import Ready
from samebits.core.records import GenerationCommitted
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.checkers.base import Checker

ANY = re.compile(r"round \d+\.\d+ opened: ")
OPENED = re.compile(r"round \d+\.\d+ opened: (?!no step for )")  # S22 checks whether there is a hang


class NoExtraTransition(Checker):
    """Examines the effect of an echo, and the members' processes whenever a round opens over a generation."""

    name = "S17"

    def watch(self) -> None:
        self.world.watch_decided.append(self._decided)
        self.world.watch_echo.append(self._echo)

    def _echo(self, event: SchedulerEvent, ready: Ready) -> None:
        opened = [note.text for note in ready.notes if ANY.match(note.text)]
        if ready.records or opened:
            self.violated(f"{event}, heard a second time, made {ready.records} {opened}")

    def _decided(self, event: SchedulerEvent | None, ready: Ready) -> None:
        if not ready.notes:
            return
        core = self.world.host.core
        for note in ready.notes:
            if OPENED.match(note.text) and core is not None and core.state.generation is not None:
                committed = core.state.generation
                if self._grows(committed) or not committed.members:  # the members are unknown since a rebuild
                    continue
                if all(self._goes_on(node, incarnation, committed) for node, incarnation in committed.members):
                    self.violated(f"{note.text}, at {event}, and every member of {committed} can continue")

    def _grows(self, committed: GenerationCommitted) -> bool:
        """Return whether a worker holds a slot that the generation lacks."""
        holders = self.world.witness.holders.values()
        live = (holder for holder in holders if holder.slot is not None and not (holder.is_lost or holder.has_left))
        return any(holder.slot not in committed.slots for holder in live)

    def _goes_on(self, node: str, incarnation: int, committed: GenerationCommitted) -> bool:
        """Return whether this member is alive, holds its seat, and has not left the generation's group."""
        holder = self.world.witness.holders[node]
        if holder.incarnation != incarnation or holder.is_lost or holder.has_left or holder.slot is None:
            return False
        worker = next((one for one in self.world.workers if one.session == holder.session), None)
        return worker is not None and worker.generation == committed.generation and worker.is_in_group()
