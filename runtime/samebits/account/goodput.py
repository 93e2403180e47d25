"""Assign every microsecond of a job's time to one category, from the events alone.

A single mark moves along the time line, and all time that it passes is added to exactly one category. The categories
therefore add up to the wall time. If the use of some time is not known yet, such as the scheduler's absence while
workers may train, the mark passes it only when later events show how it was used.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samebits.account.events import STALLS_TOLD, EventKind, JobEvent


class Bucket(enum.StrEnum):
    """A use of time."""

    PRODUCTIVE = "productive"  # steps done for the first time
    START_UP = "start_up"  # from a scheduler start without a live generation to the first step or the first loss
    NOTICING = "noticing_losses"  # from a lost worker's last message to the moment the scheduler counts it as lost
    FORMING = "forming"  # the members meet in the rendezvous
    WAITING = "waiting_for_seats"  # a member is missing and its slot is not taken
    RESTORING = "restoring"  # the group forms and obtains its state
    REDONE = "redone"  # steps that had been done before a loss
    STALLS = "checkpoint_stalls"  # steps waited for a save
    IDLE = "idle"  # no scheduler and no training, or nothing left to do


BADPUT_TYPES = {
    Bucket.START_UP: "PROGRAM_STARTUP",  # with TPU_INITIALIZATION and TRAINING_PREP
    Bucket.NOTICING: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.FORMING: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.WAITING: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.RESTORING: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Bucket.REDONE: "WASTED_PROGRESS_FROM_DISRUPTION",
    Bucket.STALLS: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Bucket.IDLE: "OTHER",
}
"""The ``BadputType`` of Google's ml-goodput-measurement for each bucket but the productive one."""


def badput_s(buckets_s: Mapping[str, float]) -> dict[str, float]:
    """Add up the seconds of categories by their ``BadputType``."""
    found: dict[str, float] = {}
    for bucket, name in BADPUT_TYPES.items():
        if bucket in buckets_s:
            found[name] = found.get(name, 0.0) + buckets_s[bucket]
    return found


