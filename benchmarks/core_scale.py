"""Measure the cost of the scheduler's decisions alone, without sockets and disk, for N workers and for N/4.

``python -m benchmarks.core_scale [--quick] [--workers N]``. Each story (a first start, a loss and the return, half of
all lost, a scheduler restart, …) is played to the core with N workers and with N/4, with the messages that real ones
send. *Growth* is the cost per worker among N, divided by that among N/4: 1 if a story is linear, 4 if it is quadratic.
*Longest step* is how long the scheduler reads nothing else. The floor is an event that changes nothing, a repeated
heartbeat. ``benchmarks.control_plane`` includes socket and disk.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Progress, Report, median, rounded, table
from samebits.core.ledger import Policy
from samebits.core.messages import (
    PROTOCOL,
    Activity,
    Admitted,
    Copy,
    Credential,
    Heartbeat,
    Holdings,
    Join,
    Leave,
    MemberRecord,
    Process,
    Register,
    ReportEnvelope,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Point
from samebits.core.records import Record
from samebits.core.reports import FINAL, Digest, Digests, SavedPoints
from samebits.core.scheduler import Closed, Received, SchedulerCore, SchedulerEvent, Tick
from samebits.core.state import JobState

WORKERS, WORKERS_QUICK = 10_000, 1000
SHARE = 4  # the larger job has this many times as many workers as the smaller
TRIALS = 3
RANKS_A_HOST = 8
LIVE, SAVED = Point(7, 1), (Point(10, 1), Point(20, 1))
JOB = "job"
MEANT = 1.5  # highest growth intended; the size of the cache makes it more than linear


@dataclass(slots=True)
class Cost:
    """The cost of one story's steps, in seconds of wall time."""

    total_s: float = 0.0
    longest_s: float = 0.0


