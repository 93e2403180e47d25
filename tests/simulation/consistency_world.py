"""A small world of replicas with bit flips: the real scheduler and agents, and a model that is one number.

The simulated ranks train in lockstep (each step mixes every rank's number into all), keep copies and roll back as
``training`` does. The faults are flips, kills of the scheduler at any time, kills of a rank, and reports that arrive
late or twice. The undisturbed run is a chain of numbers known beforehand, so every repair can be checked exactly.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from samebits.core.agent.agent_core import AgentCore, AgentPolicy
from samebits.core.agent.agent_events import (
    AgentEvent,
    Began,
    BreakGroup,
    Completed,
    Connected,
    Disconnected,
    EnterAgain,
    Entered,
    Failed,
    Heard,
    MustEnd,
    Observed,
    Over,
    Passed,
    Trains,
)
from samebits.core.ledger import Policy, Trust
from samebits.core.messages import (
    Admitted,
    EqualPoint,
    FromScheduler,
    FromWorker,
    GenerationStarted,
    Holdings,
    Process,
    Sharding,
)
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted, JobInterrupted, Record, RolledBack
from samebits.core.reports import FINAL, Digest, Digests, SavedPoints
from samebits.core.scheduler import Closed, Received, SchedulerCore, Tick
from samebits.core.state import JobState

EVERY, LAST, SAVES = 7, 40, 15
MOST_DIGESTS = 12
FIRST, KEPT = 3, 3
TICK_S = 0.05
MOST_LOOPS = 6000


class Wrong(AssertionError):
    """A required property does not hold."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The events of a world."""

    size: int
    flips: tuple[tuple[int, int], ...]  # (rank, after which step), each once
    scheduler_dies: tuple[int, ...] = ()  # loops
    rank_dies: bool = False  # one, once a difference was found
    trust: Trust = Trust.MAJORITY
    dies_meanwhile: bool = False  # the scheduler, while all are to roll back
    dies_behind_flip: bool = False  # another rank than the flipped one, before any comparison
    shards: int = 0  # parts of the state, each held by every size/shards-th rank; 0: every rank holds all of it

    @property
    def kills_ranks(self) -> bool:
        """Return whether a rank dies."""
        return self.rank_dies or self.dies_behind_flip

    @property
    def replicas(self) -> int:
        """Return how many ranks hold the same part."""
        return self.size // max(1, self.shards)


def drawn(seed: int) -> Plan:
    """Draw a plan from its seed: a flip, sometimes two far apart, and other faults meanwhile."""
    draw = random.Random(seed)
    size = draw.choice((3, 4, 5))
    steps = [draw.randrange(2, 20), draw.randrange(27, LAST - 1)][: draw.choice((1, 1, 2))]
    flips = tuple((draw.randrange(size), step) for step in steps)
    # Not both: if a flipped rank and the scheduler die before anything is written, no process knows of the flip.
    rank_dies = draw.random() < 0.3
    deaths = () if rank_dies else tuple(sorted(draw.randrange(20, 400) for _ in range(draw.choice((0, 0, 1, 2)))))
    meanwhile = draw.random() < 0.3
    behind = not (rank_dies or deaths or meanwhile) and draw.random() < 0.6
    return Plan(size, flips, deaths, rank_dies, dies_meanwhile=meanwhile, dies_behind_flip=behind)


def drawn_with_shards(seed: int) -> Plan:
    """Draw a plan in which two or three ranks hold each shard.

    If the second of two replicas dies, its successor takes the shard of the first, and none can tell that it flipped.
    """
    draw = random.Random(seed)
    shards, replicas = draw.choice(((2, 2), (3, 2), (2, 3)))
    plan = drawn(seed)
    dies_behind = plan.dies_behind_flip and replicas > 2
    return replace(plan, size=shards * replicas, shards=shards, dies_behind_flip=dies_behind)


def mixed(*numbers: int) -> int:
    """Return a number made of these."""
    return hash(numbers) & (2**61 - 1)


def chain(plan: Plan) -> list[list[int]]:
    """Return the undisturbed run: each step's numbers, by rank."""
    numbers = [[initial(rank, plan) for rank in range(plan.size)]]
    for _ in range(LAST):
        numbers.append([mixed(number, *numbers[-1]) for number in numbers[-1]])
    return numbers


def initial(rank: int, plan: Plan) -> int:
    """Return the number with which a rank begins, which is that of its shard."""
    return 1 + (rank % plan.shards if plan.shards else 0)


