"""Hours of a healthy job on a busy machine: the detectors must never cost it a step.

The real scheduler core (leases, hangs), the workers' host health checks and the anomaly bands of losses are run; a
worker's reports follow the rules of ``training.run.main_thread_probe``. Only the noise is played, event by event: in
between all make steps, and no detector receives anything. The noise is typical of busy machines: processes paused for
up to three seconds, steps that take up to eight times as long under load, slow loaders, commits, evaluations and
compilations, a paused scheduler, one check that shows a full disk or memory, one loss far from the others.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from samebits.core.ledger import Policy
from samebits.core.messages import Activity, GiveUp, Heartbeat, ReportEnvelope
from samebits.core.records import SeatLost
from samebits.core.reports import Phase, Progress, Sign, StallReport
from samebits.core.scheduler import Received, SchedulerCore, SchedulerPaused, Tick
from samebits.core.watch.anomalies import Band
from samebits.core.watch.health_limits import HealthReading, HealthWatch, Limit
from tests.core.house import House, policy

RANKS = 4
EPISODES_AN_HOUR = 1.0
A_JOB_H = 50
STILL_S = 2.0
PAUSE_S = 3.0
GRID_S = 0.5
CALM_SHARE, LIMIT = 0.8, 0.9
LOOKS, LOSSES = 6, 6
"""Duration of each episode."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What delays one rank, or all, for a while; the phase it shows, and the longest time in seconds."""

    phase: Phase
    rests: bool
    most_s: float
    of_all: bool = False
    is_silent: bool = False  # the whole process is paused


KINDS = {
    "process stands still": Noise(Phase.USER, True, PAUSE_S, is_silent=True),
    "machine under load": Noise(Phase.BACKWARD, False, 16.0, of_all=True),
    "collective under load": Noise(Phase.COMMUNICATION, False, 16.0, of_all=True),
    "loader waits": Noise(Phase.DATA, True, 20.0),
    "commit takes long": Noise(Phase.COMMIT, True, 20.0),
    "evaluation on one rank": Noise(Phase.FORWARD, False, 25.0),
    "script waits": Noise(Phase.USER, True, 20.0),
    "compiles anew": Noise(Phase.COMPILING, False, 60.0),
}


@dataclass(slots=True)
class Hours:
    """The result of so many hours. ``costs`` are alarms that cost a step, a process or a seat."""

    hours: float = 0.0
    episodes: Counter[str] = field(default_factory=Counter)
    named: int = 0
    full_looks: int = 0
    odd_losses: int = 0
    told_losses: int = 0
    costs: list[str] = field(default_factory=list)

    def add(self, other: Hours) -> None:
        """Add other hours."""
        self.hours += other.hours
        self.episodes += other.episodes
        self.named += other.named
        self.full_looks += other.full_looks
        self.odd_losses += other.odd_losses
        self.told_losses += other.told_losses
        self.costs += other.costs

    def __str__(self) -> str:
        return (
            f"{self.hours:.0f} hours, {self.episodes.total()} episodes: {self.named} standstills named, "
            f"{self.full_looks} full looks, {self.told_losses} of {self.odd_losses} odd losses told, "
            f"{len(self.costs)} alarms that cost a step"
        )


