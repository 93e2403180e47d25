"""Measure the cost of all monitoring: steps per second with the default settings ÷ with all of it off.

``python -m benchmarks.defaults [--quick] [--workload NAME ...] [--ranks N] [--watcher NAME]``. Three jobs of the same
script alternate in every order (``benchmarks.turns``): SameBits with everything off, which is the floor, SameBits with
its defaults, and SameBits with everything off once more. The script reports its loss and commits after every step. On
by default are hang detection (HANG), straggler detection (STRAGGLER, which times each step), loss anomalies
(LOSS_ANOMALY), changing values outside the state (HIDDEN_STATE, at the first commits), comparisons of the ranks
(CONSISTENCY), and host health (HEALTH). ``--watcher`` enables only one of them, to find its cost.

``--watcher copies`` trains with FSDP2 and measures SHARD_COPY_EVERY. The report then also has the CPU time of one copy
of a commit ÷ that of a memcpy of as many bytes.

A window contains one comparison of the ranks, and all windows together several host checks, one every ten seconds.
The models have 3 and 25 million parameters unless another is named. There are two ranks by default: with more
ranks than cores the system's own scheduler would affect every figure. On a machine with other load the ratio of CPU
time is more reliable.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import time
from collections.abc import Mapping

import torch

from benchmarks.report import Progress, Report, rounded
from benchmarks.steady_state import Start, job_of_ours
from benchmarks.turns import Turns, take_turns
from samebits.core.point import Point
from samebits.store.checkpoint import PointHeader
from samebits.training.checkpoint.shard_copies import ShardCopies

OFF, ON, AGAIN = CONTESTANTS = ("all off", "defaults", "all off again")
ORDERS = tuple(itertools.permutations(CONTESTANTS))
TARGET = 0.99
WATCHERS: dict[str, dict[str, str]] = {
    "standstill": {"HANG": "off"},
    "stragglers": {"STRAGGLER": "off"},
    "anomalies": {"LOSS_ANOMALY": "off"},
    "consistency": {"CONSISTENCY": "majority:0"},
    "hidden": {"HIDDEN_STATE": "off"},
    "health": {"HEALTH": "off"},
    "copies": {"SHARD_COPY_EVERY": "off"},
}
"""Settings that are on by default, each with the value that turns it off."""
COPIED_BYTES, TENSORS, REPEATS, WARM = 64 * 2**20, 32, 15, 3
WINDOW_STEPS = 50
BLOCKS = {"mlp": 6, "wide": 2, "transformer": 1}
"""Sets of processes by workload, since each set's memory layout and sockets affect its speed."""
USUAL, QUICK = ("wide", "transformer"), ("mlp",)


def all_off(but: str = "") -> dict[str, str]:
    """Return the settings that turn off every watcher but one."""
    return {name: value for watcher, off in WATCHERS.items() if watcher != but for name, value in off.items()}


def starts(ranks: int, watcher: str = "") -> dict[str, Start]:
    """Return how each contestant starts; if a watcher is named, it alone is on."""
    settings = {OFF: all_off(), ON: all_off(watcher) if watcher else {}, AGAIN: all_off()}
    kind = "sharded" if watcher == "copies" else "reporting"
    return {name: job_of_ours(ranks, kind, **chosen) for name, chosen in settings.items()}


def copy_cpu_vs_memcpy() -> float:
    """Return the CPU time of a copy of ``COPIED_BYTES`` to shared memory ÷ that of a memcpy of its tensors."""
    torch.set_num_threads(1)  # threads that wait for each other count as CPU time
    tensors = [(str(number), torch.randn(COPIED_BYTES // TENSORS // 4)) for number in range(TENSORS)]
    targets = [torch.empty_like(tensor) for _, tensor in tensors]
    job = f"benchmark-{os.getpid()}"
    copies, taken, floor = ShardCopies(job), list[float](), list[float]()
    for step in range(1, REPEATS + 1):
        header = PointHeader(job, Point(step, 1), 1, 0, 0, "0")
        began_s = time.process_time()
        if not copies.copy(0, header, tensors, {"commits": step}, {}, ranks_here=1):
            raise SystemExit("there is no room for the copies in /dev/shm")
        copied_s = time.process_time()
        for target, (_, tensor) in zip(targets, tensors, strict=True):
            ctypes.memmove(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        taken.append(copied_s - began_s)
        floor.append(time.process_time() - copied_s)
    copies.discard()
    return statistics.median(taken[WARM:]) / statistics.median(floor[WARM:])


def report(measured: Mapping[str, Turns], copy: float | None = None) -> Report:
    """Report the figures; the floor is everything off.

    Args:
        measured: windows by workload.
        copy: the result of :func:`copy_cpu_vs_memcpy`, if it was measured.
    """
    found = Report("defaults")
    for name, turns in measured.items():
        found.floor.update(turns.figures(OFF, name))
        found.ours.update(turns.figures(ON, name))
        for who, key in ((ON, f"defaults_vs_all_off_{name}"), (AGAIN, f"all_off_vs_all_off_{name}")):
            ratio = turns.ratios(who)
            found.ratios[key] = rounded(ratio.median)
            found.ratios[f"{key}_lower_quartile"] = rounded(ratio.lower_quartile)
            found.ratios[f"{key}_upper_quartile"] = rounded(ratio.upper_quartile)
            found.ratios[f"{key}_cpu"] = rounded(turns.cpu_ratio(who))
    if copy is not None:
        found.ratios["copy_vs_memcpy_cpu"] = rounded(copy)
    return found


def people(measured: Mapping[str, Turns], what: str) -> str:
    """Format one table per workload."""
    parts = []
    for name, turns in measured.items():
        ratio = f"{turns.ratios(ON).median:.3f}, of CPU time {turns.cpu_ratio(ON):.3f}"
        parts.append(f"{turns.people(f'{name}, {what}')}\n{ON} ÷ {OFF}: {ratio} (wanted: {TARGET} or more)")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.defaults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run one set of processes, with the smallest model (0.4 million parameters)",
    )
    parser.add_argument(
        "--workload", nargs="+", choices=list(BLOCKS), help=f"models to train (default: {' '.join(USUAL)})"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--watcher", choices=list(WATCHERS), default="", help="enable only this kind of monitoring")
    options = parser.parse_args()
    what = f"{options.ranks} ranks, {options.watcher or 'all watchers'} on"
    progress, measured = Progress(f"{what}: steps/s in windows of {WINDOW_STEPS} steps"), dict[str, Turns]()
    for name in options.workload or (QUICK if options.quick else USUAL):
        measured[name] = Turns(OFF)
        for _ in range(1 if options.quick else BLOCKS[name]):
            contestants = starts(options.ranks, options.watcher)
            take_turns(measured[name], contestants, name, WINDOW_STEPS, ORDERS, progress.say)
    copy = copy_cpu_vs_memcpy() if options.watcher == "copies" else None
    said = people(measured, what)
    report(measured, copy).print(said if copy is None else f"{said}\nCPU time of a copy ÷ memcpy: {copy:.2f}")


if __name__ == "__main__":
    main()