@dataclass
class Rank:
    """One worker's process."""

    node: int
    agent: AgentCore
    session: str
    number: int = 1
    step: int = 0
    place: GenerationStarted | None = None
    trains: bool = False
    is_broken: bool = False
    point: Point | None = None  # of the last commit
    kept: list[tuple[Point, int]] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    late: list[Digest] = field(default_factory=list)  # hashed but not reported yet
    back_to: Point | None = None
    ended: str = ""
    is_over: bool = False
    to_scheduler: deque[FromWorker] = field(default_factory=deque)
    to_agent: deque[FromScheduler] = field(default_factory=deque)


class ConsistencyWorld:
    """One job.

    Args:
        seed: determines the order of events.
        plan: what happens.
        core_type: the class of the scheduler's core.
    """

    def __init__(self, seed: int, plan: Plan, core_type: type[SchedulerCore] = SchedulerCore) -> None:
        self._draw = random.Random(seed)
        self.plan = plan
        self._core_type = core_type
        self._policy = Policy(
            plan.size, "train.py", (("WORKER_NUM", str(plan.size)),), cool_down_s=0.0, trust=plan.trust
        )
        self.now = 100.0
        self.journal: list[Record] = []
        self.right = chain(plan)
        self._to_flip = set(plan.flips)
        self.flipped: list[tuple[int, int]] = []
        self._kills = 1 if plan.rank_dies else 0
        self._dies_meanwhile = plan.dies_meanwhile
        self._sessions = 0
        self._begun = 0  # the last generation
        self._are_unlike = False  # its ranks, as it started
        self._behind: list[int] = []  # ranks that have flipped while another dies before it is found
        self._disks: list[dict[Point, int]] = [{} for _ in range(plan.size)]
        self.ranks = [self._new(node) for node in range(plan.size)]
        self._load()

    # ---- processes

    def _new(self, node: int) -> Rank:
        self._sessions += 1
        session = f"{self._sessions:08x}"
        process = Process("host", 1000 + self._sessions, 1, "cpu")
        policy = AgentPolicy(str(node), session, process, "train.py", (("WORKER_NUM", str(self.plan.size)),))
        return Rank(node, AgentCore(policy, self.now), session)

    def _load(self) -> None:
        state = JobState.replay(self.journal)
        self.core = self._core_type(self._policy, state, now=self.now, boot_id="boot", new_job_id="job")
        self._take(self.core.start())
        for rank in self.ranks:
            rank.to_agent.clear()
            rank.to_scheduler.clear()
            self._tell(rank, Connected())

    def _scheduler_dies(self) -> None:
        for rank in self.ranks:
            self._tell(rank, Disconnected())
        self._load()

    def _rank_dies(self, rank: Rank) -> None:
        self._step_core(Closed(rank.session, gone=True))
        self.ranks[rank.node] = fresh = self._new(rank.node)
        for other in self.ranks:
            if other.trains:
                self._leave(other, failed=True)
        self._tell(fresh, Connected())

    # ---- messages

    def _step_core(self, event: Received | Closed | Tick) -> None:
        self._take(self.core.step(event, self.now))
        wake_at = self.core.wake_at()
        if not isinstance(event, Tick) and wake_at is not None and wake_at <= self.now:
            self._take(self.core.step(Tick(), self.now))

    def _take(self, ready: object) -> None:
        records, sends = ready.records, ready.sends  # type: ignore[attr-defined]
        self.journal += records
        for record in records:
            self._check(record)
        by_session = {rank.session: rank for rank in self.ranks}
        for send in sends:
            if send.session in by_session:
                by_session[send.session].to_agent.append(send.message)

    def _tell(self, rank: Rank, event: AgentEvent) -> None:
        ready = rank.agent.step(event, self.now)
        rank.to_scheduler.extend(ready.sends)
        for notice in ready.notices:
            match notice:
                case Admitted():
                    self._enter(rank)
                case BreakGroup() if not rank.is_broken:
                    self._leave(rank, failed=False)
                case EnterAgain(_, _, _, back_to):
                    if back_to is not None and back_to != rank.back_to:
                        self._go_back(rank, back_to)
                    self._enter(rank)
                case Began(started):
                    rank.place, rank.trains, rank.is_broken, rank.back_to = started, False, False, None
                case EqualPoint(point=point):
                    at = next((at for at, one in enumerate(rank.kept) if one[0] == point), 0)
                    del rank.kept[:at]
                case Over():
                    rank.is_over = True
                case MustEnd(_, text):
                    rank.ended = text

    def _enter(self, rank: Rank) -> None:
        live = rank.point
        self._tell(
            rank,
            Entered(
                Holdings(
                    tuple(sorted(self._disks[rank.node])),
                    False,
                    (("torch", "1"),),
                    b"b",
                    live=live,
                    commits=rank.step,
                    back_to=rank.back_to,
                    sharding=Sharding((self.plan.replicas, self.plan.shards), (True, False))
                    if self.plan.shards
                    else None,
                )
            ),
        )

    def _leave(self, rank: Rank, *, failed: bool) -> None:
        rank.trains, rank.is_broken, rank.place = False, True, None
        if failed:
            self._tell(rank, Failed())
        self._enter(rank)

    def _go_back(self, rank: Rank, to: Point) -> None:
        rank.back_to = to
        rank.kept = [one for one in rank.kept if one[0] <= to]
        rank.point = None
        if rank.kept:
            rank.point, rank.number = rank.kept[-1]
            rank.step = rank.point.step

    # ---- training

    def _begin(self) -> None:
        """The group is formed once all know of one generation; then each has what its source holds."""
        places = [rank.place for rank in self.ranks]
        if any(place is None or rank.trains for place, rank in zip(places, self.ranks, strict=True)):
            return
        if self._begun == (number := places[0].generation if places[0] is not None else 0):
            return  # and its ranks are not equal
        if len({place.generation for place in places if place is not None}) > 1:
            return
        self._begun = number
        restore = places[0].restore if places[0] is not None else None
        numbers = {
            rank.node: rank.number if rank.point == restore else self._disks[rank.node].get(restore, -1)
            for rank in self.ranks
            if restore is not None
        }
        for rank, place in zip(self.ranks, places, strict=True):
            assert place is not None
            if restore is None:
                rank.number, rank.step = initial(rank.node, self.plan), 0
                rank.point = Point(0, place.generation)
            else:
                if numbers[place.source] < 0:
                    raise Wrong(f"rank {place.source} is to hold {restore} and holds {rank.point}")
                rank.number, rank.step, rank.point = numbers[place.source], restore.step, restore
            rank.kept = [one for one in rank.kept if one[0] <= rank.point]
            rank.trains, rank.is_broken = True, False
            rank.late.clear()
            self._tell(rank, Trains(place.generation))
            if restore is None:
                self._save(rank)
        by_shard = {(initial(rank.node, self.plan), rank.number) for rank in self.ranks}
        self._are_unlike = len(by_shard) > max(1, self.plan.shards)
        for rank in self.ranks if self._are_unlike else ():
            assert rank.place is not None
            rank.point, point = Point(rank.step, rank.place.generation), rank.point
            self._report(rank, [self._digest(rank, rank.step)])
            rank.point = point

    def _save(self, rank: Rank) -> None:
        assert rank.point is not None
        self._disks[rank.node][rank.point] = rank.number
        self._report(rank, [self._digest(rank, rank.step)])
        self._tell(rank, Observed(SavedPoints.of(tuple(sorted(self._disks[rank.node]))[-8:])))

    def _train(self) -> None:
        if self._are_unlike or not all(rank.trains and rank.step < LAST for rank in self.ranks):
            return
        numbers = [rank.number for rank in self.ranks]
        for rank in self.ranks:
            assert rank.place is not None
            rank.number, rank.step = mixed(rank.number, *numbers), rank.step + 1
            rank.point = Point(rank.step, rank.place.generation)
            self._compare(rank)
            if rank.step % SAVES == 0:
                self._save(rank)
        for rank in self.ranks:
            if (rank.node, rank.step) in self._to_flip:
                self._to_flip.discard((rank.node, rank.step))
                self.flipped.append((rank.node, rank.step))
                rank.number ^= 1 << 20
                self._behind += [rank.node] if self.plan.dies_behind_flip else []
        if self.ranks[0].step == LAST:
            for rank in self.ranks:
                assert rank.place is not None
                self._report(rank, [self._digest(rank, FINAL)])
                self._tell(rank, Completed(rank.place.generation, LAST))

    def _compare(self, rank: Rank) -> None:
        assert rank.place is not None and rank.point is not None
        begun = 0 if rank.place.restore is None else rank.place.restore.step
        is_due = rank.step == begun + 1 or rank.step % EVERY == 0
        is_kept = is_due and not self.plan.shards  # shards are restored from disks
        if is_kept:
            if len(rank.kept) == KEPT:
                rank.kept.pop()
            rank.kept.append((rank.point, rank.number))
        if is_due or rank.step <= begun + FIRST:
            rank.late.append(self._digest(rank, rank.step, is_kept=is_kept))
        if rank.late and self._draw.random() < 0.6:  # the hashing thread is done now, or later
            self._report(rank, rank.late)

    def _digest(self, rank: Rank, commits: int, *, is_kept: bool = False) -> Digest:
        assert rank.point is not None
        number = rank.number.to_bytes(8, "big")
        if self.plan.shards:
            return Digest(rank.point, commits, b"", key=(rank.node % self.plan.shards,), held=number)
        return Digest(rank.point, commits, number, is_kept=is_kept)

    def _report(self, rank: Rank, new: list[Digest]) -> None:
        told = [*rank.digests, *rank.late, *(one for one in new if one not in rank.late)]
        rank.digests = list(dict.fromkeys(told))[-MOST_DIGESTS:]
        rank.late.clear()
        for _ in range(self._draw.choice((1, 1, 2))):
            self._tell(rank, Observed(Digests.of(tuple(rank.digests))))

    # ---- required properties

    def _check(self, record: Record) -> None:
        if isinstance(record, RolledBack) and self.plan.trust is Trust.MAJORITY and not self.plan.rank_dies:
            self._check_named(record)
        if isinstance(record, GenerationCommitted) and record.restore is not None and self._is_mended():
            back = next(one for one in reversed(self.journal) if isinstance(one, RolledBack))
            if not self.plan.kills_ranks and record.restore != back.to:
                raise Wrong(f"all begin again from {record.restore} instead of {back.to}")
            right = self.right[record.restore.step]
            if any(rank.number != right[rank.node] for rank in self.ranks if rank.point == record.restore):
                raise Wrong(f"all begin again from step {record.restore.step}, which is not the undisturbed run's")

    def _is_mended(self) -> bool:
        """Return whether every rank after a flip was rolled back, and none has trained since."""
        kinds = [type(one) for one in self.journal if isinstance(one, RolledBack | GenerationCommitted)]
        return kinds[-2:] == [RolledBack, GenerationCommitted]

    def _check_named(self, record: RolledBack) -> None:
        nodes = {int(node) for node, _ in record.suspects}
        if self.plan.dies_behind_flip and (not nodes or any(rank in nodes for rank, _ in self.flipped)):
            return  # a newcomer may have taken the flipped state, or the rank that could tell is gone
        if not nodes and self.plan.replicas in (2, 4):
            return  # two against two
        if 2 * len(nodes) >= self.plan.replicas:
            raise Wrong("a minority was believed")
        steps = [step for rank, step in self.flipped if rank in nodes and record.to.step <= step < record.step]
        if not steps:
            raise Wrong(f"worker {nodes} is named, whose bit did not flip between {record.to.step} and {record.step}")
        if record.step > min(steps) + EVERY:
            raise Wrong(f"a flip behind step {min(steps)} was found at step {record.step}")

    def run(self) -> None:
        """Run until all are done or the job has ended; raise :class:`Wrong` at a violation."""
        for loop in range(MOST_LOOPS):
            self.now += TICK_S
            is_back = self.core.state.rolled_back is not None
            if loop in self.plan.scheduler_dies or (self._dies_meanwhile and is_back and self._draw.random() < 0.3):
                self._dies_meanwhile = self._dies_meanwhile and not is_back
                self._scheduler_dies()
            if self._behind and self._draw.random() < 0.2:
                others = [rank for rank in self.ranks if rank.node != self._behind[0]]
                del self._behind[0]
                self._rank_dies(self._draw.choice(others))
            is_time = self.core.state.rolled_back is not None or self.core._equality.is_in_question
            if self._kills and is_time and self._draw.random() < 0.1:
                self._kills -= 1
                self._rank_dies(self._draw.choice(self.ranks))
            self._deliver()
            self._begin()
            if self._draw.random() < 0.5:
                self._train()
            for rank in self.ranks:
                self._tell(rank, Passed(rank.step))
            self._step_core(Tick())
            if all(rank.is_over or rank.ended for rank in self.ranks):
                break
        else:
            raise Wrong(f"no end: {self.core.phase()}, steps {[rank.step for rank in self.ranks]}")
        self._check_end()

    def _deliver(self) -> None:
        """Deliver some messages; those of one sender to one receiver stay in order."""
        for rank in self._draw.sample(self.ranks, len(self.ranks)):
            for _ in range(self._draw.choice((0, 1, 3, 9))):
                if rank.to_scheduler:
                    self._step_core(Received(rank.session, rank.to_scheduler.popleft()))
                if rank.to_agent:
                    self._tell(rank, Heard(rank.to_agent.popleft()))

    def _check_end(self) -> None:
        ended = [record.cause for record in self.journal if isinstance(record, JobInterrupted)]
        if ended:
            raise Wrong(f"the job ended: {ended[0]}")
        if [rank.number for rank in self.ranks] != self.right[LAST]:
            raise Wrong("the end is not the undisturbed run's")


def hunt(core_type: type[SchedulerCore], seeds: Iterable[int], plan: Callable[[int], Plan] = drawn) -> int | None:
    """Return the first seed in which a broken build is noticed."""
    for seed in seeds:
        try:
            ConsistencyWorld(seed, plan(seed), core_type).run()
        except AssertionError:
            return seed
    return None
