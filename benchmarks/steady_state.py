"""Measure steps per second under ``elastic.run`` with a commit after every step, and memory, against plain DDP.

``python -m benchmarks.steady_state [--quick] [--workload mlp|transformer|both]``. Three jobs of four ranks train the
MLP of ``workers.mlp`` and then the transformer of ``workers.transformer``: plain DDP, SameBits, and plain DDP once
more. Only one runs at a time, for a window of about a second, and they alternate in every order, so that other load
affects all three alike; each ratio is of two windows of one round. After some rounds the jobs are restarted, since each
set of processes has its own memory layout and sockets. SameBits commits after every step and reseeds the random
numbers; no checkpoint falls into a window (``save_checkpoint_steps`` is larger than the run). The result is the lower
quartile of ours ÷ plain, against the same quartile of plain ÷ plain. On a machine with other load, the ratio of CPU
time per step is more reliable.

Memory is each rank's private memory (RssAnon, proc(5)) after the windows, ours minus plain's. It is also measured for a
job that commits only every ten steps, which makes SameBits copy at every commit.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import Job, Stage, free_port, worker_module, worker_name
from benchmarks.report import Progress, Report, median, rounded, spread, table

WORLD_SIZE = 4
PLAIN, OURS, AGAIN = CONTESTANTS = ("plain DDP", "SameBits", "plain DDP again")
COPYING = "SameBits, a commit every 10 steps"
COPYING_STEPS = 10
ORDERS = tuple(itertools.permutations(CONTESTANTS))  # which one runs when
WITHIN_S = 300.0
TARGET = 0.99
Start = Callable[[Stage, Sequence[str]], list[subprocess.Popen[bytes]]]
KIB = 1024
HELD_STATES, HELD_BYTES = 1.2, 32 * KIB**2  # wanted: a rank's memory above plain DDP's is at most this


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and how long it is trained.

    Attributes:
        name: the worker's name for it.
        orders: how often one block goes through all orders.
        suffix: the end of its figures' names.
        state_bytes: size of one rank's weights and optimizer moments.
    """

    name: str
    window_steps: int
    window_steps_quick: int
    blocks: int
    orders: int
    suffix: str
    state_bytes: int

    @property
    def rounds(self) -> tuple[tuple[str, ...], ...]:
        """Return the order of each round of a block."""
        return self.orders * ORDERS


