"""What a follower shows while a job runs: its line, the workers' lines that were asked for, and what they advise.

Gathering what the line is made of lives here (the scheduler's view, what the script reports, its log where it reports
nothing); how it looks is ``job_line``'s, where it goes ``progress``'. The one idea: whoever follows looks once a
second, whatever happens or does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from samebits.config import Settings
from samebits.ops.job_line import Pace, Standing, shown_value
from samebits.ops.job_view import JobView
from samebits.ops.local_processes import name_of
from samebits.ops.log_lines import LogLines
from samebits.ops.progress import LossTail, Screen, world_text
from samebits.store.progress_report import ProgressReport, read_report, report_file

LOOK_S = 1.0
_SENDER = re.compile(r"(?:worker|spare) [^:]*: (?:(?:rank \d+, )?step \d+: )?")


class Showing:
    """One follower's view of a job, on one screen.

    Args:
        settings: the job's.
        script: the script's name.
        tee: names of the workers whose log lines are shown.
    """

    def __init__(self, settings: Settings, screen: Screen, script: str, tee: Sequence[str] = ()) -> None:
        self.screen = screen
        self._settings = settings
        self._script = script
        self._tee = LogLines(settings.log_dir, tee) if tee else None
        self._pace = Pace()
        self._node = "0"
        self._tail = LossTail(settings.log_dir / f"{name_of(self._node)}.log")
        self._advised: set[str] = set()
        self._noticed = (0, 0)  # the term and number of the last notice that was shown
        self._before = self._stamp()  # a report that was there already is an earlier job's
        self._report: ProgressReport | None = None
        self._total_steps: int | None = None

    def show_lines(self) -> None:
        """The log lines that have come since the last call."""
        if self._tee is not None:
            for name, line in self._tee.take():
                self.screen.raw(f"[{name}]: {line}")

    def show_notices(self, view: JobView | None) -> None:
        """Show the scheduler's warnings that are new, except those that a worker's log has told already."""
        for number, text in () if view is None else view.notices:
            assert view is not None
            if (view.term, number) > self._noticed:
                self._noticed = (view.term, number)
                if not _is_told(text, self._advised):
                    self.screen.say(text)
                    self._advised.add(text)

    def show(self, view: JobView | None, *, is_linked: bool, running: int, now: float) -> None:
        """How it stands, as far as it is known; ``running`` workers count where nobody tells."""
        self.show_lines()
        self.show_notices(view)
        self._pace.look(view, now, self._phase(view, is_linked=is_linked, running=running))
        standing = self._standing(view, is_linked=is_linked, running=running, now=now)
        key = (view.phase, world_text(view, view.alive)) if view is not None and is_linked else (is_linked, running)
        self.screen.progress(standing, key, now)

    @staticmethod
    def _phase(view: JobView | None, *, is_linked: bool, running: int) -> str:
        """What the job is at; empty while it trains."""
        if view is None:
            return "waiting for the scheduler"
        is_missed = not is_linked and not view.training_finished and running > 0
        return "scheduler away" if is_missed else "" if view.phase == "training" else view.phase

    def _standing(self, view: JobView | None, *, is_linked: bool, running: int, now: float) -> Standing:
        if view is None:
            phase = self._phase(view, is_linked=is_linked, running=running)
            running_text = f"{running} worker{'' if running == 1 else 's'} running"
            return Standing(self._script, running_text, phase, self._pace.phase_s(now))
        phase = self._phase(view, is_linked=is_linked, running=running)
        alive = view.alive if is_linked else min(running, view.alive)  # who has left may still be ending
        seat = view.seat_free_in_s if is_linked else None
        values = self._values(view)
        is_plain = self._settings.plain  # its steps are known to the script alone
        return Standing(
            script=self._script,
            world=world_text(view, alive),
            phase=phase,
            phase_s=self._pace.phase_s(now),
            step=self._tail.step if is_plain else view.step,
            total_steps=self._total_steps,
            steps_per_s=None if is_plain else self._pace.steps_per_s(),
            values=values,
            recoveries=self._pace.recoveries,
            lost_s=self._pace.lost_s(now),
            more="" if seat is None else f"seat free in {math.ceil(seat)} s",
        )

    def _values(self, view: JobView) -> dict[str, str]:
        """What rank 0 reports, or the last loss that its log tells; rank 0 may be another node after a loss."""
        node = next((worker.node for worker in view.workers if not worker.is_joining), self._node)
        if node != self._node:
            self._node = node
            self._tail = LossTail(self._settings.log_dir / f"{name_of(node)}.log", self._tail.loss)
        loss = self._tail.read()
        for text in self._tail.advice:
            if not _is_told(text, self._advised):
                self.screen.say(text)
                self._advised.add(text)
        self._tail.advice = []
        if self._stamp() != self._before:
            self._report = read_report(self._settings.log_dir, self._node) or self._report
        if self._report is not None:
            self._total_steps = self._report.total_steps or self._total_steps
            if self._report.values:
                return {name: shown_value(value) for name, value in self._report.values.items()}
        return {"loss": loss} if loss else {}

    def _stamp(self) -> tuple[str, int]:
        """Which report there is; each is written anew."""
        try:
            return self._node, report_file(self._settings.log_dir, self._node).stat().st_mtime_ns
        except OSError:
            return self._node, 0


def _is_told(text: str, told: Iterable[str]) -> bool:
    """Return whether a line with the same message was shown, whichever of worker and scheduler said it."""
    return any(text == one or _message(text) == _message(one) for one in told)


def _message(text: str) -> str:
    """Return a line without its sender: ``worker 0: rank 0, step 3: …`` and ``worker 0 (rank 0), step 3: …`` agree."""
    sender = _SENDER.match(text)
    return text[sender.end() :] if sender else text
