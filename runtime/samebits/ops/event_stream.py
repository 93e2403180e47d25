"""A job's events one after the other, those that are there and then those that come, for who reads on.

Only the reading on lives here. The one idea: what was told is remembered by its line, so that a file that is moved on
while it is read repeats nothing; whoever reads too late for a part that fell off misses that part alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from samebits.core.events import Event, Kind
from samebits.service.events import asked_events, events_in, merged
from samebits.store.event_log import Tail

LOOK_S = 0.25
PATIENCE_LOOKS = 4  # with nothing new behind the job's end, before it is taken for the end


class EventStream:
    """Of the job whose events lie in this folder."""

    def __init__(self, recovery_path: Path) -> None:
        self._path, self._tail = recovery_path, Tail(recovery_path)
        self._last = ""
        self._asked = 0

    def new(self) -> list[Event]:
        """What has come since the last call; at the first, all there is.

        Raises:
            StoreError: the disk refuses, or a file is another user's.
        """
        lines, is_anew = self._tail.new_lines()
        if is_anew and self._last in lines:
            lines = lines[len(lines) - lines[::-1].index(self._last) :]
        if lines:
            self._last = lines[-1]
        asked = asked_events(self._path)
        new, self._asked = asked[min(self._asked, len(asked)) :], len(asked)
        return [event for event in merged(events_in(lines), new) if event.kind is not Kind.CARRIED]

    def all(self, *, follows: bool, sleep: Callable[[float], object] = time.sleep) -> Iterator[Event]:
        """Every event; where it follows, also those that come, until the job is finished."""
        quiet, is_finished = 0, False
        while True:
            events = self.new()
            for event in events:
                is_finished = event.kind is Kind.FINISHED or (is_finished and event.kind is not Kind.SCHEDULER)
                yield event
            quiet = 0 if events else quiet + 1
            if not follows or (is_finished and quiet >= PATIENCE_LOOKS):
                return
            sleep(LOOK_S)
