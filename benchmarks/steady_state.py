"""Steps per second under ``elastic.run`` with a commit after every step, against plain DDP.

``python -m benchmarks.steady_state [--quick]``. Three jobs of four ranks train the MLP of ``workers.mlp`` side by side:
plain DDP, SameBits, and plain DDP once more. Only one runs at a time, for a window of less than a second, and they take
turns in every order, so that what else the machine does hits all three alike; the ratios are of windows of one round.
After some rounds the jobs are started anew, so that the luck of one set of processes (memory layout, sockets) is drawn
several times. SameBits commits after every step and reseeds the random numbers; checkpoints do not fall into a window
(``save_checkpoint_steps`` is larger than the run). What counts is the lower quartile of ours ÷ plain, against the same
quartile of plain ÷ plain. On a machine with other work, the ratio of CPU time per step is the steadier witness.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from dataclasses import dataclass, field

from benchmarks.processes import Job, Stage, free_port, worker_module, worker_name
from benchmarks.report import Progress, Report, median, rounded, spread, table

WORLD_SIZE = 4
PLAIN, OURS, AGAIN = CONTESTANTS = ("plain DDP", "SameBits", "plain DDP again")
ROUNDS = 2 * tuple(itertools.permutations(CONTESTANTS))  # of one block: who runs when
BLOCKS = 3
BLOCKS_QUICK = 1
WINDOW_STEPS = 50
WINDOW_STEPS_QUICK = 25
WITHIN_S = 120.0
TARGET = 0.98


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps of one job: their rate, and what each cost all its ranks together."""

    steps_per_s: float
    cpu_ms_per_step: float


@dataclass(slots=True)
class Windows:
    """All that was measured, round by round."""

    by_contestant: dict[str, list[Window]] = field(default_factory=lambda: {name: [] for name in CONTESTANTS})
    alone: list[Window] = field(default_factory=list)

    def rates(self, contestant: str) -> list[float]:
        return [window.steps_per_s for window in self.by_contestant[contestant]]

    def ratios(self, contestant: str) -> list[float]:
        """The contestant's rate ÷ plain DDP's, of each round."""
        return [rate / plain for rate, plain in zip(self.rates(contestant), self.rates(PLAIN), strict=True)]

    def cpu_ms(self, contestant: str) -> float:
        """Of a step, the median window's."""
        return median([window.cpu_ms_per_step for window in self.by_contestant[contestant]])