MLP = Workload("mlp", 50, 25, blocks=5, orders=2, suffix="", state_bytes=2 * 4 * 407_050)
TRANSFORMER = Workload("transformer", 4, 2, blocks=2, orders=1, suffix="_transformer", state_bytes=3 * 4 * 25_489_664)
WORKLOADS = {one.name: one for one in (MLP, TRANSFORMER)}
BLOCKS_QUICK = 1


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps of one job: their rate, and the cost of a step over all ranks."""

    steps_per_s: float
    cpu_ms_per_step: float


@dataclass(slots=True)
class Windows:
    """All measurements, round by round."""

    by_contestant: dict[str, list[Window]] = field(default_factory=lambda: {name: [] for name in CONTESTANTS})
    alone: list[Window] = field(default_factory=list)
    held_bytes: dict[str, list[int]] = field(default_factory=dict)
    """by contestant and COPYING: the private memory of each rank at the end"""

    def overhead_bytes(self, contestant: str) -> float | None:
        """Return how much more memory a rank uses than a plain one: the difference of the means."""
        if not self.held_bytes.get(contestant):
            return None
        plain = [*self.held_bytes[PLAIN], *self.held_bytes[AGAIN]]
        return rounded(statistics.mean(self.held_bytes[contestant]) - statistics.mean(plain))

    def rates(self, contestant: str) -> list[float]:
        return [window.steps_per_s for window in self.by_contestant[contestant]]

    def ratios(self, contestant: str) -> list[float]:
        """Return the contestant's rate ÷ plain DDP's, for each round."""
        return [rate / plain for rate, plain in zip(self.rates(contestant), self.rates(PLAIN), strict=True)]

    def cpu_ms(self, contestant: str) -> float:
        """Return the CPU time of a step in the median window."""
        return median([window.cpu_ms_per_step for window in self.by_contestant[contestant]])


class Contestant:
    """One job that is idle outside its windows; ``start``, if given, starts a job defined by another module."""

    def __init__(self, name: str, workload: str, start: Start | None = None) -> None:
        self._name = name
        self._stage = Stage()
        self._windows = 0
        arguments = (workload, *([str(COPYING_STEPS)] if name == COPYING else []))
        start = start or (job_of_ours if name in (OURS, COPYING) else job_of_plain)(WORLD_SIZE)
        try:
            self._workers = start(self._stage, arguments)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stage.close()

    def wait_until_ready(self) -> None:
        self._wait_for("ready", len(self._workers))

    def run(self, kind: str, steps: int) -> Window:
        """Run one window, from the first rank's start to the last one's end."""
        self._windows += 1
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{kind} {steps}\n".encode())
            worker.stdin.flush()
        ranks = len(self._workers)
        self._wait_for("ends", ranks * self._windows)
        begins, ends = (self._stage.channel.select(name)[-ranks:] for name in ("begins", "ends"))
        elapsed_s = max(one.at_s for one in ends) - min(one.at_s for one in begins)
        cpu_s = sum(one.cpu_s for one in ends) - sum(one.cpu_s for one in begins)
        return Window(steps / elapsed_s, cpu_s / steps * 1e3)

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [worker.pid for worker in self._workers]

    def held_bytes(self) -> list[int]:
        """Return the private memory of each rank."""
        return [_anonymous_bytes(worker.pid) for worker in self._workers]

    def _wait_for(self, moment: str, count: int) -> None:
        channel = self._stage.channel
        try:
            channel.wait_for(lambda: len(channel.select(moment)) == count, WITHIN_S, f"{self._name}: {moment!r}")
        except (TimeoutError, ChildProcessError):
            print(self._stage.logs(), file=sys.stderr)
            raise


def job_of_ours(ranks: int, kind: str = "elastic", **settings: str) -> Start:
    """Return a function that starts a job of this ``kind`` with this many ranks and these settings."""

    def start(stage: Stage, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        job = Job(stage, "steady_state", ranks, **settings)
        job.start_scheduler()
        return [job.start_worker(slot, kind, *arguments, gated=True) for slot in range(ranks)]

    return start


def job_of_plain(ranks: int) -> Start:
    """Return a function that starts a job of plain DDP with this many ranks."""

    def start(stage: Stage, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        command = [*worker_module("steady_state"), "plain", *arguments]
        return [
            stage.start(worker_name(rank), command, {**shared, "RANK": str(rank)}, gated=True) for rank in range(ranks)
        ]

    return start


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    raise ValueError(f"/proc/{pid}/status says nothing of RssAnon")


# --- the run ----------------------------------------------------------------------------------------------------------


def measure(workload: Workload, blocks: int, window_steps: int, progress: Progress) -> Windows:
    windows = Windows()
    for block in range(blocks):
        contestants: dict[str, Contestant] = {}
        try:
            for name in CONTESTANTS:
                contestants[name] = Contestant(name, workload.name)
            for contestant in contestants.values():
                contestant.wait_until_ready()
                contestant.run("train", window_steps)  # DDP arranges its buckets, memory is warm
            for order in workload.rounds:
                for name in order:
                    windows.by_contestant[name].append(contestants[name].run("train", window_steps))
            for name, contestant in contestants.items():
                windows.held_bytes.setdefault(name, []).extend(contestant.held_bytes())
            windows.alone.append(contestants[AGAIN].run("alone", window_steps))
        finally:
            for contestant in contestants.values():
                contestant.close()
        shown = ", ".join(f"{name} {spread(windows.rates(name))}" for name in CONTESTANTS)
        progress.say(
            f"{workload.name}, block {block + 1} of {blocks}, {len(workload.rounds)} rounds: {shown} steps/s so far"
        )
    windows.held_bytes[COPYING] = held_while_copying(workload)
    return windows


def held_while_copying(workload: Workload) -> list[int]:
    """Return each rank's memory after three commits several steps apart, when both buffers are in use."""
    contestant = Contestant(COPYING, workload.name)
    try:
        contestant.wait_until_ready()
        contestant.run("train", 3 * COPYING_STEPS)
        return contestant.held_bytes()
    finally:
        contestant.close()


def report(measured: Mapping[str, Windows]) -> Report:
    """Report the windows by the workload's name."""
    parts = [_figures(WORKLOADS[name], windows) for name, windows in measured.items()]
    floor, plain, again, ours, ratios = (
        {key: value for part in parts for key, value in part[index].items()} for index in range(5)
    )
    return Report("steady_state", floor, {"plain_ddp": plain, "plain_ddp_again": again}, ours, ratios)