class Job:
    """One healthy job of four ranks."""

    def __init__(self, seed: int, changes: dict[str, float | bool] | None = None) -> None:
        self.draw = random.Random(f"hours {seed}")
        self.seen = Hours()
        self._policy: Policy = replace(policy(RANKS), **(changes or {}))  # type: ignore[arg-type]
        house = House(self._policy).fill().train()
        self.core: SchedulerCore = house.core
        self.now, self.step = house.now, 10
        state = self.core.state
        self._senders = [house.credential(str(rank)) for rank in range(RANKS)]
        self._number, self._term = state.generation_number, state.term
        self._step_s = self.draw.uniform(0.1, 2.0)
        self._longest_s = [self._step_s] * RANKS
        self._health = HealthWatch({Sign.DISK: Limit(LIMIT, drains=True), Sign.MEMORY: Limit(LIMIT)})
        self._band = Band()
        self._loss = self.draw.uniform(1.0, 8.0)
        self._beat()

    def run(self, hours: float) -> Hours:
        """Run for so many hours, with occasional episodes."""
        end = self.now + 3600.0 * hours
        while True:
            self.now += self.draw.expovariate(EPISODES_AN_HOUR / 3600.0)
            if self.now >= end or self.seen.costs:
                break
            self._episode()
        self.seen.hours += hours
        return self.seen

    # ---- noise

    def _episode(self) -> None:
        kind = self.draw.choice([*KINDS, "scheduler stands still"])
        self.seen.episodes[kind] += 1
        self.step += 1000
        self._beat()
        if kind in KINDS:
            self._hold(KINDS[kind])
        else:
            self._stand_still()
        self._look()
        self._report()

    def _hold(self, noise: Noise) -> None:
        """Make one step take long, from the time of the last one."""
        lasts_s = self.draw.uniform(0.2, noise.most_s)
        held = range(RANKS) if noise.of_all else (self.draw.randrange(RANKS),)
        began, beats = self.now, [self.now + self.draw.random() for _ in range(RANKS)]
        told = [False] * RANKS
        while self.now < began + lasts_s:
            self.now = min(self.now + GRID_S, began + lasts_s)
            for rank in range(RANKS):
                if beats[rank] <= self.now and not (noise.is_silent and rank in held):
                    beats[rank] += 1.0
                    told[rank] |= self._speak(rank, noise if rank in held else None, self.now - began)
            self._tick()
        for rank in range(RANKS):
            self._longest_s[rank] = max(self._longest_s[rank], lasts_s)
            if told[rank]:
                self._take(
                    self._senders[rank].session,
                    ReportEnvelope(self._senders[rank], StallReport(None), self._number, self.step),
                )
        self.step += 1
        self._beat()

    def _speak(self, rank: int, noise: Noise | None, still_s: float) -> bool:
        """Send a heartbeat, with the position if the rank has stood for longer than ever; return whether it did."""
        sender = self._senders[rank]
        self._take(sender.session, self._heartbeat(rank))
        if still_s < max(STILL_S, self._longest_s[rank]):
            return False
        phase, rests = (Phase.COMMUNICATION, True) if noise is None else (noise.phase, noise.rests)
        launched = self.step + (phase is Phase.COMMUNICATION)
        progress = Progress(phase, launched, self.step, still_s, self._longest_s[rank], rests, "train.py:1")
        self._take(sender.session, ReportEnvelope(sender, StallReport(progress), self._number, self.step))
        return True

    def _stand_still(self) -> None:
        """Pause the scheduler's process; messages are read when it resumes, before or after it knows."""
        gap_s = self.draw.uniform(0.2, PAUSE_S)
        self.now += gap_s
        knows_first = self.draw.random() < 0.5
        if knows_first:
            self._decide(SchedulerPaused(gap_s))
        self._beat()
        if not knows_first:
            self._decide(SchedulerPaused(gap_s))
        self._tick()

    def _look(self) -> None:
        """Make one check show a full disk among some that do not; the checks since the last episode did not."""
        spike = self.draw.randrange(1, 2 * LOOKS)
        for number in range(LOOKS):
            share = 0.97 if number == spike else self.draw.uniform(0.3, CALM_SHARE)
            self.seen.full_looks += number == spike
            self._health.look((HealthReading(Sign.DISK, "/ckpt", share), HealthReading(Sign.MEMORY, "", share)))
            self.seen.costs += [f"{one} after one full look" for one in self._health.ailments if one.drains]

    def _report(self) -> None:
        """Report some losses, occasionally an anomalous one, which is only logged."""
        for _ in range(LOSSES):
            self._loss = max(0.1, self._loss * self.draw.gauss(0.9995, 0.002))
            is_odd = self.draw.random() < 0.001
            self.seen.odd_losses += is_odd
            loss = self._loss * (100.0 if is_odd else self.draw.gauss(1, 0.03))
            self.seen.told_losses += bool(self._band.take(0, loss))

    # ---- the core

    def _heartbeat(self, rank: int) -> Heartbeat:
        return Heartbeat(self._senders[rank], self._term, Activity.TRAINING, self._number, None, self.step)

    def _beat(self) -> None:
        for rank in range(RANKS):
            self._take(self._senders[rank].session, self._heartbeat(rank))

    def _tick(self) -> None:
        wake_at = self.core.wake_at()
        if wake_at is not None and wake_at <= self.now:
            self._decide(Tick())

    def _take(self, session: str, message: Heartbeat | ReportEnvelope) -> None:
        self._decide(Received(session, message))

    def _decide(self, event: Received | Tick | SchedulerPaused) -> None:
        ready = self.core.step(event, self.now)
        if ready.is_empty:
            return
        costs = [str(record) for record in ready.records if isinstance(record, SeatLost)]
        costs += [str(send.message) for send in ready.sends if isinstance(send.message, GiveUp)]
        costs += [note.text for note in ready.notes if " opened: " in note.text]
        self.seen.costs += costs
        self.seen.named += any(note.text.startswith("no step for ") for note in ready.notes)


def run_hours(hours: int, seed: int = 0, changes: dict[str, float | bool] | None = None) -> Hours:
    """Run so many hours, in jobs of some days."""
    total = Hours()
    for number, begin in enumerate(range(0, hours, A_JOB_H)):
        total.add(Job(seed + number, changes).run(min(A_JOB_H, hours - begin)))
    return total


def run_hours_in_parts(hours: int, seed: int, jobs: int, shown: Callable[[Hours], None], part_h: int = 5_000) -> Hours:
    """The same on several processes; ``shown`` is called with the progress."""
    total, parts = Hours(), [(min(part_h, hours - at), seed + at) for at in range(0, hours, part_h)]
    if jobs <= 1:
        for some, first in parts:
            total.add(run_hours(some, first))
            shown(total)
        return total
    with ProcessPoolExecutor(jobs) as pool:
        for done in pool.map(run_hours, *zip(*parts, strict=True)):
            total.add(done)
            shown(total)
    return total
