"""Time, random numbers and all objects of one run, with the checkers' observation points.

A run has two parts. First faults happen, and safety is checked after every event. Then they stop (``calm``): every
process is woken or started, no message is lost, and the job must come together and end within stated bounds.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samebits.core.agent.agent_core import AgentCore
from samebits.core.end_kinds import EndKind
from samebits.core.ledger import Policy
from samebits.core.membership.replacement_proofs import TOKEN_BYTES
from samebits.core.ready import Ready
from samebits.core.records import JobRebuilt, Record
from samebits.core.scheduler import SchedulerCore, SchedulerEvent
from tests.simulation.checkers.witness import Witness
from tests.simulation.checkpoints import Checkpoints
from tests.simulation.copies import Copies
from tests.simulation.driver import Driver
from tests.simulation.faults import Faults, Planned, draw_schedule
from tests.simulation.group import Groups
from tests.simulation.keys import Keys
from tests.simulation.mix import Mix
from tests.simulation.network import Network
from tests.simulation.odd_states import OddStates
from tests.simulation.operator import Operator
from tests.simulation.patience import Patience
from tests.simulation.places import Places
from tests.simulation.scheduler_host import SchedulerHost
from tests.simulation.trace import Trace, Violation
from tests.simulation.unwell import Unwell
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.checkers import Checker

MOST_EVENTS = 400_000
MOST_AT_ONE_MOMENT = 5_000
TOKEN = b"t" * TOKEN_BYTES

JOB_NAME = "train.py"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run that kept every promise."""

    seed: int
    events: int
    simulated_s: float
    generations: int
    terms: int
    faults: Counter[str]


