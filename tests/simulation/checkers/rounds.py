"""S17 for rounds: a generation is broken only for a cause, and words that come twice, late or out of order are none."""

from __future__ import annotations

import re

from runtime.core.ready import Ready
from runtime.core.records import GenerationCommitted
from runtime.core.scheduler import Event
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Worker

OPENED = re.compile(r"round \d+\.\d+ opened: ")


class Rounds(Checker):
    """Looks at the members' processes whenever a round opens over a committed generation."""

    def watch(self) -> None:
        self.world.watch_decided.append(self._decided)

    def _decided(self, event: Event | None, ready: Ready) -> None:
        core = self.world.host.core
        for note in ready.notes:
            if OPENED.match(note.text) and core is not None and core.state.generation is not None:
                committed = core.state.generation
                if all(self._goes_on(node, incarnation, committed) for node, incarnation in committed.members):
                    self.violated("S17", f"{note.text}, at {event}, and every member of {committed} can go on")

    def _goes_on(self, node: str, incarnation: int, committed: GenerationCommitted) -> bool:
        """Whether this member is alive, holds its seat, and has not left the generation's group."""
        holder = self.world.witness.holders[node]
        if holder.incarnation != incarnation or holder.is_lost or holder.has_left or holder.slot is None:
            return False
        worker: Worker | None = next((one for one in self.world.workers if one.session == holder.session), None)
        return worker is not None and worker.generation == committed.generation and worker.is_in_group()
