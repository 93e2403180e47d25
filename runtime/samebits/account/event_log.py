"""Write the scheduler's events to disk as lines of JSON, and read them back.

The scheduler's loop calls the writer once per pass, after records are durable and messages are sent. If the writer
fails, events are lost, and nothing else is affected.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from pathlib import Path

from samebits import strict_json
from samebits.account.events import Chronicle, EventKind, JobEvent, event_in
from samebits.account.goodput import goodput_of
from samebits.core.messages import OperatorDecision
from samebits.core.ready import Note, Send
from samebits.core.records import Record
from samebits.core.scheduler import Received, SchedulerCore
from samebits.core.scheduler import SchedulerEvent as CoreEvent
from samebits.store import text_log
from samebits.store.etcd.gateway import EtcdGateway
from samebits.store.text_log import EventLog, read_lines


class EventWriter:
    """Writes the events of one scheduler start.

    Args:
        directory: RECOVERY_PATH; None to store no events.
        core: the source of the events.
        zero_s: the Unix time at which the clock of ``core`` showed 0.
        warn: prints a line about a file that cannot be written.
        gateway: a client of the etcd cluster with a copy of the events, if there is one; used by this writer only.
    """

    def __init__(
        self,
        directory: Path | None,
        core: SchedulerCore,
        zero_s: float,
        warn: Callable[[str], object],
        gateway: EtcdGateway | None = None,
    ) -> None:
        self._log = None if directory is None else EventLog(directory, _carried, warn, gateway=gateway)

        def step_of(node: str) -> int:
            presence = core.presence(node)
            return presence.step if presence is not None else 0

        self._chronicle = Chronicle(core.state, step_of, zero_s)

    def heard(self, event: CoreEvent, now: float) -> None:
        """Record an event that the core has processed."""
        if self._log is not None and type(event) is Received:
            self._chronicle.heard(event.message, now)
        elif self._log is not None and type(event) is OperatorDecision:
            self._chronicle.decided(event.text, event.drain, now)

    def write(self, records: Iterable[Record], sends: Iterable[Send], notes: list[Note], now: float) -> None:
        """Write the events of one pass, after its records are durable and its messages are sent."""
        if self._log is None:
            return
        events = self._chronicle.take(records, sends, notes, now)
        if events:
            self._log.append([line_of(event) for event in events])

    def begin_again(self) -> None:
        """Reopen the file, because its folder may have been removed."""
        if self._log is not None:
            self._log.close()

    def close(self) -> None:
        """Close the file, and write the queued lines to the etcd."""
        if self._log is not None:
            self._log.end()


def line_of(event: JobEvent) -> str:
    """Encode an event as one line."""
    return strict_json.dumps(event.plain(), is_compact=True)


def events_in(lines: Iterable[str]) -> list[JobEvent]:
    """Parse events from lines. Lines without a valid event are skipped."""
    found = []
    for line in lines:
        try:
            event = event_in(strict_json.loads(line))
        except ValueError:
            continue
        if event is not None:
            found.append(event)
    return found


def read_events(recovery_path: Path) -> list[JobEvent]:
    """Return the job's events and user requests, oldest first; [] if there are none.

    Raises:
        StoreError: the disk reports an error, or a file belongs to another user.
    """
    return merged(events_in(read_lines(recovery_path)), asked_events(recovery_path))


def asked_events(recovery_path: Path) -> list[JobEvent]:
    """Return the users' requests to the job, oldest first.

    Raises:
        StoreError: as for :func:`read_events`.
    """
    return [event for event in events_in(text_log.read_asked(recovery_path)) if event.kind is EventKind.ASKED]


def merged(events: Iterable[JobEvent], asked: Iterable[JobEvent]) -> list[JobEvent]:
    """Merge both sequences by time. The order within each is kept."""
    return list(heapq.merge(events, asked, key=lambda event: event.at))


def _carried(lines: list[str]) -> str:
    fold = goodput_of(events_in(lines))
    return line_of(JobEvent(EventKind.CARRIED, fold.seen_us / 1e6, more=fold.carried()))