class Contestant:
    """One job, idle but for its windows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage = Stage()
        self._windows = 0
        try:
            self._workers = _start_ours(self._stage) if name == OURS else _start_plain(self._stage)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stage.close()

    def wait_until_ready(self) -> None:
        self._wait_for("ready", WORLD_SIZE)

    def run(self, kind: str, steps: int) -> Window:
        """One window, from the first rank's begin to the last one's end."""
        self._windows += 1
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{kind} {steps}\n".encode())
            worker.stdin.flush()
        self._wait_for("ends", WORLD_SIZE * self._windows)
        begins, ends = (self._stage.channel.select(name)[-WORLD_SIZE:] for name in ("begins", "ends"))
        elapsed_s = max(one.at_s for one in ends) - min(one.at_s for one in begins)
        cpu_s = sum(one.cpu_s for one in ends) - sum(one.cpu_s for one in begins)
        return Window(steps / elapsed_s, cpu_s / steps * 1e3)

    def _wait_for(self, moment: str, count: int) -> None:
        channel = self._stage.channel
        try:
            channel.wait_for(lambda: len(channel.select(moment)) == count, WITHIN_S, f"{self._name}: {moment!r}")
        except (TimeoutError, ChildProcessError):
            print(self._stage.logs(), file=sys.stderr)
            raise


def _start_ours(stage: Stage) -> list[subprocess.Popen[bytes]]:
    job = Job(stage, "steady_state", WORLD_SIZE)
    job.start_scheduler()
    return [job.start_worker(slot, "elastic", gated=True) for slot in range(WORLD_SIZE)]


def _start_plain(stage: Stage) -> list[subprocess.Popen[bytes]]:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD_SIZE)}
    command = [*worker_module("steady_state"), "plain"]
    return [
        stage.start(worker_name(rank), command, {**shared, "RANK": str(rank)}, gated=True) for rank in range(WORLD_SIZE)
    ]


# --- the run ----------------------------------------------------------------------------------------------------------


def measure(blocks: int, window_steps: int) -> Windows:
    progress, windows = Progress(), Windows()
    for block in range(blocks):
        contestants: dict[str, Contestant] = {}
        try:
            for name in CONTESTANTS:
                contestants[name] = Contestant(name)
            for contestant in contestants.values():
                contestant.wait_until_ready()
                contestant.run("train", window_steps)  # DDP lays out its buckets, memory is warm
            for order in ROUNDS:
                for name in order:
                    windows.by_contestant[name].append(contestants[name].run("train", window_steps))
            windows.alone.append(contestants[AGAIN].run("alone", window_steps))
        finally:
            for contestant in contestants.values():
                contestant.close()
        shown = ", ".join(f"{name} {spread(windows.rates(name))}" for name in CONTESTANTS)
        progress.say(f"block {block + 1} of {blocks}, {len(ROUNDS)} rounds: {shown} steps/s so far")
    return windows


def report(windows: Windows) -> Report:
    ours, again = spread(windows.ratios(OURS)), spread(windows.ratios(AGAIN))

    def figures(contestant: str) -> dict[str, float]:
        return {"steps_per_s": median(windows.rates(contestant)), "cpu_per_step_ms": windows.cpu_ms(contestant)}

    return Report(
        benchmark="steady_state",
        floor={
            "without_communication_steps_per_s": median([window.steps_per_s for window in windows.alone]),
            "without_communication_cpu_per_step_ms": median([window.cpu_ms_per_step for window in windows.alone]),
        },
        peers={"plain_ddp": figures(PLAIN), "plain_ddp_again": figures(AGAIN)},
        ours=figures(OURS),
        ratios={
            "steps_vs_plain_ddp": rounded(ours.lower_quartile),
            "steps_vs_plain_ddp_median": rounded(ours.median),
            "plain_ddp_vs_plain_ddp": rounded(again.lower_quartile),
            "plain_ddp_vs_plain_ddp_median": rounded(again.median),
            "steps_vs_plain_ddp_of_plain_ddp": rounded(ours.lower_quartile / again.lower_quartile),
            "cpu_vs_plain_ddp": rounded(windows.cpu_ms(OURS) / windows.cpu_ms(PLAIN)),
            "plain_ddp_cpu_vs_plain_ddp": rounded(windows.cpu_ms(AGAIN) / windows.cpu_ms(PLAIN)),
        },
    )


def people(windows: Windows) -> str:
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
        f"{WORLD_SIZE} ranks, {len(windows.rates(PLAIN))} rounds",
        "steps/s",
        "÷ plain, lower quartile",
        "median",
        "CPU ms per step",
        "÷ plain",
    ]
    ratio = report(windows).ratios["steps_vs_plain_ddp_of_plain_ddp"]
    return f"{table(header, rows)}\nlower quartile, ours ÷ plain's own: {ratio:.3f} (wanted: {TARGET} or more)"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steady_state", description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one block of shorter windows, for a look")
    parser.add_argument(
        "--blocks", type=int, default=None, help=f"sets of processes, {len(ROUNDS)} rounds each (default: {BLOCKS})"
    )
    parser.add_argument("--window-steps", type=int, default=None, help=f"steps of a window (default: {WINDOW_STEPS})")
    arguments = parser.parse_args()
    blocks = arguments.blocks or (BLOCKS_QUICK if arguments.quick else BLOCKS)
    window_steps = arguments.window_steps or (WINDOW_STEPS_QUICK if arguments.quick else WINDOW_STEPS)
    windows = measure(blocks, window_steps)
    report(windows).print(people(windows))


if __name__ == "__main__":
    main()