class _JobPhase(enum.StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    AWAY = "away"  # the job trained when the scheduler stopped; later events show whether it continued
    FORMING = "forming"
    RESTORING = "restoring"
    OVER = "over"


@dataclass(slots=True)
class Goodput:
    """Processes all events in order, and returns the totals."""

    began_us: int | None = None
    mark_us: int = 0  # everything before is in a bucket
    seen_us: int = 0  # the last event's time
    stage: str = _JobPhase.STARTING
    sample_step: int = 0  # in training: the step at the mark
    high_step: int = 0  # the highest step seen
    away_from_us: int = 0
    owed_us: int = 0  # time, not passed yet, in which steps waited for saves
    lost_at_us: int = 0  # the first loss since the last progress or since the scheduler came back; 0: none
    silent_from_us: int = 0  # when the first worker lost since then fell silent
    returned_us: int = 0  # the last scheduler start
    missing: set[int] = field(default_factory=set)
    totals_us: dict[str, int] = field(default_factory=dict)

    def add(self, event: JobEvent) -> None:
        """Process one event. A clock that was set back counts as paused."""
        at = max(self.seen_us, round(event.at * 1e6))
        if event.kind is EventKind.ASKED:
            return
        if event.kind is EventKind.CARRIED:
            self._carry(event.more)
            return
        if self.began_us is None:
            self.began_us = self.mark_us = at
        before, self.seen_us = self.seen_us or at, at
        if event.kind in STALLS_TOLD:
            self.owed_us += _us_of(event.more.get("stalled_ms"))
        match event.kind:
            case EventKind.SCHEDULER:
                self._start_scheduler(at, before)
            case EventKind.ROUND if not event.more.get("gently"):
                self._break(at, event.step)
            case EventKind.GENERATION:
                self._forget_loss()
                self._break(at, event.step)
                self.missing.clear()
                if self.stage != _JobPhase.STARTING:
                    self.stage = _JobPhase.RESTORING
            case EventKind.TRAINING:
                self._train(at, event.step)
            case EventKind.STEP if self.stage == _JobPhase.TRAINING and event.step > self.sample_step:
                self._forget_loss()
                self._pass_training(at, event.step)
            case EventKind.TRAINED | EventKind.INTERRUPTED | EventKind.FINISHED:
                if event.kind is not EventKind.INTERRUPTED:
                    self._forget_loss()
                self._break(at, event.step)
                self.stage = _JobPhase.OVER
            case EventKind.LOST | EventKind.LEFT | EventKind.RETIRED:
                self._set_missing(at, event, missing=True)
            case EventKind.SEATED | EventKind.PROMOTED | EventKind.RETURNED:
                self._set_missing(at, event, missing=False)

    def buckets(self, until: float | None = None) -> dict[Bucket, int]:
        """Return microseconds by category, up to ``until`` (Unix time) or the last event, whichever is later."""
        found = {bucket: self.totals_us.get(bucket, 0) for bucket in Bucket}
        if self.began_us is not None:
            trains = self.stage in (_JobPhase.TRAINING, _JobPhase.AWAY)
            spent = self._end_us(until) - self.mark_us
            stalled = min(self.owed_us, spent) if trains else 0
            is_again = trains and self.sample_step < self.high_step
            found[Bucket.STALLS] += stalled
            found[Bucket.REDONE if is_again else self._bucket()] += spent - stalled
        return found

    def wall_us(self, until: float | None = None) -> int:
        """Return the total time, which equals the sum of ``buckets``."""
        return 0 if self.began_us is None else self._end_us(until) - self.began_us

    def _end_us(self, until: float | None) -> int:
        return self.seen_us if self.stage == _JobPhase.OVER else max(self.seen_us, round((until or 0) * 1e6))

    def carried(self) -> dict[str, Any]:
        """Return the state as plain values, which are stored in the first event after a file is dropped."""
        return {
            **{name: getattr(self, name) for name in _CARRIED},
            "missing": sorted(self.missing),
            "totals_us": {str(bucket): spent for bucket, spent in self.totals_us.items()},
        }

    def _carry(self, more: Mapping[str, Any]) -> None:
        if self.began_us is not None:
            return  # the earlier events are present and give the same result
        numbers = {name: more.get(name, 0 if name in _LATER else None) for name in _CARRIED if name != "stage"}
        totals, missing, stage = more.get("totals_us"), more.get("missing"), more.get("stage")
        if not all(type(one) is int for one in numbers.values()) or stage not in set(_JobPhase):
            return
        if not isinstance(totals, dict) or not isinstance(missing, list):
            return
        for name, value in numbers.items():
            setattr(self, name, value)
        self.stage, self.owed_us = _JobPhase(stage), max(0, self.owed_us)
        self.missing = {slot for slot in missing if type(slot) is int}
        self.totals_us = {bucket: totals[bucket] for bucket in Bucket if type(totals.get(bucket)) is int}
        owed = self.mark_us - (self.began_us or 0) - sum(self.totals_us.values())
        self._spend(Bucket.IDLE, owed)  # nothing, unless the file was edited

    # ---- moving the mark

    def _bucket(self) -> Bucket:
        match self.stage:
            case _JobPhase.TRAINING | _JobPhase.AWAY:
                return Bucket.PRODUCTIVE
            case _JobPhase.STARTING:
                return Bucket.START_UP
            case _JobPhase.FORMING:
                return Bucket.WAITING if self.missing else Bucket.FORMING
            case _JobPhase.RESTORING:
                return Bucket.RESTORING
        return Bucket.IDLE

    def _spend(self, bucket: Bucket, spent_us: int) -> None:
        self.totals_us[bucket] = self.totals_us.get(bucket, 0) + spent_us

    def _pass(self, at: int) -> None:
        self._spend(self._bucket(), at - self.mark_us)
        self.mark_us = at

    def _pass_training(self, at: int, step: int) -> None:
        """Add training time.

        Time for steps that had already been done counts as redone. All steps of one sample are assumed to take equally
        long.
        """
        stalled = min(self.owed_us, at - self.mark_us)
        self.owed_us -= stalled
        self._spend(Bucket.STALLS, stalled)
        spent, done = at - self.mark_us - stalled, step - self.sample_step
        again = min(self.high_step, step) - self.sample_step
        if self.sample_step >= self.high_step:
            redone = 0
        else:
            redone = round(spent * again / done) if done > 0 else spent
        self._spend(Bucket.REDONE, redone)
        self._spend(Bucket.PRODUCTIVE, spent - redone)
        self.mark_us, self.sample_step = at, max(step, self.sample_step)
        self.high_step = max(self.high_step, step)

    def _break(self, at: int, step: int) -> None:
        """End the current activity. The members then form a new generation."""
        went_on = self.stage == _JobPhase.AWAY and step > self.sample_step
        if self.stage == _JobPhase.TRAINING or went_on:
            self._pass_training(self._silent_from(at), step)
            self._pass_notice()
            self._spend(Bucket.WAITING, at - self.mark_us)  # nothing, unless no member was left to begin the round
            self.mark_us = at
        elif self.stage == _JobPhase.AWAY:
            self._pass_training(self.away_from_us, self.sample_step)
            self.stage = _JobPhase.OVER
            self._pass(max(self._silent_from(at), min(self.returned_us, self.lost_at_us)))
            self._pass_notice()
            self.stage = _JobPhase.FORMING
            self._pass(at)
        else:
            self._pass(at)
        self.owed_us = self.lost_at_us = self.silent_from_us = 0
        if self.stage != _JobPhase.STARTING:
            self.stage = _JobPhase.FORMING

    def _forget_loss(self) -> None:
        """Forget a loss that did not stop training, because the lost node was not a member yet."""
        if self.stage == _JobPhase.TRAINING:
            self.lost_at_us = 0

    def _silent_from(self, at: int) -> int:
        """Return when the first lost worker fell silent, at or after the mark; ``at`` without a loss."""
        return max(self.mark_us, self.silent_from_us) if self.lost_at_us else at

    def _pass_notice(self) -> None:
        """Pass the time in which the loss was not noticed."""
        if self.lost_at_us:
            noticed_us = max(self.mark_us, self.lost_at_us)
            self._spend(Bucket.NOTICING, noticed_us - self.mark_us)
            self.mark_us = noticed_us

    def _train(self, at: int, step: int) -> None:
        if self.stage == _JobPhase.AWAY:  # training continued while there was no scheduler
            self.stage = _JobPhase.TRAINING
            self._pass_training(at, step)
            self.lost_at_us = 0
        elif self.stage != _JobPhase.TRAINING:
            self._pass(at)
            self.stage, self.sample_step = _JobPhase.TRAINING, step

    def _start_scheduler(self, at: int, before: int) -> None:
        self.returned_us = at
        if self.stage == _JobPhase.TRAINING and self.lost_at_us:
            self._break(before, self.sample_step)
        if self.stage == _JobPhase.TRAINING:
            self.stage, self.away_from_us = _JobPhase.AWAY, before
            return
        if self.stage == _JobPhase.AWAY:
            return
        self._pass(before)
        is_anew, self.stage = self.stage in (_JobPhase.OVER, _JobPhase.STARTING), _JobPhase.OVER
        self._pass(at)
        self.stage = _JobPhase.STARTING if is_anew else _JobPhase.FORMING

    def _set_missing(self, at: int, event: JobEvent, *, missing: bool) -> None:
        slot = event.more.get("slot")
        is_loss = event.kind is EventKind.LOST and not event.more.get("spare")
        if is_loss and self.stage in (_JobPhase.TRAINING, _JobPhase.AWAY):
            silent_from_us = at - _us_of(event.more.get("silent_ms"))
            self.silent_from_us = min(self.silent_from_us, silent_from_us) if self.lost_at_us else silent_from_us
            self.lost_at_us = self.lost_at_us or at
        if type(slot) is not int:  # of a loss: a spare has taken the slot in the same pass
            return
        if self.stage == _JobPhase.STARTING and event.kind is EventKind.LOST and not self.high_step:
            self._pass(at)
            self.stage = _JobPhase.FORMING
        elif self.stage == _JobPhase.FORMING:
            self._pass(at)
        elif self.stage == _JobPhase.AWAY and missing:
            self.lost_at_us, self.silent_from_us = self.lost_at_us or at, self.silent_from_us or at
        (self.missing.add if missing else self.missing.discard)(slot)


def goodput_of(events: Iterable[JobEvent]) -> Goodput:
    """Return the account of these events."""
    fold = Goodput()
    for event in events:
        fold.add(event)
    return fold


def _us_of(ms: object) -> int:
    """Convert milliseconds from a file to microseconds, limited to an hour."""
    return round(min(max(ms, 0), 3_600_000) * 1000) if isinstance(ms, int | float) and ms == ms else 0


_CARRIED = (
    "began_us",
    "mark_us",
    "seen_us",
    "stage",
    "sample_step",
    "high_step",
    "away_from_us",
    "owed_us",
    "lost_at_us",
    "silent_from_us",
    "returned_us",
)
_LATER = ("owed_us", "lost_at_us", "silent_from_us", "returned_us")
"""Fields that files of earlier releases lack."""
