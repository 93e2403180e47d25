"""The kill matrix: which process is lost, how, and what makes up for it, with the required result of each cell.

A process ends at a fixed point of the training (``kill_points``), so each combination is exact and repeatable. The test
only adds what a user or a follower would do, such as restarting a process. Which cells run where is decided by the
callers.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from samebits.errors import FencedError
from samebits.training.process import sigterm
from tests.system.job import Job
from tests.system.kill_points import Way, mark_of
from tests.system.probe import FAILS, gate_of

WORKERS = 4
GATE = 20  # steps between two gates
LAST_GATE = 40
TRAINED = ("--steps", "60", "--interval", "10")
STOPPED_LEASE = {"HEARTBEAT_INTERVAL": "0.5", "NODE_TIMEOUT": "3"}
FIRST_SPARE = 10  # a node id that names no slot
MODELS = {"two at once, exception, restart": ("--model", "by-hand")}
"""Combinations that train another model, so that it needs no job of its own."""
STATUSES = {
    Way.KILL: {-signal.SIGKILL},
    Way.EXCEPTION: {1},
    Way.EXIT: {1},
    Way.TERM: {sigterm.STATUS},  # it has finished its step and left
    Way.STOP: {FencedError.exit_code, 0},  # when it is woken; 0: it returned as a spare or as one more rank
}
"""How a process ends that was lost in that way."""


class MadeUp(StrEnum):
    """What takes the place of the lost process."""

    SPARE = "spare"
    RESTART = "restart"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True)
class Who:
    """Which processes are lost, and where.

    Args:
        points: ``RANK:POINT[:NUMBER]`` of each loss, in order.
        first_is_killed: the first of them is lost by kill -9 in any case; the others' loss is the case.
        with_scheduler: it is killed (-9) before, and restarted when the worker is gone.
        with_spare: a spare is lost before, in the same way.
        while_growing: a node is added before.
    """

    name: str
    points: tuple[str, ...]
    first_is_killed: bool = False
    with_scheduler: bool = False
    with_spare: bool = False
    while_growing: bool = False

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of the losses, in order; until then a rank is its node's number."""
        return [int(point.partition(":")[0]) for point in self.points]


