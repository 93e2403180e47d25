"""One job that repeatedly loses a rank to a warm spare, and the evaluation of its events.

After every loss all ranks train to a common step and pause there with a hash of their weights. Each recovery is thus
checked, and the next spare warms up without using the measured cores.
"""

from __future__ import annotations

import math
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from benchmarks.moments import Channel, Moment
from benchmarks.processes import Job, Stage, free_port, worker_module, worker_name
from benchmarks.workers.paced import ENDLESSLY, INTERVAL, PACE, Pace

WARM_WITHIN_S = 120.0
RECOVERED_WITHIN_S = 60.0
HANG_S = 5.0
"""A recovery that takes longer counts as a hang."""
STEPS_BEFORE = 5  # all ranks have made this many steps since they paused
LOSE_AFTER_S = (0.15, 0.25)
STEPS_TO_PAUSE = 10  # no rank gets this far before it reads the request to pause


@dataclass(frozen=True, slots=True)
class Loss:
    """One recovery: seconds from the signal to the last process that reached each point."""

    noticed_s: float
    """the first survivor knows, by its own collective or from the scheduler"""
    told_s: float
    """every survivor knows"""
    out_s: float
    """every survivor has left its collective"""
    dropped_s: float
    joined_s: float
    """every member has reported that it waits for the next generation, and its address"""
    placed_s: float
    formed_s: float
    obtained_s: float
    """every member holds the restore point, from its memory or over the group, and its DDP has the new group"""
    trains_s: float
    total_s: float
    """every rank has finished a step that no rank had finished before"""
    lost_steps: int
    """that a survivor had finished and had to repeat"""
    victims_steps: int
    """that only the lost process had finished"""

    @property
    def is_hang(self) -> bool:
        return self.total_s > HANG_S


def loss_from(moments: Sequence[Moment], lost_s: float, survivors: frozenset[int], newcomer: int) -> Loss:
    """Evaluate the events around one loss.

    Args:
        moments: in any order, from some steps before the loss on.
        lost_s: when the signal was sent.
        survivors, newcomer: pids of the survivors and of the new process.
    """
    members = survivors | {newcomer}
    by_name: dict[str, list[Moment]] = defaultdict(list)
    for moment in sorted(moments, key=lambda one: one.at_s):
        by_name[moment.name].append(moment)

    def of_each(pids: frozenset[int], names: Iterable[str], choose: Callable[[list[float]], float]) -> list[float]:
        """Return one time for every process that has passed this point since the loss."""
        times: dict[int, list[float]] = defaultdict(list)
        for one in (one for name in names for one in by_name[name]):
            if one.at_s > lost_s and one.pid in pids:
                times[one.pid].append(one.at_s)
        return [choose(sorted(of_one)) for of_one in times.values()]

    def first(values: list[float]) -> float:
        return values[0]

    def last(values: list[float]) -> float:
        return values[-1]

    told = of_each(survivors, ("told", "failed"), first)
    out_s = max(of_each(survivors, ("failed",), first))
    stepped = by_name["stepped"]
    highest = {pid: max(one.step or 0 for one in stepped if one.pid == pid and one.at_s <= out_s) for pid in survivors}
    highest_of_all = max(one.step or 0 for one in stepped if one.at_s <= out_s)
    trains = [one for one in by_name["trains"] if one.at_s > out_s and one.pid in members]
    restored = min(one.step or 0 for one in trains)
    firsts_of_a_new = {
        pid: min(one.at_s for one in stepped if one.pid == pid and (one.step or 0) > highest_of_all) for pid in members
    }
    points_s = {
        "noticed_s": min(told),
        "told_s": max(told),
        "out_s": out_s,
        "dropped_s": max(of_each(survivors, ("dropped",), first)),
        "joined_s": max(of_each(members, ("enters", "joins"), last)),
        "placed_s": max(of_each(members, ("placed",), last)),
        "formed_s": max(of_each(members, ("formed",), last)),
        "obtained_s": max(of_each(members, ("obtained",), last)),
        "trains_s": max(one.at_s for one in trains),
        "total_s": max(firsts_of_a_new.values()),
    }
    return Loss(
        **{name: at_s - lost_s for name, at_s in points_s.items()},
        lost_steps=max(0, max(highest.values()) - restored),
        victims_steps=max(0, highest_of_all - max(restored, *highest.values())),
    )


