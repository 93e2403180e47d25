"""Measure a rank's memory on the host under ``elastic.run`` at default settings, against plain DDP.

``python -m benchmarks.memory [--quick] [--ranks N]``. Jobs of two ranks train the transformer of
``workers.transformer`` (the MLP with ``--quick``), one job after the other: plain DDP, SameBits with a commit after
every step, and SameBits with a commit every ten steps. All settings are the defaults, except that the ranks are
compared every 10 steps and save every 20, not every 50 and 100. So 24 steps are enough for a save, and for a
comparison whose copy replaces another.

A rank's memory is what the rank and the processes below it take of the host: anonymous memory and shared memory, each
page divided by the number of processes that map it (Pss_Anon and Pss_Shmem, proc(5)). So the memory slots in /dev/shm
and the writer process count, and no page counts twice. It is sampled while the job trains. The highest sample is the
peak, and the last one, a second after the last step, is at rest.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import processes_below
from benchmarks.report import Progress, Report, rounded, table
from benchmarks.steady_state import (
    COPYING,
    COPYING_STEPS,
    HELD_BYTES,
    HELD_STATES,
    KIB,
    MLP,
    OURS,
    PLAIN,
    TRANSFORMER,
    Contestant,
    Start,
    Workload,
    job_of_ours,
    job_of_plain,
)
from samebits.printable import counted

RANKS = 2
STEPS = 24
COMPARED_EVERY = "majority:10"
SAMPLED_S, QUIET_S = 0.2, 1.0
NAMES = (PLAIN, OURS, COPYING)


@dataclass(slots=True)
class Held:
    """The memory of each rank of one job, in bytes: its highest sample, and the sample at rest."""

    peak: list[int] = field(default_factory=list)
    at_rest: list[int] = field(default_factory=list)


def held_bytes(pid: int) -> int:
    """Return the memory of a process and the processes below it; each shared page counts in parts."""
    total = 0
    for one in (pid, *processes_below(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * KIB
    return total


def measure(name: str, workload: Workload, ranks: int, steps: int) -> Held:
    """Train a job of this kind, and return the memory of its ranks."""
    starts: dict[str, Start] = {
        PLAIN: job_of_plain(ranks),
        OURS: job_of_ours(ranks, "saving", CONSISTENCY=COMPARED_EVERY),
        COPYING: job_of_ours(ranks, "saving", CONSISTENCY=COMPARED_EVERY),
    }
    arguments = (str(COPYING_STEPS),) if name == COPYING else ()
    contestant = Contestant(name, workload.name, lambda stage, given: starts[name](stage, (*given[:1], *arguments)))
    try:
        contestant.wait_until_ready()
        pids, is_over = contestant.pids, threading.Event()
        held = Held([0] * len(pids))

        def sample() -> None:
            while not is_over.wait(SAMPLED_S):
                held.peak = [max(before, held_bytes(pid)) for before, pid in zip(held.peak, pids, strict=True)]

        sampler = threading.Thread(target=sample, name="memory")
        sampler.start()
        try:
            contestant.run("train", steps)
            time.sleep(QUIET_S)
        finally:
            is_over.set()
            sampler.join()
        held.at_rest = [held_bytes(pid) for pid in pids]
        return held
    finally:
        contestant.close()


def above_plain(held: Held, plain: Held) -> tuple[float, float]:
    """Return how much more memory a rank takes than a plain one, at its peak and at rest."""
    return (
        statistics.mean(held.peak) - statistics.mean(plain.peak),
        statistics.mean(held.at_rest) - statistics.mean(plain.at_rest),
    )


def report(workload: Workload, measured: dict[str, Held]) -> Report:
    """Report the memory above plain DDP's, also in multiples of the state."""
    state, plain = workload.state_bytes, measured[PLAIN]
    ours: dict[str, float | None] = {}
    ratios: dict[str, float | None] = {}
    for name, prefix in ((OURS, ""), (COPYING, "copying_")):
        peak, at_rest = above_plain(measured[name], plain)
        ours |= {f"{prefix}peak_above_plain_bytes": rounded(peak), f"{prefix}above_plain_bytes": rounded(at_rest)}
        ratios |= {
            f"{prefix}peak_vs_state": rounded(peak / state),
            f"{prefix}above_plain_vs_state": rounded(at_rest / state),
        }
    ratios["wanted_vs_state"] = rounded(wanted_bytes(workload) / state)
    peers = {"plain_ddp": {"peak_bytes": statistics.mean(plain.peak), "held_bytes": statistics.mean(plain.at_rest)}}
    return Report("memory", {"state_bytes": state}, peers, ours, ratios)


def wanted_bytes(workload: Workload) -> float:
    """Return the most memory above plain DDP's that is wanted."""
    return HELD_STATES * workload.state_bytes + HELD_BYTES


def people(workload: Workload, ranks: int, measured: dict[str, Held]) -> str:
    """Format the table."""
    rows: list[Sequence[object]] = []
    for name, held in measured.items():
        shown = [f"{statistics.mean(some) / KIB**2:.0f}" for some in (held.peak, held.at_rest)]
        above = above_plain(held, measured[PLAIN])
        more = [f"{size / KIB**2:.0f} ({size / workload.state_bytes:.2f})" for size in above]
        rows.append([name, *shown, *(["", ""] if name == PLAIN else more)])
    what = f"{workload.name}, {counted(ranks, 'rank')}; MiB per rank"
    head = (what, "peak", "at rest", "peak above plain (÷ state)", "at rest above plain (÷ state)")
    return (
        f"{table(head, rows)}\nthe state (weights and moments) is {workload.state_bytes / KIB**2:.1f} MiB; "
        f"wanted: {wanted_bytes(workload) / KIB**2:.1f} MiB above plain DDP's or less"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="train the MLP, for a look")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"ranks of each job (default: {RANKS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each job (default: {STEPS})")
    arguments = parser.parse_args()
    workload = MLP if arguments.quick else TRANSFORMER
    progress = Progress(f"memory per rank of {workload.name}, {arguments.steps} steps of each job")
    measured: dict[str, Held] = {}
    for name in NAMES:
        measured[name] = measure(name, workload, arguments.ranks, arguments.steps)
        progress.say(f"{name}: {statistics.mean(measured[name].at_rest) / KIB**2:.0f} MiB at rest")
    report(workload, measured).print(people(workload, arguments.ranks, measured))


if __name__ == "__main__":
    main()