@dataclass(slots=True)
class Crowd:
    """A core and the messages of its workers.

    Args:
        workers: the number of workers in a full world.
        policy: changes to a job's settings.
    """

    workers: int
    policy: dict[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    now: float = 1.0
    records: list[Record] = field(default_factory=list)
    session_of: dict[int, str] = field(default_factory=dict)
    incarnation_of: dict[str, int] = field(default_factory=dict)
    round: RoundId = field(default_factory=lambda: RoundId(0, 0))  # the last round with an invitation
    core: SchedulerCore = field(init=False)

    def __post_init__(self) -> None:
        self.load(JobState(), JOB)

    def load(self, state: JobState, new_job_id: str) -> None:
        """Start a scheduler."""
        policy = Policy(self.workers, "train.py", (), **{"cool_down_s": 0.0, **self.policy})  # type: ignore[arg-type]
        began_s = time.perf_counter()
        self.core = SchedulerCore(policy, state, now=self.now, boot_id="boot", new_job_id=new_job_id)
        ready = self.core.start()
        self._count(time.perf_counter() - began_s)
        self.records += ready.records

    def step(self, event: SchedulerEvent) -> None:
        began_s = time.perf_counter()
        ready = self.core.step(event, self.now)
        self._count(time.perf_counter() - began_s)
        self.records += ready.records
        for send in ready.sends:
            if type(send.message) is RoundOpened:
                self.round = send.message.round
            elif type(send.message) is Admitted:
                self.incarnation_of[send.session] = send.message.incarnation

    def _count(self, took_s: float) -> None:
        self.cost.total_s += took_s
        self.cost.longest_s = max(self.cost.longest_s, took_s)

    # ---- messages of workers

    def register(self, workers: Iterable[int], life: str = "a", standing: bool = False) -> None:
        for slot in workers:
            session = self.session_of[slot] = f"{slot}{life}"
            process = Process(f"host-{slot // RANKS_A_HOST}", 1 + slot, 1, "cpu")
            known = MemberRecord(1, 1, RoundId(1, 1), slot, self.workers, None, None, slot) if standing else None
            job, incarnation = (JOB, 1) if standing else ("", 0)
            settings = self.core.policy.settings
            message = Register(PROTOCOL, job, "train.py", str(slot), session, incarnation, process, settings, known)
            self.step(Received(session, message))
        self.step(Tick())

    def join(self, workers: Iterable[int], live: Point | None = None, points: Sequence[Point] = ()) -> None:
        """Join with points, own parts, and copies of the neighbours."""
        for slot in workers:
            sender, own = self._credential(slot), bool(points)
            copies = tuple(Copy((slot + RANKS_A_HOST) % self.workers, point) for point in points)
            join = Join(
                sender, self.round, Holdings(tuple(points), own, (("torch", "2"),), live=live, commits=7, copies=copies)
            )
            self.step(Received(self.session_of[slot], join))

    def say(self, workers: Iterable[int], activity: Activity, generation: int) -> None:
        for slot in workers:
            beat = Heartbeat(self._credential(slot), self.core.state.term, activity, generation, self.round, 7)
            self.step(Received(self.session_of[slot], beat))

    def compare(self, *points: Point, commits: int = 7) -> None:
        """Report equal states of all ranks at these points."""
        digests = tuple(Digest(point, commits, b"same") for point in points)
        for slot in range(self.workers):
            self.step(Received(self.session_of[slot], ReportEnvelope(self._credential(slot), Digests(digests))))

    def save(self) -> None:
        self.compare(*SAVED)
        for slot in range(self.workers):
            self.step(Received(self.session_of[slot], ReportEnvelope(self._credential(slot), SavedPoints(SAVED))))

    def leave(self) -> None:
        for slot in range(self.workers):
            self.step(Received(self.session_of[slot], Leave(self._credential(slot), True, "status 0")))
        self.step(Tick())

    def lose(self, workers: Iterable[int]) -> None:
        """Report these processes dead, all in one pass."""
        for slot in workers:
            self.step(Closed(self.session_of[slot], gone=True))
        self.step(Tick())

    def _credential(self, slot: int) -> Credential:
        session = self.session_of[slot]
        return Credential(JOB, str(slot), session, self.incarnation_of.get(session, 1))

    # ---- chapters

    def begin(self) -> None:
        self.register(range(self.workers))
        self.join(range(self.workers))
        self.say(range(self.workers), Activity.TRAINING, 1)

    def come_together(self, lost: Sequence[int], live: Point | None = LIVE) -> None:
        """Let the survivors leave their collective, restart the lost ones, and let all meet."""
        here = sorted(set(range(self.workers)) - set(lost))
        self.say(here, Activity.WAITING, 1)
        self.register(lost, "b")
        self.now += 1.0
        self.join(here, live)
        self.join(lost)
        self.say(range(self.workers), Activity.TRAINING, 2)


# ---- the stories: their preparation is not measured


def _first_start(workers: int) -> Crowd:
    crowd = Crowd(workers)
    crowd.begin()
    return crowd


def _start_with_spares(workers: int) -> Crowd:
    spares = workers // 10
    crowd = Crowd(workers, {"spare_num": spares})
    crowd.register(range(workers, workers + spares))
    crowd.begin()
    return crowd


def _elastic_start(workers: int) -> Crowd:
    crowd = Crowd(workers, {"min_world_size": workers // 2, "max_world_size": 2 * workers})
    crowd.begin()
    return crowd


def _repeated_heartbeats(workers: int) -> Crowd:
    crowd = _trained(workers)
    crowd.say(range(workers), Activity.TRAINING, 1)
    return crowd


def _one_lost(workers: int) -> Crowd:
    crowd = _trained(workers)
    crowd.lose([5])
    crowd.come_together([5])
    return crowd


def _half_lost(workers: int) -> Crowd:
    crowd, lost = _trained(workers), range(workers // 2)
    crowd.lose(lost)
    crowd.come_together(lost)
    return crowd


def _all_lost(workers: int) -> Crowd:
    crowd = _trained(workers)
    crowd.save()
    crowd.lose(range(workers))
    crowd.register(range(workers), "b")
    crowd.join(range(workers), points=SAVED)
    return crowd


def _shrink_and_grow(workers: int) -> Crowd:
    sizes = {"min_world_size": workers // 2, "max_world_size": workers, "shrink_grace_s": 0.0}
    crowd, gone = _trained(workers, sizes), range(workers // 4)
    here = range(workers // 4, workers)
    crowd.lose(gone)
    crowd.say(here, Activity.WAITING, 1)
    crowd.join(here, LIVE)
    crowd.say(here, Activity.TRAINING, 2)
    crowd.register(gone, "b")
    crowd.say(gone, Activity.WAITING, 0)
    crowd.step(Tick())
    crowd.join(here, Point(9, 2))
    crowd.join(gone)
    return crowd


def _scheduler_restarted(workers: int) -> Crowd:
    crowd = _trained(workers)
    began_s = time.perf_counter()
    state = JobState.replay(crowd.records)
    crowd.cost.total_s += time.perf_counter() - began_s
    crowd.load(state, JOB)
    crowd.register(range(workers), standing=True)
    crowd.say(range(workers), Activity.TRAINING, 1)
    return crowd


def _journal_lost(workers: int) -> Crowd:
    crowd = _trained(workers)
    crowd.load(JobState(), "another job, until it is known which this was")
    crowd.register(range(workers), standing=True)
    crowd.now = crowd.core.wake_at() or crowd.now  # all reports are read before they are judged
    crowd.step(Tick())
    crowd.say(range(workers), Activity.TRAINING, 1)
    return crowd


def _finish(workers: int) -> Crowd:
    crowd = _trained(workers)
    crowd.compare(LIVE, commits=FINAL)
    crowd.say(range(workers), Activity.DONE, 1)
    crowd.say(range(workers), Activity.FINISHED, 1)
    crowd.leave()
    return crowd


def _trained(workers: int, policy: dict[str, float] | None = None) -> Crowd:
    crowd = Crowd(workers, policy or {})
    crowd.begin()
    crowd.cost = Cost()
    return crowd


STORIES: dict[str, Callable[[int], Crowd]] = {
    "repeated_heartbeats": _repeated_heartbeats,
    "first_start": _first_start,
    "start_with_spares": _start_with_spares,
    "elastic_start": _elastic_start,
    "one_lost": _one_lost,
    "half_lost": _half_lost,
    "all_lost": _all_lost,
    "shrink_and_grow": _shrink_and_grow,
    "scheduler_restarted": _scheduler_restarted,
    "journal_lost": _journal_lost,
    "finish": _finish,
}
FLOOR = "repeated_heartbeats"


# ---- the run


@dataclass(frozen=True, slots=True)
class Told:
    """A story at both sizes: medians over the trials."""

    small: Cost
    whole: Cost

    @property
    def growth(self) -> float:
        """Growth of the cost per worker, from the smaller job to the larger."""
        return self.whole.total_s / (SHARE * self.small.total_s)


def tell(story: Callable[[int], Crowd], workers: int, trials: int = TRIALS) -> Told:
    """Play both sizes in turn."""
    costs: dict[int, list[Cost]] = {workers // SHARE: [], workers: []}
    for _ in range(trials):
        for size, found in costs.items():
            gc.collect()
            gc.disable()  # as the scheduler, which collects rarely
            try:
                found.append(story(size).cost)
            finally:
                gc.enable()
    small, whole = (
        Cost(median([cost.total_s for cost in found]), median([cost.longest_s for cost in found]))
        for found in costs.values()
    )
    return Told(small, whole)


def report(found: dict[str, Told], workers: int) -> Report:
    """Report all stories."""
    floor_us = rounded(found[FLOOR].whole.total_s / workers * 1e6)
    stories = {name: told for name, told in found.items() if name != FLOOR}
    ours = {f"{name}_ms": rounded(told.whole.total_s * 1e3) for name, told in stories.items()}
    ours |= {f"{name}_longest_step_ms": rounded(told.whole.longest_s * 1e3) for name, told in stories.items()}
    return Report(
        "core_scale",
        {"repeated_heartbeat_us": floor_us},
        {},
        {**ours, "workers_count": workers},
        {f"{name}_growth": rounded(told.growth) for name, told in found.items()},
    )


def people(found: dict[str, Told], workers: int) -> str:
    """Format the table with its interpretation."""
    rows = [
        [
            name.replace("_", " "),
            f"{told.whole.total_s * 1e3:.1f}",
            f"{told.whole.total_s / workers * 1e6:.1f}",
            f"{told.whole.longest_s * 1e3:.1f}",
            f"{told.growth:.2f}",
        ]
        for name, told in found.items()
    ]
    head = [f"{workers} workers", "ms", "µs a worker", "longest step, ms", "growth"]
    steep = [name.replace("_", " ") for name, told in found.items() if told.growth > MEANT]
    verdict = f"steeper than linear: {', '.join(steep)}" if steep else "every story is linear"
    return f"{table(head, rows)}\n{verdict} (growth of at most {MEANT:g} is meant)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core_scale", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"simulate {WORKERS_QUICK} workers")
    parser.add_argument("--workers", type=int, help=f"number of workers (default: {WORKERS})")
    arguments = parser.parse_args()
    workers = arguments.workers or (WORKERS_QUICK if arguments.quick else WORKERS)
    if workers < RANKS_A_HOST * SHARE:
        parser.error(f"--workers={workers}: at least {RANKS_A_HOST * SHARE}")
    progress, found = Progress(f"{len(STORIES)} stories of {workers} workers"), {}
    for name, story in STORIES.items():
        found[name] = tell(story, workers)
        progress.say(f"{name.replace('_', ' ')}: {found[name].whole.total_s * 1e3:.0f} ms")
    report(found, workers).print(people(found, workers))


if __name__ == "__main__":
    main()