class World(Places):
    """One run. Everything that happens is an action on the agenda; ties are broken by order of planning.

    Args:
        seed: determines everything.
        changes: overrides of the drawn mix.
        leave_out: numbers of planned faults to omit; the minimiser varies it.
        core_type, agent_type: what a mutant replaces.
        checkers: all by default.
        traced: keep all events for a reader; costs time, changes nothing.
    """

    def __init__(
        self,
        seed: int,
        *,
        changes: Mapping[str, Any] | None = None,
        leave_out: Collection[int] = (),
        core_type: type[SchedulerCore] = SchedulerCore,
        agent_type: type[AgentCore] = AgentCore,
        checkers: Sequence[type[Checker]] | None = None,
        traced: bool = False,
    ) -> None:
        from tests.simulation.checkers import ALL

        super().__init__()
        self.seed = seed
        self.rng = random.Random(seed)
        self.mix = Mix.draw(self.rng).drawn_later(self.random_of).changed(changes or {})
        self.schedule: list[Planned] = draw_schedule(self.mix, self.random_of("schedule"))
        self.core_type, self.agent_type = core_type, agent_type
        self.policy = Policy(
            self.mix.world_size,
            JOB_NAME,
            (("WORKER_NUM", str(self.mix.world_size)),),
            cool_down_s=self.mix.cool_down_s,
            reconnect_grace_s=self.mix.reconnect_grace_s,
            topo_timeout_s=self.mix.topo_timeout_s,
            rebuild=self.mix.rebuilds,
            reset_limit=self.mix.reset_limit,
            min_world_size=min(self.mix.min_world_size, self.mix.world_size),
            max_world_size=max(self.mix.max_world_size, self.mix.world_size),
            spare_num=self.mix.spare_num,
            start_grace_s=self.mix.start_grace_s,
            shrink_grace_s=self.mix.shrink_grace_s,
            token=TOKEN if self.mix.replaces else b"",
            step_timeout_s=self.mix.step_timeout_s,
            ends_stuck=self.mix.ends_stuck,
        )
        self.now = 0.0
        self.is_calm = False
        self.events = 0
        self.wipes = 0
        self.forged: set[str] = set()  # forged sessions that claimed to be started by a launcher
        self.trace = Trace()
        self.note: Callable[..., None] = self._note if traced else _note_nothing
        self.happened: Counter[str] = Counter()
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0
        self._disks: dict[tuple[str, str], Checkpoints] = {}
        self.workers: list[Worker] = []  # alive
        self.started: list[Worker] = []  # ever
        self.host = SchedulerHost(self)
        self.network = Network(self, self.mix)
        self.groups = Groups(self)
        self.copies = Copies(self)
        self.odd_states = OddStates(self)
        self.unwell = Unwell(self)
        self.driver = Driver(self)
        self.keys = Keys(self)
        self.witness = Witness(self)
        self.patience = Patience(self)
        self.checkers = [checker(self) for checker in (ALL if checkers is None else checkers)]
        self.operator = Operator(self)
        self.faults = Faults(self, [planned for planned in self.schedule if planned.number not in leave_out])
        self.after(self.mix.chaos_s, self._calm_down)

    @property
    def launched_job(self) -> str:
        """Return the id that a launcher gives to a process that it starts now; empty without a launcher."""
        return (self.witness.job or "launched") if self.mix.launched else ""

    def random_of(self, what: str) -> random.Random:
        """Return separate random numbers, unaffected by draws elsewhere."""
        return random.Random(f"{self.seed}/{what}")

    # ---- time

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action."""
        self._planned += 1
        heapq.heappush(self._agenda, (when, self._planned, action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action, from now."""
        self._planned += 1
        heapq.heappush(self._agenda, (self.now + delay_s, self._planned, action, arguments))

    def run(self) -> Outcome:
        """Run to the job's end; raise :class:`Violation`, also for a core that crashes."""
        try:
            self._run()
            for watch in self.watch_end:
                watch()
        except Violation:
            raise
        except Exception as error:
            raise Violation("crash", f"{type(error).__name__}: {error}") from error
        witness = self.witness
        return Outcome(self.seed, self.events, self.now, witness.generations, witness.terms, self.happened)

    def _run(self) -> None:
        agenda, at_this_moment, pop = self._agenda, 0, heapq.heappop
        while self.workers or not self.is_over():
            when, _, action, arguments = pop(agenda)
            if when > self.now:
                self.now, at_this_moment = when, 0
            at_this_moment += 1
            self.events += 1
            action(*arguments)
            if at_this_moment > MOST_AT_ONE_MOMENT or self.events > MOST_EVENTS:
                raise Violation("L0", f"no end of events: {self.events}, {at_this_moment} of them at one moment")

    def is_over(self) -> bool:
        """The job is finished and every process has ended."""
        return not self.workers and self.host.core is None and self.host.ended is EndKind.FINISHED

    def _calm_down(self) -> None:
        self.note("calm", "faults stop")
        self.is_calm = True
        self.host.path.disk.put_out_fuse()
        if self.host.path.quorum is not None:
            self.host.path.quorum.calm_down()
        self.network.calm_down()
        self.odd_states.calm_down()
        self.unwell.calm_down()
        self.driver.calm_down()
        self.operator.calm_down()
        for watch in self.watch_calm:
            watch()

    # ---- objects

    def happens(self, event: SchedulerEvent) -> None:
        """An event is about to be handed to the core."""
        self.note("decides", event)
        for watch in self.when_event.get(type(event), ()):
            watch(event)

    def decided(self, event: SchedulerEvent | None, ready: Ready) -> None:
        """The core has processed an event (None: its start); nothing of it is durable or sent yet."""
        self.witness.decided(event, ready)
        for watch in self.when_decided.get(type(event), ()):
            watch(event, ready)
        if ready.is_empty:
            return
        for watch in self.watch_decided:
            watch(event, ready)
        for record in ready.records:
            for watch_record in self.when_recorded.get(type(record), ()):
                watch_record(event, record)
        for send in ready.sends:
            for watch_answer in self.when_answered.get(type(send.message), ()):
                watch_answer(send.session, send.message)

    def became_durable(self, records: list[Record]) -> None:
        """These records, decided together, are on the disk."""
        for watch in self.watch_durable:
            watch(records)
        for record in records:
            self.note("durable", record)
            for watch_record in self.when_durable.get(type(record), ()):
                watch_record(record)

    def checkpoints_of(self, job: str, node: str) -> Checkpoints:
        """Return the job's folder on the node's disk, which survives its processes."""
        disk = self._disks.get((job, node))
        if disk is None:
            disk = self._disks[job, node] = Checkpoints(self.mix.keep)
        return disk

    def start_worker(self, node: str, **how: Any) -> Worker:
        """Start a new process of this node."""
        worker = Worker(self, node, len(self.started) + 1, **how)
        self.note("worker", worker, "is started")
        self.workers.append(worker)
        self.started.append(worker)
        return worker

    def worker_gone(self, worker: Worker) -> None:
        """The process has ended."""
        self.workers.remove(worker)

    def wipe_recovery_path(self) -> None:
        """The journal is deleted while no scheduler runs; another job follows, or the same one rebuilt."""
        self.note("fault", "the recovery path is wiped")
        self.wipes += 1
        self.host.path.wipe()
        self.witness.lose_journal()
        self.patience.begin_job()
        for checker in self.checkers:
            checker.begin_job()
        self.keys.wipe()

    def rebuilt(self, record: JobRebuilt) -> None:
        """An earlier job restarts from its workers' reports."""
        self.forget_job()
        self.witness.rebuilt(record)
        for checker in self.checkers:
            checker.rebuilt(record)
        self.count("job rebuilt from its workers")

    def forget_job(self) -> None:
        """Clear all books."""
        self.witness.forget()
        self.patience.begin_job()
        for checker in self.checkers:
            checker.begin_job()
        self.keys.begin_job()

    def lose_every_disk(self) -> None:
        """All checkpoint directories are gone, and the copies in memory."""
        for disk in self._disks.values():
            disk.lose()
        for host in {worker.process.host for worker in self.workers}:
            self.copies.lose(host)

    def _recover_lost_points(self) -> None:
        """Bring the lost checkpoints back, as the refusal says, or give the job up if there are none."""
        found = [disk.bring_back() for (job, _), disk in self._disks.items() if job == self.witness.job]
        if any(found):
            self.count("lost points brought back")
        else:
            self.wipe_recovery_path()
            self.count("lost points given up")

    def scheduler_left(self) -> None:
        """The scheduler's process ended by itself."""
        if self.host.ended is EndKind.POINTS_LOST:
            self._recover_lost_points()
        self.count(f"job {self.host.ended.name.lower()}" if self.host.ended else "scheduler left")

    # ---- for a later reader

    def _note(self, kind: str, *what: Any) -> None:
        self.trace.add(self.now, kind, *what)

    def count(self, kind: str) -> None:
        """Count one more of these events."""
        self.happened[kind] += 1


def _note_nothing(kind: str, *what: Any) -> None:
    """Most runs pass and are never read; a failing one is repeated with a trace."""
