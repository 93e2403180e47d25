"""S22: no worker is ended or asked to leave for a wrong reason, and no generation is given up without a hang.

If messages arrive as sent and no process was paused, a judgement must be true now or have been true a heartbeat ago.
Otherwise it must have been true when the messages on which it rests were sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from samebits.core.messages import Depart, GiveUp, ReportEnvelope
from samebits.core.ready import Ready
from samebits.core.reports import HealthReport, StallReport
from samebits.core.scheduler import Received, SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.main_thread import Hold
from tests.simulation.worker import Worker

HANG = re.compile(r"round \d+\.\d+ opened: no step for ")
JUST_S = 3.0
"""A heartbeat by the slowest clock, plus the time of messages."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The sender's true state when it sent this message."""

    message: ReportEnvelope
    hold: Hold | None
    is_unwell: bool


class NoFalseAlarm(Checker):
    """Compares every alarm that costs a process or a step with the true holds and full disks."""

    name = "S22"

    def begin_job(self) -> None:
        self._stood_still: dict[str, Truth] = {}  # the last of each kind from a session
        self._was_unwell: dict[str, Truth] = {}

    def watch(self) -> None:
        self._said: dict[int, Truth] = {}  # by the message's identity
        self.world.when_sent[ReportEnvelope].append(self._says)
        self.world.when_event[Received].append(self._hears)
        self.world.when_answered[GiveUp].append(self._ended)
        self.world.when_answered[Depart].append(self._asked)
        self.world.watch_decided.append(self._decided)

    def _says(self, worker: Worker, message: ReportEnvelope) -> None:
        self._said[id(message)] = Truth(message, worker.thread.hold, self.world.unwell.is_unwell(worker.session))

    def _hears(self, event: Received) -> None:
        message = event.message
        if not isinstance(message, ReportEnvelope):
            return
        if isinstance(message.body, StallReport):
            self._stood_still[event.session] = self._said[id(message)]
        elif isinstance(message.body, HealthReport):
            self._was_unwell[event.session] = self._said[id(message)]

    def _worker(self, session: str) -> Worker | None:
        return next((one for one in self.world.workers if one.session == session), None)

    def _is_plain(self) -> bool:
        """Return whether reports equal reality: nothing is lost, late or stopped in this run."""
        mix = self.world.mix
        stops = {"partition", "worker stopped", "scheduler stopped"} & mix.rates_hz.keys()
        return mix.is_ordered and not (mix.p_drop or mix.p_slow or stops) and mix.fsync_s <= 1.0

    def _ended(self, session: str, message: GiveUp) -> None:
        worker, known = self._worker(session), self._stood_still.get(session)
        if worker is None:
            return
        if known is None or not isinstance(body := known.message.body, StallReport) or body.progress is None:
            self.violated(f"{worker} is ended ({message.text}), and has not said that it stands still")
        hold = known.hold
        if hold is None or hold.is_pause or hold.kind.is_in_collective:
            self.violated(f"{worker} is ended ({message.text}), and was not held when it spoke: {known}")
        held_s = self.world.now - hold.since
        least_s = self.world.patience.least_s(worker.step) / 2 ** self.world.patience.times(worker.step)
        if held_s < least_s - JUST_S:
            self.violated(f"{worker} is ended ({message.text}), and was held for {held_s:.3f} s: {hold}")
        if self._is_plain() and not worker.thread.is_or_was_just(hold, JUST_S):
            self.violated(f"{worker} is ended ({message.text}), but progresses: {known}")

    def _asked(self, session: str, message: Depart) -> None:
        worker, known = self._worker(session), self._was_unwell.get(session)
        if worker is None or self.world.driver.wants_gone(worker.node):
            return
        if known is None or not known.is_unwell:
            self.violated(f"{worker} is asked to leave ({message.text}), and its host is well: {known}")

    def _decided(self, event: SchedulerEvent | None, ready: Ready) -> None:
        for note in ready.notes:
            if HANG.match(note.text) and not self._has_hang():
                self.violated(f"{note.text}: but no worker is held")

    def _has_hang(self) -> bool:
        """Return whether a worker is astray or a collective is held, now or just before, or unknown."""
        workers = [one for one in self.world.workers if not one.is_of_another_job()]
        groups = [group for one in workers if (group := self.world.groups.of(one)) is not None]
        if not self._is_plain() and any(known.hold is not None for known in self._stood_still.values()):
            return True
        now = self.world.now
        return any(group.is_held or now - group.let_go_at < JUST_S for group in groups) or any(
            one.thread.was_astray_since(now - JUST_S) for one in workers
        )
