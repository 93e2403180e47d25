"""Time, chance and everything that exists in one run; the checkers' places to watch from.

A run has two parts. First faults happen, and safety is checked after every event. Then they stop (``calm``): every
process is woken or started, no message is lost, and the job must come together and end within stated bounds.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runtime.core.agent_events import Notice
from runtime.core.ledger import Policy
from runtime.core.messages import EndKind, FromScheduler
from runtime.core.ready import Ready
from runtime.core.records import Record
from runtime.core.scheduler import Event, SchedulerCore
from tests.simulation.checkers.witness import Witness
from tests.simulation.disk import Checkpoints
from tests.simulation.faults import Faults, Mix
from tests.simulation.group import Group, Groups
from tests.simulation.network import Network
from tests.simulation.operator import Operator
from tests.simulation.scheduler_host import SchedulerHost
from tests.simulation.trace import Trace, Violation
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.checkers import Checker

MOST_EVENTS = 400_000
MOST_AT_ONE_MOMENT = 5_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run that kept every promise amounted to."""

    seed: int
    events: int
    simulated_s: float
    generations: int
    terms: int
    faults: Counter[str]


class World:
    """One run. Everything that happens is an action on the agenda; ties are broken by order of planning."""

    def __init__(
        self,
        seed: int,
        *,
        changes: Mapping[str, Any] | None = None,
        core_type: type[SchedulerCore] = SchedulerCore,
        checkers: list[type[Checker]] | None = None,
        whole_trace: bool = False,
    ) -> None:
        from tests.simulation.checkers import ALL

        self.seed = seed
        self.rng = random.Random(seed)
        self.mix = replace(Mix.draw(self.rng), **(changes or {}))  # what a test wants otherwise than drawn
        self.core_type = core_type
        self.policy = Policy(
            self.mix.world_size,
            "train.py",
            (("WORKER_NUM", str(self.mix.world_size)),),
            cool_down_s=self.mix.cool_down_s,
            topo_timeout_s=self.mix.topo_timeout_s,
        )
        self.now = 0.0
        self.is_calm = False
        self.events = 0
        self.trace = Trace(whole=whole_trace)
        self.note: Callable[..., None] = self._note
        self.happened: Counter[str] = Counter()
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0
        self._disks: dict[str, Checkpoints] = {}
        self.workers: list[Worker] = []  # alive
        self.started: list[Worker] = []  # ever
        self.watch_loaded: list[Callable[[SchedulerCore], None]] = []
        self.watch_event: list[Callable[[Event], None]] = []
        self.watch_decided: list[Callable[[Event | None, Ready], None]] = []
        self.watch_echo: list[Callable[[Event, Ready], None]] = []
        self.watch_durable: list[Callable[[list[Record]], None]] = []
        self.watch_said: list[Callable[[str, FromScheduler], None]] = []
        self.watch_agent: list[Callable[[Worker], None]] = []
        self.watch_notice: list[Callable[[Worker, Notice], None]] = []
        self.watch_trained: list[Callable[[Group], None]] = []
        self.watch_calm: list[Callable[[], None]] = []
        self.host = SchedulerHost(self)
        self.network = Network(self, self.mix)
        self.groups = Groups(self)
        self.witness = Witness(self)
        self.checkers = [checker(self) for checker in (ALL if checkers is None else checkers)]
        self.operator = Operator(self)
        self.faults = Faults(self)
        self.after(self.mix.chaos_s, self._calm_down)

    # ---- time

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action."""
        self._planned += 1
        heapq.heappush(self._agenda, (when, self._planned, action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action, from now."""
        self.at(self.now + delay_s, action, *arguments)

    def run(self) -> Outcome:
        """To the job's end; raises :class:`Violation`, also for a core that breaks down."""
        try:
            self._run()
        except Violation:
            raise
        except Exception as error:
            raise Violation("crash", f"{type(error).__name__}: {error}") from error
        state = self.host.journal.load(compact=False)
        return Outcome(self.seed, self.events, self.now, state.generation_number, state.term, self.happened)

    def _run(self) -> None:
        agenda, at_this_moment = self._agenda, 0
        while not self.is_over():
            when, _, action, arguments = heapq.heappop(agenda)
            at_this_moment = at_this_moment + 1 if when == self.now else 0
            self.now = when
            self.events += 1
            action(*arguments)
            if at_this_moment > MOST_AT_ONE_MOMENT or self.events > MOST_EVENTS:
                raise Violation("L0", f"no end of events: {self.events}, {at_this_moment} of them at one moment")

    def is_over(self) -> bool:
        """The job is finished and every process has ended."""
        return self.host.ended is EndKind.FINISHED and self.host.core is None and not self.workers

    def _calm_down(self) -> None:
        self.note("calm", "faults stop")
        self.is_calm = True
        self.network.calm_down()
        self.operator.calm_down()
        for watch in self.watch_calm:
            watch()

    # ---- what there is

    def checkpoints_of(self, node: str) -> Checkpoints:
        """The node's disk; it survives its processes."""
        if node not in self._disks:
            self._disks[node] = Checkpoints(self.mix.keep)
        return self._disks[node]

    def start_worker(self, node: str) -> Worker:
        """A new process of this node."""
        worker = Worker(self, node, len(self.started) + 1)
        self.note("worker", worker, "is started")
        self.workers.append(worker)
        self.started.append(worker)
        return worker

    def worker_gone(self, worker: Worker) -> None:
        """The process is no more."""
        self.workers.remove(worker)

    def scheduler_left(self) -> None:
        """The scheduler's process ended by itself."""
        self.count(f"job {self.host.ended.name.lower()}" if self.host.ended else "scheduler left")

    # ---- for those who read it later

    def _note(self, kind: str, *what: Any) -> None:
        self.trace.add(self.now, kind, *what)

    def count(self, kind: str) -> None:
        """One more of these happened."""
        self.happened[kind] += 1