@dataclass(frozen=True, slots=True)
class Account:
    """The steps of one job, over all its processes."""

    last_step: int
    repeated_steps: int
    """that a process finished although it had already finished the same or a later step"""
    skipped_steps: int
    """that no process finished"""


def account(moments: Iterable[Moment]) -> Account:
    """Count the steps in all events of a job; a step counts as finished, too, if a process resumes from it."""
    reached: dict[int, int] = {}
    done: set[int] = set()
    repeated = 0
    for moment in sorted(moments, key=lambda one: one.at_s):
        if moment.step is None or moment.name not in ("stepped", "trains"):
            continue
        if moment.name == "stepped" and moment.step <= reached.get(moment.pid, 0):
            repeated += 1
        done.add(moment.step)
        reached[moment.pid] = max(moment.step, reached.get(moment.pid, 0))
    last = max(done, default=0)
    return Account(last, repeated, len(set(range(1, last + 1)) - done))


def step_ms(moments: Iterable[Moment]) -> float:
    """Return the median time between two consecutive steps of one process."""
    between: list[float] = []
    last: dict[int, Moment] = {}
    for moment in sorted(moments, key=lambda one: one.at_s):
        if moment.name != "stepped":
            continue
        before = last.get(moment.pid)
        if before is not None and before.step is not None and moment.step == before.step + 1:
            between.append(moment.at_s - before.at_s)
        last[moment.pid] = moment
    return statistics.median(between) * 1e3 if between else math.nan