WHO = {
    who.name: who
    for who in (
        Who("rank 0", ("0:committed:25",)),
        Who("a middle rank", ("1:committed:25",)),
        Who("the last rank", ("3:committed:25",)),
        # Not after a commit: the second rank may get that step from a third and skip the point.
        Who("two at once", ("1:backward:25", "3:backward:25")),
        Who("all but one", ("0:backward:25", "2:backward:25", "3:backward:25")),
        Who("a spare, then a rank", ("2:committed:25",), with_spare=True),
        Who("scheduler and worker", ("2:committed:25",), with_scheduler=True),
        Who("another during the recovery", ("2:committed:25", "1:reset"), first_is_killed=True),
        Who("the successor during the recovery", ("2:committed:25", "2:receiving:2"), first_is_killed=True),
        Who("during growth", ("1:reset",), while_growing=True),
        Who("during the first step", ("1:backward:1",)),
    )
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    who: Who
    way: Way
    made_up: MadeUp

    @property
    def name(self) -> str:
        return f"{self.who.name}, {self.way}, {self.made_up}"

    @property
    def is_possible(self) -> bool:
        """A shrunk world has no successor."""
        return self.made_up is not MadeUp.SHRINK or len(set(self.who.ranks)) == len(self.who.points)

    @property
    def is_same_world(self) -> bool:
        """Return whether the final bits are those of the undisturbed run."""
        return self.made_up is not MadeUp.SHRINK and not self.who.while_growing

    @property
    def final_world_size(self) -> int:
        lost = len(self.who.points) if self.made_up is MadeUp.SHRINK else 0
        return WORKERS + self.who.while_growing - lost

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the probe's arguments that decide the bits."""
        return (*TRAINED, *MODELS.get(self.name, ()))

    def way_of(self, number: int) -> Way:
        """Return how the n-th process is lost, counted from 0."""
        return Way.KILL if self.who.first_is_killed and number == 0 else self.way

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the probe's arguments."""
        kills = []
        for number, point in enumerate(self.who.points):
            kills += ["--kill", f"{point}:{self.way_of(number)}"]
        return (*self.trained, "--pause-ms", "5", "--gates", str(GATE), *kills)

    @property
    def settings(self) -> Mapping[str, str]:
        """Return the job's settings."""
        spares = len(self.who.points) if self.made_up is MadeUp.SPARE else 0
        return {
            "REGISTER_COOLDOWN": "0",
            "SPARE_NUM": str(max(spares, int(self.who.with_spare))),
            **({"MIN_WORKER_NUM": "1", "GRACE": "shrink=0"} if self.made_up is MadeUp.SHRINK else {}),
            **({"MAX_WORKER_NUM": str(WORKERS + 1)} if self.who.while_growing else {}),
            **(STOPPED_LEASE if self.way is Way.STOP else {}),
        }


CELLS = {
    cell.name: cell
    for cell in (Cell(who, way, made_up) for who in WHO.values() for way in Way for made_up in MadeUp)
    if cell.is_possible
}

COVERING = [
    f"{who}, {way}, {made_up}"
    for who, way, made_up in (
        # Every row, every way at least three times, every replacement five times; every pair of the latter two.
        ("rank 0", Way.EXCEPTION, MadeUp.SHRINK),
        ("a middle rank", Way.TERM, MadeUp.SPARE),
        ("a middle rank", Way.STOP, MadeUp.RESTART),
        ("the last rank", Way.EXIT, MadeUp.SHRINK),
        ("two at once", Way.EXCEPTION, MadeUp.RESTART),
        ("all but one", Way.KILL, MadeUp.SHRINK),
        ("all but one", Way.EXIT, MadeUp.SPARE),
        ("a spare, then a rank", Way.STOP, MadeUp.SPARE),
        ("scheduler and worker", Way.TERM, MadeUp.RESTART),
        ("scheduler and worker", Way.STOP, MadeUp.SHRINK),
        ("another during the recovery", Way.EXCEPTION, MadeUp.SPARE),
        ("during growth", Way.KILL, MadeUp.RESTART),
        ("the successor during the recovery", Way.KILL, MadeUp.SPARE),
        ("during growth", Way.TERM, MadeUp.SHRINK),
        ("during the first step", Way.EXIT, MadeUp.RESTART),
    )
]


class Run:
    """One cell with real processes.

    Args:
        cell: what happens.
        job: not started, with the cell's arguments and settings.
    """

    def __init__(self, cell: Cell, job: Job) -> None:
        self._cell = cell
        self._job = job
        self._lost: dict[int, set[int]] = {}  # by node: how its process may end
        self._stopped: list[int] = []
        self._nodes = list(range(WORKERS))  # by rank

    def to_its_end(self) -> str:
        """Run the cell; return the final hash once everything has ended as it must.

        Raises:
            AssertionError: it has not.
        """
        cell, job = self._cell, self._job
        spares = [FIRST_SPARE + number for number in range(int(cell.settings["SPARE_NUM"]))]
        job.start()
        for node in spares:
            self._start_spare(node)
        for rank in range(WORKERS):
            job.wait_for(rank, "waits at the gate of step 0$")
        self._before(spares)
        self._open_gates()
        for number, rank in enumerate(cell.who.ranks):
            node = self._nodes[rank]
            self._wait_lost(node, number)
            if cell.made_up is MadeUp.RESTART:
                self._start_again(node)
            elif cell.made_up is MadeUp.SPARE:
                taken = job.wait_for("scheduler", rf"spare (\d+) \(.*takes slot \d+ of worker {node}\b")
                self._nodes[rank] = int(taken[1])
        self._let_go_on()
        self._require_ends()
        return job.sha256(cell.final_world_size)

    def _before(self, spares: list[int]) -> None:
        """Do what precedes the loss of a worker, while all wait at a gate."""
        job, who = self._job, self._cell.who
        if who.with_scheduler or who.while_growing:
            gate_of(job.folder, 0).touch()
            for rank in range(WORKERS):
                job.wait_for(rank, f"waits at the gate of step {GATE}$")
        if who.with_scheduler:
            job.scheduler.signal(signal.SIGKILL)
        if who.while_growing:
            job.start_worker(WORKERS)
            job.wait_for("scheduler", r"round 1\.2 opened")
        if who.with_spare:
            self._lose_spare(spares[0])

    def _open_gates(self) -> None:
        """Open all gates but the last, after which the job would end: a stopped process must find it alive."""
        for step in range(0, LAST_GATE, GATE):
            gate_of(self._job.folder, step).touch()

    def _start_spare(self, node: int) -> None:
        """Start a warm spare, or one that fails before it is warm if a spare is to be lost by its own error."""
        fails = self._cell.who.with_spare and self._cell.way in (Way.EXCEPTION, Way.EXIT)
        since = self._job.count(node)
        if fails and node not in self._lost:
            self._job.start_worker(node, **{FAILS: self._cell.way})
            self._job.wait_for(node, "seated: a spare", since=since)
        else:
            self._job.start_worker(node)
            self._job.wait_for(node, "this spare is warm", since=since)

    def _lose_spare(self, node: int) -> None:
        spare, way = self._job.worker(node), self._cell.way
        by_signal = {Way.KILL: signal.SIGKILL, Way.TERM: signal.SIGTERM, Way.STOP: signal.SIGSTOP}
        if way in by_signal:
            spare.signal(by_signal[way])
        self._job.wait_for("scheduler", rf"spare {node} \(pid {spare.pid}\b.*(is lost|left)|spare {node} left")
        if way is Way.STOP:
            spare.signal(signal.SIGKILL)
        self._job.wait_until(lambda: None if spare.is_alive() else True, f"end of spare {node}")
        self._lost[node] = {-signal.SIGKILL} if way is Way.STOP else STATUSES[way]
        if self._cell.made_up is MadeUp.SPARE:
            self._start_spare(node)
            self._lost[node] = {0}

    def _wait_lost(self, node: int, number: int) -> None:
        """Wait until the process has ended; for a stopped one, until its lease is over."""
        job, process = self._job, self._job.worker(node)
        way, point = self._cell.way_of(number), self._cell.who.points[number]
        job.wait_until(lambda: True if mark_of(job.folder, point).exists() else None, f"loss of worker {node}, {point}")
        if way is Way.STOP:
            job.wait_until(lambda: True if is_stopped(process.pid) else None, f"stop of worker {node}")
        else:
            job.wait_until(lambda: None if process.is_alive() else True, f"end of worker {node}")
        if self._cell.who.with_scheduler:
            job.scheduler.wait()
            job.start_scheduler()
        if way is Way.STOP:
            job.wait_for("scheduler", rf"worker {node} \(pid {process.pid}\b.*is lost")
            self._stopped.append(node)
        self._lost[node] = STATUSES[way]

    def _start_again(self, node: int) -> None:
        """Restart as a follower does: it ends a stopped process by its pid once the scheduler has declared it lost."""
        if node in self._stopped:
            self._job.worker(node).signal(signal.SIGKILL)
            self._job.worker(node).wait()
            self._stopped.remove(node)
        self._lost[node] = {0}
        self._job.start_worker(node)

    def _let_go_on(self) -> None:
        """Wake the stopped process after the others have resumed, and let them end when it has left or returned."""
        job = self._job
        if self._stopped:
            survivor = next(rank for rank in range(WORKERS) if rank not in self._cell.who.ranks)
            job.wait_for(survivor, f"waits at the gate of step {LAST_GATE}$")
        for node in self._stopped:
            job.worker(node).signal(signal.SIGCONT)
            job.wait_until(lambda node=node: self._is_out_or_back(node) or None, f"word of the woken worker {node}")
        gate_of(job.folder, LAST_GATE).touch()

    def _is_out_or_back(self, node: int) -> bool:
        came_back = "this spare is warm|this process registers again"
        return not self._job.worker(node).is_alive() or bool(self._job.matches(node, came_back))

    def _require_ends(self) -> None:
        """Check that all ended as they must, and that only lost processes were replaced."""
        job = self._job
        statuses = job.wait_ended()
        wrong = {
            name: status
            for name, status in statuses.items()
            if status not in (self._lost.get(name, {0}) if isinstance(name, int) else {0})
        }
        assert not wrong, f"exit statuses {wrong}\n{job.tails()}"
        again = [node for node in job.ranks if node not in self._lost and job.seatings(node) != 1]
        assert not again, f"survivors {again} were seated again\n{job.tails()}"


def is_stopped(pid: int) -> bool:
    """Read proc(5), field 3 of stat."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :].split()[0] == b"T"


def run(cell: Cell, job: Job, expected: Callable[[], str]) -> None:
    """Run the cell, and compare the bits if they must be equal."""
    sha256 = Run(cell, job).to_its_end()
    if cell.is_same_world:
        assert sha256 == expected(), f"{cell.name}: other bits than the undisturbed run's\n{job.tails()}"
