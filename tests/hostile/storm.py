"""A real job of a few workers under all attacks at once: it must be unaffected.

``python -m tests.hostile.storm --seconds 60`` runs it without and with a secret, each beside an undisturbed run, prints
its progress every few seconds, and prints one JSON object as its last line. ``besiegers`` has the attacks. The job's
processes must stay the same, its final weights be those of the undisturbed run, no foreign process be signalled, and
its steps be about as fast. Then, still under attack, a worker is killed and restarted and takes its seat, and the job
finishes: its scheduler and every worker end while strangers keep connecting.

The speed has a floor, since the attackers take this machine's CPU whatever they attack. So after each part of the storm
they attack bare sockets (``bare_target``) at the same rate beside the same training; what the job loses beyond that is
the cost of our code.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from samebits import config
from samebits.store.process_identity import ProcessIdentity
from tests.hostile.besiegers import Target
from tests.hostile.outside import assert_unsignalled, cpu_seconds, ports_of, resident_mib, steps_between, witness
from tests.system.job import Job
from tests.system.processes import REPOSITORY, Starter, WarmStarter, environment_of_tests

SECRET = "correct-horse-battery-staple"
PAUSE_MS = 30
ENDLESS = 10**9
STEPS_TO_THE_END = 60
"""The number of steps after which the job is to end; no rank is that far ahead of rank 0's output."""
CALM_S = 5.0
ROUNDS = 3
"""How often the job runs undisturbed, in the storm and beside the floor, with the latter two in alternating order."""
WANTED_SPEED = 0.95
"""Required ratio of steps/s in the storm to those of the floor."""
MOST_GROWTH_MIB = 128.0
"""Limit on the scheduler's memory: far above what a thousand connections need, far below unbounded growth."""
FINISH_S = 300.0
TELL_S = 5.0
MODES: Mapping[str, Mapping[str, str]] = {"open": {}, "secret": {"CLUSTER_SECRET": SECRET}}


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements."""

    mode: str
    seconds: float
    workers: int
    speed: float  # steps/s in the storm ÷ undisturbed
    floor: float  # steps/s beside attacked bare sockets ÷ undisturbed
    ratio: float  # of these two
    calm_steps_a_second: float
    scheduler_cpu: float  # cores that it takes in the storm
    bare_cpu: float  # cores that the bare sockets' process takes
    scheduler_mib: int  # maximum memory
    scheduler_mib_before: int
    worker_mib: int
    came: Mapping[str, int]
    came_to_floor: Mapping[str, int]
    came_at_end: Mapping[str, int]
    ended_after_s: float  # from the last step to the last process's end
    ports: int  # that the other processes listen on

    def shown(self) -> dict[str, object]:
        """Return the object of the last line."""
        return {name: getattr(self, name) for name in self.__match_args__}


def run(
    mode: str,
    seconds: float,
    workers: int,
    folder: Path,
    starter: Starter,
    say: Callable[[str], object] = str,
    *,
    calm_s: float = CALM_S,
    rounds: int = ROUNDS,
) -> Result:
    """Run one job through a storm.

    Args:
        mode: one of ``MODES``.
        seconds: duration of the storm, and of the floor.
        folder: empty.
        say: receives progress.
        calm_s: undisturbed time before each round.
        rounds: the rounds of calm, floor and storm; each has its part of ``seconds``.

    Raises:
        AssertionError: the job was affected.
    """
    settings = {"LOG_DIR": "device", **MODES[mode]}

    def new_job(name: str, steps: int, pause_ms: int) -> Job:
        (folder / name).mkdir()
        args = ("--steps", str(steps), "--interval", "50", "--pause-ms", str(pause_ms))
        return Job(folder / name, starter, args=args, workers=workers, settings=settings)

    job = new_job("storm", ENDLESS, PAUSE_MS)
    try:
        with witness() as bystander:
            siege = _Siege(job, mode, bystander, say)
            for number in range(rounds):
                siege.watch_calm(calm_s)
                ways = [siege.watch_storm, siege.watch_floor]
                for watch in ways if number % 2 == 0 else reversed(ways):
                    watch(seconds / rounds)
            last_step, found = siege.end()
            assert_unsignalled(bystander)
    finally:
        left = job.end()
    assert not left, f"left behind: {left}"
    calm = new_job("calm", last_step, 0)
    say(f"{mode}: an undisturbed run of {last_step} steps, to compare with")
    try:
        calm.start()
        expected = calm.wait_finished(FINISH_S)
    finally:
        calm.end()
    assert found == expected, f"the storm changed the weights: {found}, undisturbed {expected}"
    return siege.result(seconds)


@dataclass(slots=True)
class _Phase:
    """One of the conditions under which the training is observed, over all rounds."""

    name: str
    steps: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the process under attack
    wall_s: float = 0.0
    besieged_s: float = 0.0
    came: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / max(self.seconds, 0.1)


class _Siege:
    """A job observed undisturbed, in the storm, and beside the floor, and then ended.

    Args:
        job: not started.
        bystander: a foreign process that the attackers name.
        say: receives progress.
    """

    def __init__(self, job: Job, mode: str, bystander: ProcessIdentity, say: Callable[[str], object]) -> None:
        self.job, self.mode, self.say = job, mode, say
        job.start()
        job.wait_for_step(20)
        self.processes = [job.scheduler.identity, *(job.worker(rank).identity for rank in job.ranks)]
        self.held = self._resident()
        self.most = list(self.held)
        self.others = sorted({port for rank in job.ranks for port in ports_of(job.worker(rank).pid)} - {job.port})
        self.target = _target_of(job, self.others, [*self.processes, bystander])
        self.calm, self.floor, self.storm = _Phase("calm"), _Phase("floor"), _Phase("storm")
        self.last = _Phase("the job's end")
        self.ended_after_s = 0.0

    def watch_calm(self, seconds: float) -> None:
        """Observe without attacks."""
        self._watch(self.calm, seconds, self.processes[0].pid)

    def watch_storm(self, seconds: float) -> None:
        """Let the attackers attack the job as fast as they can."""
        with besieged(self.target, self.storm):
            self._watch(self.storm, seconds, self.processes[0].pid)
        assert not self.job.matches("scheduler", "generation 2"), f"the job was affected\n{self.job.tails()}"
        before, most = self.held[0], self.most[0]
        assert most - before <= MOST_GROWTH_MIB, f"the scheduler grew from {before:.0f} to {most:.0f} MiB"

    def watch_floor(self, seconds: float) -> None:
        """Let them attack bare sockets at the rate of the storm so far."""
        turns_a_second = {kind: count / self.storm.besieged_s for kind, count in self.storm.came.items()}
        with bare_target(self.mode, len(self.others)) as (pid, ports):
            target = replace(self.target, port=ports[0], others=ports[1:], turns_a_second=turns_a_second)
            with besieged(target, self.floor):
                self._watch(self.floor, seconds, pid)

    def end(self) -> tuple[int, str]:
        """Lose and restart a worker under attack, then let the job finish; return its last step and its sha256."""
        job = self.job
        with besieged(self.target, self.last):
            lose_one(job, self.say)
            assert self.processes[0].is_alive(), f"the scheduler ended\n{job.tails()}"
            last_step = job.steps(0)[-1].number + STEPS_TO_THE_END
            job.end_at(last_step)
            found = job.wait_finished()
            ended_s = time.monotonic()
        self.ended_after_s = ended_s - job.steps(0)[-1].at_s
        self.say(f"the job ended within {self.ended_after_s:.1f} s of its last step while the attacks continued")
        return last_step, found

    def result(self, seconds: float) -> Result:
        """Return all figures; ``seconds``: of the storm."""
        calm, floor, storm = self.calm, self.floor, self.storm
        return Result(
            self.mode,
            seconds,
            self.job.workers,
            speed=round(storm.rate / calm.rate, 3),
            floor=round(floor.rate / calm.rate, 3),
            ratio=round(storm.rate / floor.rate, 3),
            calm_steps_a_second=round(calm.rate, 1),
            scheduler_cpu=round(storm.cpu_s / storm.wall_s, 3),
            bare_cpu=round(floor.cpu_s / floor.wall_s, 3),
            scheduler_mib=round(self.most[0]),
            scheduler_mib_before=round(self.held[0]),
            worker_mib=round(max(self.most[1:])),
            came=storm.came,
            came_to_floor=floor.came,
            came_at_end=self.last.came,
            ended_after_s=round(self.ended_after_s, 1),
            ports=len(self.others),
        )

    def _watch(self, phase: _Phase, seconds: float, target_pid: int) -> None:
        """Observe training and processes for this time; ``target_pid``: the process under attack."""
        begin_s = told_s = time.monotonic()
        cpu_before_s = cpu_seconds(target_pid)
        while time.monotonic() < begin_s + seconds:
            time.sleep(0.1)
            gone = [identity.pid for identity in self.processes if not identity.is_alive()]
            assert not gone, f"processes {gone} ended in the {phase.name}\n{self.job.tails()}"
            self.most = [max(pair) for pair in zip(self.most, self._resident(), strict=True)]
            if time.monotonic() >= told_s + TELL_S:
                told_s = time.monotonic()
                count, took_s = steps_between(self.job, told_s - TELL_S, told_s)
                where = f"step {self.job.steps(0)[-1].number}, {count / max(took_s, 0.1):.1f} steps/s"
                have = f"the scheduler has {self.most[0]:.0f} MiB"
                self.say(f"{self.mode}, {phase.name}: {told_s - begin_s:.0f}/{seconds:.0f} s, {where}, {have}")
        end_s = time.monotonic()
        count, took_s = steps_between(self.job, begin_s, end_s)
        phase.steps, phase.seconds = phase.steps + count, phase.seconds + took_s
        phase.wall_s += end_s - begin_s
        phase.cpu_s += cpu_seconds(target_pid) - cpu_before_s

    def _resident(self) -> list[float]:
        return [resident_mib(one.pid) for one in self.processes]


def lose_one(job: Job, say: Callable[[str], object]) -> None:
    """Kill and restart a worker while strangers hold every place they can get."""
    rank, before = job.workers - 1, job.count(job.workers - 1)
    begin_s = time.monotonic()
    job.kill(rank)
    job.start_worker(rank)
    job.wait_for(rank, r"seated: slot \d+ of", since=before)
    job.wait_for("scheduler", r"generation 2 starts")
    say(f"worker {rank} was killed and has its seat again after {time.monotonic() - begin_s:.1f} s")


def _target_of(job: Job, others: list[int], processes: list[ProcessIdentity]) -> Target:
    settings, _ = config.read(job.environment(ROLE="worker", NODE_ID="0"))
    begun = job.wait_for("scheduler", r"job ([0-9a-f-]{36}) begins")
    pids = [(identity.pid, identity.started_at) for identity in processes]
    return Target(job.port, others, begun[1], config.fixed_settings(settings), pids)


@contextmanager
def besieged(target: Target, phase: _Phase) -> Iterator[None]:
    """Run the attackers; their counts and duration are added to the phase afterwards."""
    with beside("tests.hostile.besiegers", target.text()) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        begin_s = time.monotonic()
        yield
        phase.besieged_s += time.monotonic() - begin_s
        process.stdin.close()
        phase.came.update(json.loads(process.stdout.readline()))


@contextmanager
def bare_target(mode: str, others: int) -> Iterator[tuple[int, list[int]]]:
    """Start bare sockets in their own process; return its pid and their ports."""
    with beside("tests.hostile.bare_target", str(others)) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(MODES[mode].get("CLUSTER_SECRET", "") + "\n")
        process.stdin.flush()
        yield process.pid, json.loads(process.stdout.readline())


@contextmanager
def beside(module: str, word: str) -> Iterator[subprocess.Popen[str]]:
    """Start a helper process that is controlled over its standard input and output."""
    with subprocess.Popen(
        [sys.executable, "-m", module, word],
        cwd=REPOSITORY, env=environment_of_tests(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.storm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each storm")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mode", choices=[*MODES, "both"], default="both", help="without a secret, with one, or both")
    given = parser.parse_args()
    starter = WarmStarter()
    tell = functools.partial(print, flush=True)
    results = []
    try:
        for mode in MODES if given.mode == "both" else [given.mode]:
            with tempfile.TemporaryDirectory(prefix="samebits-storm-") as folder:
                place = Path(folder).resolve()
                results.append(run(mode, given.seconds, given.workers, place, starter, tell))
    finally:
        starter.close()
    for one in results:
        tell(
            f"{one.mode}: {one.speed:.3f} of the calm's {one.calm_steps_a_second:.1f} steps/s; floor (the same come to "
            f"bare sockets): {one.floor:.3f}; ratio {one.ratio:.3f}, wanted {WANTED_SPEED}"
        )
    is_fast = all(one.ratio >= WANTED_SPEED for one in results)
    print(json.dumps({"storm": [one.shown() for one in results], "wanted_ratio": WANTED_SPEED, "is_fast": is_fast}))


if __name__ == "__main__":
    main()