class LossyJob:
    """A job of ours and its spare, from start to end; all its events are kept.

    Args:
        world_size: number of ranks.
        has_spare: whether a spare takes a lost rank's place; otherwise the lost node is restarted at once.
        variables: added to the environment of all its processes.
    """

    def __init__(self, world_size: int, *, has_spare: bool = True, **variables: str) -> None:
        self._stage = Stage()
        self._world_size = world_size
        self._has_spare = has_spare
        self._job = Job(self._stage, "recovery", world_size, **_spare_num(has_spare), **variables)
        self._pace = Pace(self._stage.folder / "pace")
        self._job.variables.update({PACE: str(self._pace.path), INTERVAL: "100"})
        self._nodes = list(range(world_size))  # by rank
        self._pids: dict[int, int] = {}  # by node
        self._spare = world_size
        self.moments: list[Moment] = []
        self.digests: dict[int, str] = {}
        """the hash of all ranks' weights at each pause, by step"""

    def __enter__(self) -> LossyJob:
        """Start everything; return when the job pauses for the first time and the spare is warm."""
        try:
            self._pace.last_step = STEPS_TO_PAUSE
            self._job.start_scheduler()
            for node in self._nodes:
                self._start(node)
            self._wait_for_pause(WARM_WITHIN_S)
            if self._has_spare:
                self._start_spare()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stage.__exit__(kind, error, at)

    def lose(self, number: signal.Signals, rng: random.Random) -> Loss:
        """Signal a random rank at a random time; return when all ranks pause again, with the next spare warm.

        Raises:
            TimeoutError: the job did not recover.
            AssertionError: the weights of the ranks differ.
        """
        rank, channel = rng.randrange(self._world_size), self._stage.channel
        self._train_for_a_while(rng)
        node, newcomer = self._nodes[rank], self._spare
        survivors = frozenset(self._pids[one] for one in self._nodes if one != node)
        lost_s = time.monotonic()
        if number is signal.SIGKILL:
            self._stage.end(worker_name(node))
        else:
            self._stage.signal(worker_name(node), number)
        if not self._has_spare:
            newcomer = node
            self._start(node)
        pid = self._pids[newcomer]

        def recovered() -> bool:
            left = channel.select("failed", since_s=lost_s, pids=survivors)
            if len({one.pid for one in left}) < len(survivors) or pid not in channel.reached:
                return False
            out_s = max(one.at_s for one in left)
            highest = max(one.step or 0 for one in channel.select("stepped") if one.at_s <= out_s)
            return all(channel.reached[one] > highest for one in survivors | {pid})

        channel.wait_for(recovered, RECOVERED_WITHIN_S, f"the recovery of rank {rank} (node {node}, {number.name})")
        self._nodes[rank] = newcomer
        self._wait_for_pause(RECOVERED_WITHIN_S)
        if number is not signal.SIGKILL:
            self._stage.end(worker_name(node))
        loss = loss_from(channel.moments, lost_s, survivors, pid)
        if self._has_spare:
            self._spare = node
            self._start_spare()
        self.moments += channel.take()
        return loss

    def logs(self) -> str:
        """Return the end of every log."""
        return self._stage.logs()

    def step_ms(self) -> float:
        """Return the median step time over all processes; recoveries and pauses are too rare to affect it."""
        return step_ms(self.moments)

    def _train_for_a_while(self, rng: random.Random) -> None:
        """Wait until a random time shortly after every rank trains again."""
        channel, members = self._stage.channel, [self._pids[one] for one in self._nodes]
        begins = self._pace.last_step
        self._pace.last_step = ENDLESSLY
        channel.wait_for(
            lambda: all(channel.reached.get(pid, 0) >= begins + STEPS_BEFORE for pid in members),
            RECOVERED_WITHIN_S,
            f"every rank training beyond step {begins}",
        )
        time.sleep(rng.uniform(*LOSE_AFTER_S))
        channel.drain()

    def _wait_for_pause(self, within_s: float) -> None:
        """Let all ranks pause soon; return when they have made their last step and reported their weights."""
        channel = self._stage.channel
        members = frozenset(self._pids[one] for one in self._nodes)

        def pauses() -> dict[int, str | None]:
            step = self._pace.last_step
            return {one.pid: one.text for one in channel.select("pauses", pids=members) if one.step == step}

        def pause() -> bool:
            highest = max(channel.reached.get(pid, 0) for pid in members)
            if not highest <= self._pace.last_step < ENDLESSLY:  # even if some read it too late
                self._pace.last_step = highest + STEPS_TO_PAUSE
            return pauses().keys() == members

        channel.wait_for(pause, within_s, f"a pause of all ranks of {sorted(members)}")
        digests, step = {one or "" for one in pauses().values()}, self._pace.last_step
        assert len(digests) == 1, f"the ranks' weights differ after step {step}: {pauses()}"
        self.digests[step] = digests.pop()

    def _start(self, node: int) -> None:
        self._pids[node] = self._job.start_worker(node).pid

    def _start_spare(self) -> None:
        """Start the next spare, and return when it waits."""
        self._start(self._spare)
        channel, pid = self._stage.channel, frozenset({self._pids[self._spare]})
        channel.wait_for(lambda: bool(channel.select("enters", pids=pid)), WARM_WITHIN_S, "the spare being warm")


def _spare_num(has_spare: bool) -> dict[str, str]:
    return {"SPARE_NUM": "1"} if has_spare else {}


def undisturbed(world_size: int, last_step: int, *, plain: bool = False, **variables: str) -> str:
    """Return the hash of the weights after that step of a run without losses: ours, or stock DDP's.

    Args:
        world_size, last_step: the run's world size and last step.
            plain: whether to run stock DDP.
            variables: added to the environment of all processes.
    """
    with Stage() as stage:
        pace = Pace(stage.folder / "pace")
        pace.last_step = last_step
        paced = {PACE: str(pace.path), INTERVAL: "100", **variables}
        if plain:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
            for rank in range(world_size):
                variables = {**paced, **shared, "RANK": str(rank)}
                stage.start(worker_name(rank), [*worker_module("recovery"), "plain"], variables)
        else:
            job = Job(stage, "recovery", world_size, **paced)
            job.start_scheduler()
            for rank in range(world_size):
                job.start_worker(rank)
        return _common_digest(stage.channel, world_size, last_step)


def _common_digest(channel: Channel, world_size: int, last_step: int) -> str:
    within_s = WARM_WITHIN_S + last_step * 1.0
    channel.wait_for(lambda: len(channel.select("pauses")) == world_size, within_s, f"the pause after step {last_step}")
    digests = {one.text or "" for one in channel.select("pauses")}
    assert len(digests) == 1, f"the weights of an undisturbed run differ after step {last_step}: {digests}"
    return digests.pop()
