"""S23: no detector's state outlives its session, and no observation ends two processes: no restart storm.

A worker that is ended, or asked to leave because of its host, has reported the reason itself, to this scheduler. Of
those ended at one step each has stood still for twice as long as the one before.
"""

from __future__ import annotations

from samebits.core.messages import Depart, GiveUp, ReportEnvelope
from samebits.core.reports import HealthReport, StallReport
from samebits.core.scheduler import Received, SchedulerCore
from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.s22_no_false_alarm import JUST_S


class NoStorm(Checker):
    """Keeps what each session has reported to this start of the scheduler."""

    name = "S23"

    def begin_job(self) -> None:
        self._own: dict[str, dict[type, ReportEnvelope]] = {}  # by session and kind, the last

    def watch(self) -> None:
        self.world.watch_loaded.append(self._loaded)
        self.world.when_event[Received].append(self._hears)
        self.world.when_answered[GiveUp].append(self._ended)
        self.world.when_answered[Depart].append(self._asked)

    def _loaded(self, core: SchedulerCore) -> None:
        self._own.clear()

    def _hears(self, event: Received) -> None:
        if isinstance(event.message, ReportEnvelope) and isinstance(event.message.body, StallReport | HealthReport):
            self._own.setdefault(event.session, {})[type(event.message.body)] = event.message

    def _ended(self, session: str, message: GiveUp) -> None:
        core, own = self.world.host.core, self._own.get(session, {}).get(StallReport)
        assert core is not None
        if own is None or own.generation != core.state.generation_number:
            self.violated(f"{session} is ended ({message.text}) for what it has not said of this generation: {own}")
        worker = next((one for one in self.world.workers if one.session == session), None)
        hold = worker.thread.hold if worker is not None else None
        if worker is None or hold is None or own.step != worker.step:
            return
        held_s, times = self.world.now - hold.since, self.world.patience.times(worker.step)
        least_s = self.world.patience.least_s(worker.step)
        if times > 0 and held_s < least_s - JUST_S:
            self.violated(f"{session} is ended after {held_s:.3f} s, the {times + 1}. at step {worker.step}")

    def _asked(self, session: str, message: Depart) -> None:
        worker = next((one for one in self.world.workers if one.session == session), None)
        if worker is None or self.world.driver.wants_gone(worker.node):
            return
        own = self._own.get(session, {}).get(HealthReport)
        if own is None or not any(one.drains for one in own.body.ailments):
            self.violated(f"{session} is asked to leave ({message.text}) for what it has not said: {own}")
