"""One job that loses a rank to its spare repeatedly, and what its survivors hold meanwhile.

Between two kills all ranks wait at a gate. Readings of /proc are therefore taken in the same state, and the number of
steps, which decides the undisturbed run to compare with, does not depend on the machine's speed.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.system.job import WAIT_S, Job

STEPS_PER_CYCLE = 8
PAUSE_MS = 10
SETTINGS = {"SPARE_NUM": "1", "REGISTER_COOLDOWN": "0"}
PROTECTED = 1  # this node is never killed and survives every cycle
KILLED = (0, 2, 3)  # these ranks, in turn
DESCRIPTORS_GROWN = 2  # one may be open by chance; a leaked group has several
THREADS_GROWN = 2
KIB_GROWN_PER_CYCLE = 64  # a leaked group costs more; the log's and an allocator's growth less


@dataclass(frozen=True, slots=True)
class Holding:
    """A process's resources at one time."""

    descriptors: int
    threads: int
    anonymous_kib: int


def holding_of(pid: int) -> Holding:
    """Read it from /proc (proc(5): fd, task, RssAnon in status)."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return Holding(
        descriptors=sum(1 for _ in (proc / "fd").iterdir()),
        threads=sum(1 for _ in (proc / "task").iterdir()),
        anonymous_kib=int(status["RssAnon"].split()[0]),
    )


def arguments(cycles: int) -> tuple[str, ...]:
    """Return the probe's arguments, which decide the bits."""
    return ("--steps", str(STEPS_PER_CYCLE * (cycles + 1)), "--interval", "50")


def disturbed(cycles: int) -> tuple[str, ...]:
    """Return the same arguments plus those that allow the cycles."""
    return (*arguments(cycles), "--gates", str(STEPS_PER_CYCLE), "--pause-ms", str(PAUSE_MS))


@dataclass(slots=True)
class Cycles:
    """A job with gates and a spare.

    Args:
        job: a job of the probe, with :func:`disturbed` and :data:`SETTINGS`, not yet started.
        seed: determines the times of the kills.
    """

    job: Job
    seed: int = 1

    def run(self, cycles: int, say: Callable[[str], object]) -> list[Holding]:
        """Kill and recover this often and let the job end; return what the protected node held after each recovery."""
        job, rng = self.job, random.Random(self.seed)
        nodes = list(job.ranks)  # by rank
        spare = job.workers
        job.start()
        self._wait_at_gate(nodes, 0)
        self._warm(spare)
        held = [self._settled(job.worker(PROTECTED).pid)]
        for cycle in range(cycles):
            rank = KILLED[cycle % len(KILLED)]
            gate = cycle * STEPS_PER_CYCLE
            job.open_gates(gate)
            time.sleep(rng.uniform(0.0, STEPS_PER_CYCLE * PAUSE_MS / 1000))
            killed = nodes[rank]
            job.worker(killed).signal(signal.SIGKILL)
            nodes[rank], spare = spare, killed
            self._wait_at_gate(nodes, gate + STEPS_PER_CYCLE, lost=killed)
            job.worker(killed).wait()
            held.append(self._settled(job.worker(PROTECTED).pid, held[-1] if cycle else None))
            self._warm(spare)
            say(f"cycle {cycle + 1} of {cycles}: rank {rank} killed; node {PROTECTED} holds {held[-1]}")
        job.open_gates(cycles * STEPS_PER_CYCLE)
        return held

    def _wait_at_gate(self, nodes: Sequence[int], step: int, lost: int | None = None) -> None:
        """Wait until every rank is at the gate, or the successor of a lost one."""
        for node in nodes:
            self.job.wait_for(node, rf"waits at the gate of step {step}$")
        if lost is not None:
            self.job.wait_for("scheduler", rf"takes slot \d+ of worker {lost}\b")

    def _warm(self, node: int) -> None:
        since = self.job.count(node)
        self.job.start_worker(node)
        self.job.wait_for(node, "this spare is warm", since=since)

    def _settled(self, pid: int, earlier: Holding | None = None) -> Holding:
        """Return what the process holds once it no longer changes, since the last generation is freed asynchronously.

        A busy machine may pause, so a value above ``earlier`` is given the full timeout.
        """
        deadline, before = time.monotonic() + WAIT_S, holding_of(pid)
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = holding_of(pid)
            is_still = (now.descriptors, now.threads) == (before.descriptors, before.threads)
            has_grown = earlier is not None and (
                now.descriptors > earlier.descriptors + 1 or now.threads > earlier.threads + 1
            )
            if is_still and not has_grown:
                return now
            before = now
        return before


GROUP = Holding(descriptors=5, threads=4, anonymous_kib=0)
"""The cost of a group of four to one of its ranks."""


def groups_kept(held: Sequence[Holding]) -> int:
    """Return after how many of these losses a whole group stayed.

    This happens on a busy machine: gloo does not wake the receiver of a message that is cut off midway, and a group is
    kept until that operation times out half an hour later (``training.group.discard``).
    """
    return sum(after.descriptors > before.descriptors + 1 for before, after in itertools.pairwise(held))


def growth(held: Sequence[Holding], of: Callable[[Holding], float]) -> float:
    """Return the last fifth's median less the second fifth's; the first cycles warm up memory."""
    fifth = max(1, len(held) // 5)
    early, late = held[fifth : 2 * fifth], held[-fifth:]
    return statistics.median(map(of, late)) - statistics.median(map(of, early))


def leaks(held: Sequence[Holding]) -> list[str]:
    """Return what grew by more than the noise of a reading."""
    per_cycle_kib = growth(held, lambda one: one.anonymous_kib) / (0.6 * len(held))
    found = {
        "descriptors": growth(held, lambda one: one.descriptors) >= DESCRIPTORS_GROWN,
        "threads": growth(held, lambda one: one.threads) >= THREADS_GROWN,
        f"memory, {per_cycle_kib:.0f} KiB a cycle": per_cycle_kib > KIB_GROWN_PER_CYCLE,
    }
    return [what for what, has_grown in found.items() if has_grown]


def table(held: Sequence[Holding]) -> str:
    """Format some of the readings and the growth."""
    rows = ["after cycle  descriptors  threads  anonymous KiB"]
    chosen = sorted({0, 1, *range(0, len(held), max(1, len(held) // 10)), len(held) - 1})
    for cycle in chosen:
        one = held[cycle]
        rows.append(f"{cycle:11}  {one.descriptors:11}  {one.threads:7}  {one.anonymous_kib:13}")
    grown = [growth(held, of) for of in (lambda h: h.descriptors, lambda h: h.threads, lambda h: h.anonymous_kib)]
    rows.append(f"{'growth':>11}  {grown[0]:11.0f}  {grown[1]:7.0f}  {grown[2]:13.0f}")
    return "\n".join(rows)
