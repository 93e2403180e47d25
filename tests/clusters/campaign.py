"""Random faults over three hosts: a rank killed or stopped, hosts partitioned or lost, the scheduler killed or moved.

Each job trains from gate to gate. Between two gates one fault happens, at a random time, and is repaired. In every case
the job must end with the bits of an undisturbed one, its journal must be consistent, and nothing may be left.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from samebits.core import records
from samebits.core.records import GenerationCommitted, SeatGranted, TermStarted
from samebits.errors import SupersededError
from samebits.store.journal import read_journal
from tests.clusters.hosts import HostsJob
from tests.clusters.namespaces import Host, Switch
from tests.system.job import WAIT_S, Job
from tests.system.processes import Running, WarmStarter

RANKS = 3
GATE_EVERY = 10
LONGEST_PAUSE_S = 4.0  # twice NODE_TIMEOUT: anything cut or stopped that long is lost and returns
SETTINGS = {"NODE_TIMEOUT": "2", "HEARTBEAT_INTERVAL": "0.5"}


class Campaign:
    """Jobs with some faults each, one after the other.

    Args:
        folder: everything is kept below it, and removed after a success.
        seed: determines the draws; the result also depends on the machine.

    Attributes:
        done: how often each kind of fault was injected.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self._starter = WarmStarter()
        self._undisturbed: dict[int, str] = {}
        self._jobs = 0
        self.done: Counter[str] = Counter()

    def close(self) -> None:
        self._starter.close()

    def run_job(self, faults: int) -> list[str]:
        """Run one job with this many faults; return what is wrong with it."""
        self._jobs += 1
        arguments = _arguments(faults)
        expected = self._sha256_of(faults)
        folder = self._folder / f"job{self._jobs}"
        folder.mkdir()
        with Switch() as switch:
            for name in ("a", "b", "c"):
                switch.host(name)
            job = HostsJob(
                folder, self._starter, switch, args=arguments, workers=RANKS, shared=True, standbys=2, settings=SETTINGS
            )
            disturbed = _Disturbed(job, self._chance, self.done)
            try:
                problems = disturbed.run(faults, expected)
            except (AssertionError, TimeoutError) as error:
                problems = [str(error)]
            left = job.end()
            if not problems:
                problems = [f"left behind: {one}" for one in left]
        if problems:
            problems = [f"job {self._jobs}, faults {disturbed.story}, logs in {folder}", *problems]
        else:
            shutil.rmtree(folder)
        return problems

    def _sha256_of(self, faults: int) -> str:
        if faults not in self._undisturbed:
            folder = self._folder / f"undisturbed{faults}"
            folder.mkdir()
            job = Job(folder, self._starter, args=_arguments(faults), workers=RANKS)
            for number in range(faults + 1):
                job.open_gates(number * GATE_EVERY)
            try:
                job.start()
                self._undisturbed[faults] = job.wait_finished()
            finally:
                job.end()
        return self._undisturbed[faults]