def _figures(workload: Workload, windows: Windows) -> tuple[dict[str, float | None], ...]:
    """Return the figures of the floor, plain DDP, plain DDP again and ours, and the ratios."""
    ours, again = spread(windows.ratios(OURS)), spread(windows.ratios(AGAIN))

    def contestant(name: str) -> dict[str, float | None]:
        return {"steps_per_s": median(windows.rates(name)), "cpu_per_step_ms": windows.cpu_ms(name)}

    found: list[dict[str, float | None]] = [
        {
            "without_communication_steps_per_s": median([window.steps_per_s for window in windows.alone]),
            "without_communication_cpu_per_step_ms": median([window.cpu_ms_per_step for window in windows.alone]),
            "state_bytes": workload.state_bytes,
        },
        contestant(PLAIN),
        contestant(AGAIN),
        {
            **contestant(OURS),
            "memory_overhead_bytes": windows.overhead_bytes(OURS),
            "memory_overhead_copying_bytes": windows.overhead_bytes(COPYING),
        },
        {
            "steps_vs_plain_ddp": rounded(ours.lower_quartile),
            "steps_vs_plain_ddp_median": rounded(ours.median),
            "plain_ddp_vs_plain_ddp": rounded(again.lower_quartile),
            "plain_ddp_vs_plain_ddp_median": rounded(again.median),
            "steps_vs_plain_ddp_of_plain_ddp": rounded(ours.lower_quartile / again.lower_quartile),
            "cpu_vs_plain_ddp": rounded(windows.cpu_ms(OURS) / windows.cpu_ms(PLAIN)),
            "plain_ddp_cpu_vs_plain_ddp": rounded(windows.cpu_ms(AGAIN) / windows.cpu_ms(PLAIN)),
        },
    ]
    return tuple({_suffixed(key, workload.suffix): value for key, value in part.items()} for part in found)


def _suffixed(name: str, suffix: str) -> str:
    """Add the suffix but keep the unit at the end: ``transformer_steps_per_s``; a ratio gets it at the end."""
    return f"{suffix.removeprefix('_')}_{name}" if suffix and "_vs_" not in name else name + suffix


def people(measured: Mapping[str, Windows]) -> str:
    return "\n\n".join(_people(WORKLOADS[name], windows) for name, windows in measured.items())


def _people(workload: Workload, windows: Windows) -> str:
    rows: list[list[object]] = []
    for name in CONTESTANTS:
        sample = spread(windows.ratios(name))
        quartiles = ["" if name == PLAIN else f"{value:.3f}" for value in (sample.lower_quartile, sample.median)]
        cpu_ms = windows.cpu_ms(name)
        cpu = [f"{cpu_ms:.2f}", f"{cpu_ms / windows.cpu_ms(PLAIN):.3f}"]
        rows.append([name, spread(windows.rates(name)), *quartiles, *cpu])
    alone = spread([window.steps_per_s for window in windows.alone])
    cpu_ms = median([window.cpu_ms_per_step for window in windows.alone])
    rows.append(["without communication", alone, "", "", f"{cpu_ms:.2f}", f"{cpu_ms / windows.cpu_ms(PLAIN):.3f}"])
    header = [
        f"{workload.name}, {WORLD_SIZE} ranks, {len(windows.rates(PLAIN))} rounds",
        "steps/s",
        "÷ plain, lower quartile",
        "median",
        "CPU ms per step",
        "÷ plain",
    ]
    ours, again = (spread(windows.ratios(name)).lower_quartile for name in (OURS, AGAIN))
    held = [f"{(windows.overhead_bytes(name) or math.nan) / KIB**2:.1f} MiB" for name in (OURS, COPYING)]
    return (
        f"{table(header, rows)}\nlower quartile, ours ÷ plain's own: {ours / again:.3f} (wanted: {TARGET} or more)\n"
        f"a rank's memory above plain DDP's: {held[0]} with a commit every step, {held[1]} with one every "
        f"{COPYING_STEPS} (weights and moments are {workload.state_bytes / KIB**2:.1f} MiB; wanted: "
        f"{(HELD_STATES * workload.state_bytes + HELD_BYTES) / KIB**2:.1f} MiB or less)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steady_state", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="run one block with shorter windows")
    parser.add_argument(
        "--workload", choices=[*WORKLOADS, "both"], default="both", help="model to train (default: both)"
    )
    parser.add_argument("--blocks", type=int, help="number of sets of processes (default: depends on the workload)")
    parser.add_argument(
        "--window-steps", type=int, help="number of steps in a window (default: depends on the workload)"
    )
    arguments = parser.parse_args()
    workloads = [*WORKLOADS.values()] if arguments.workload == "both" else [WORKLOADS[arguments.workload]]
    progress, measured = Progress(f"steps/s of {', '.join(workload.name for workload in workloads)}"), {}
    for workload in workloads:
        blocks = arguments.blocks or (BLOCKS_QUICK if arguments.quick else workload.blocks)
        standard = workload.window_steps_quick if arguments.quick else workload.window_steps
        measured[workload.name] = measure(workload, blocks, arguments.window_steps or standard, progress)
    report(measured).print(people(measured))


if __name__ == "__main__":
    main()