class _Disturbed:
    """One job and its faults."""

    def __init__(self, job: HostsJob, chance: random.Random, done: Counter[str]) -> None:
        self._job = job
        self._chance = chance
        self._done = done
        self._replaced = 0  # hosts
        self._problems: list[str] = []
        self.story: list[str] = []

    def run(self, faults: int, expected: str) -> list[str]:
        job, kinds = self._job, self._kinds()
        job.start()
        job.wait_for("scheduler", "listening on")
        for number in range(faults):
            gate = number * GATE_EVERY
            for rank in job.ranks:
                job.wait_for(rank, rf"waits at the gate of step {gate}\b")
            kind = self._chance.choice(sorted(kinds))
            is_first = self._chance.random() < 0.5  # while all wait at the gate, or while they train
            self.story.append(f"{kind} at step {gate}{'' if is_first else ' and later'}")
            if not is_first:
                job.open_gates(gate)
                time.sleep(self._chance.random() * 0.3)
            kinds[kind]()
            job.open_gates(gate)
            self._done[kind] += 1
        job.open_gates(faults * GATE_EVERY)
        return self._judged(expected)

    def _judged(self, expected: str) -> list[str]:
        job, problems = self._job, self._problems
        failed = {name: status for name, status in job.wait_ended().items() if status}
        if failed:
            problems.append(f"exit statuses {failed}\n{job.tails()}")
        if (found := job.sha256()) != expected:
            problems.append(f"other bits: {found} instead of {expected}")
        job.wait_for_writers()
        problems += [f"still runs: process {identity.pid}" for identity in job.processes()]
        problems += faults_in(job.folder / "shared" / "recovery")
        return problems

    # ---- kinds of faults

    def _kinds(self) -> dict[str, Callable[[], None]]:
        return {
            "kill": self._kill,
            "stop": self._stop,
            "cut": self._cut,
            "host lost": self._lose_host,
            "scheduler killed and moved": self._move_scheduler,
            "scheduler replaced while it lives": self._replace_scheduler,
            "scheduler stopped": self._stop_scheduler,
        }

    def _kill(self) -> None:
        rank = self._rank()
        self._job.kill(rank)
        self._job.start_worker(rank)

    def _stop(self) -> None:
        self._pause(self._job.worker(self._rank()))

    def _stop_scheduler(self) -> None:
        self._pause(self._job.scheduler)

    def _cut(self) -> None:
        one, other = self._chance.sample(self._job.switch.hosts, 2)
        both_ways = self._chance.random() < 0.5
        one.cut_towards(other)
        if both_ways:
            other.cut_towards(one)
        self._wait()
        one.mend_towards(other)
        other.mend_towards(one)

    def _lose_host(self) -> None:
        job = self._job
        lost = self._chance.choice(job.switch.hosts)
        ranks, had_scheduler = job.ranks_on(lost), job.place["scheduler"] is lost
        job.lose(lost)
        self._replaced += 1
        job.replace(lost, f"{lost.name[0]}{self._replaced}", number=lost.number)
        if had_scheduler:
            job.scheduler.wait(WAIT_S)
            self._start_scheduler(self._chance.choice(job.switch.hosts))
        for rank in ranks:
            job.start_worker(rank)

    def _move_scheduler(self) -> None:
        job = self._job
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait(WAIT_S)
        self._start_scheduler(self._elsewhere())

    def _replace_scheduler(self) -> None:
        """Replace it as an operator would who takes it for dead, on a file system without locks."""
        job, old = self._job, self._job.scheduler
        (job.folder / "shared" / "recovery" / "lock").unlink()
        self._start_scheduler(self._elsewhere())
        status = old.wait(WAIT_S)
        if status != SupersededError.exit_code:
            self._problems.append(f"a scheduler that was replaced left with {status}")

    def _start_scheduler(self, host: Host) -> None:
        """Start one and return when it has the lock, so that the next one finds a running scheduler."""
        since = self._job.count("scheduler")
        self._job.move_scheduler(host)
        self._job.wait_for("scheduler", "listening on", since=since)

    # ---- random choices

    def _rank(self) -> int:
        return self._chance.choice(list(self._job.ranks))

    def _elsewhere(self) -> Host:
        present = self._job.place["scheduler"]
        return self._chance.choice([host for host in self._job.switch.hosts if host is not present])

    def _pause(self, running: Running) -> None:
        running.signal(signal.SIGSTOP)
        self._wait()
        running.signal(signal.SIGCONT)

    def _wait(self) -> None:
        time.sleep(self._chance.random() * LONGEST_PAUSE_S)


def _arguments(faults: int) -> tuple[str, ...]:
    steps = (faults + 1) * GATE_EVERY
    return ("--steps", str(steps), "--interval", "10", "--gates", str(GATE_EVERY), "--pause-ms", "5")


def faults_in(recovery: Path) -> list[str]:
    """Return a journal's contradictions: a rank held twice, a number that does not rise, a leftover owner."""
    contents = read_journal(recovery)
    assert contents is not None
    history = [records.SCHEMA.unpack(payload) for payload in contents.payloads]
    problems = []
    generations = [record for record in history if isinstance(record, GenerationCommitted)]
    for name, numbers in (
        ("generations", [record.generation for record in generations]),
        ("terms", [record.term for record in history if isinstance(record, TermStarted)]),
    ):
        if numbers != sorted(set(numbers)):
            problems.append(f"{name} do not rise: {numbers}")
    problems += [
        f"generation {one.generation} has a slot twice: {one.slots}"
        for one in generations
        if len(set(one.slots)) != len(one.slots)
    ]
    incarnations = [(record.node, record.incarnation) for record in history if isinstance(record, SeatGranted)]
    if len(set(incarnations)) != len(incarnations):
        problems.append(f"an incarnation was given twice: {incarnations}")
    claims = [path.name for path in recovery.iterdir() if path.name.startswith("term.")]
    if len(claims) != 1:
        problems.append(f"claims are left over: {sorted(claims)}")
    return problems
