"""One trial of a peer's recovery: torchrun restarts every worker, torchft only the killed one.

All contestants train the same model and lose a rank in the same way. A recovery ends for all of them when every rank
has finished a step that no rank had finished before.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.moments import Channel
from benchmarks.processes import REPOSITORY, Stage, free_port, wait_until_listening, worker_module, worker_name
from benchmarks.recovery_trials import WORLD_SIZE, last_s, wait_until_training
from benchmarks.report import SAFETENSORS_NEEDS

TORCHRUN = "torchrun"
TORCHFT = "torchft"
LIGHTHOUSE = "lighthouse"


@dataclass(frozen=True, slots=True)
class Restart:
    """One recovery by a peer: seconds from the kill to the last worker that reached each point."""

    asks_s: float
    """every restarted worker has imported everything"""
    stepped_s: float
    """every surviving worker has stepped again, or every worker if none survived"""
    total_s: float
    redone_steps: int


# --- torchrun ---------------------------------------------------------------------------------------------------------


def recover_torchrun(victim: int, rng: random.Random, variables: dict[str, str], within_s: float) -> Restart | None:
    """Kill that rank once; return None if the job did not train again within that time."""
    with Stage() as stage:
        stage.start(TORCHRUN, torchrun_command(), variables, is_parent=True)
        wait_until_training(stage, WORLD_SIZE, rng)
        channel = stage.channel
        old = frozenset(channel.reached)
        pid = next(one.pid for one in channel.moments if one.who == f"torchrun_{victim}")
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        try:
            channel.wait_for(lambda: len(_beyond(channel, old)) == WORLD_SIZE, within_s, "torchrun's recovery")
        except TimeoutError:
            return None
        return restart(channel, killed_s, old, _beyond(channel, old))


def restart(channel: Channel, killed_s: float, old: frozenset[int], new: frozenset[int]) -> Restart:
    """Evaluate the events of a restart; ``old`` and ``new`` are the pids of the workers before and after it."""
    highest = max(channel.reached[pid] for pid in old)
    restored = min(one.step or 0 for one in channel.select("trains", pids=new))
    steps = channel.select("stepped", since_s=killed_s, pids=new)
    return Restart(
        asks_s=last_s(channel.select("asks", pids=new)) - killed_s,
        stepped_s=last_s(one for one in steps if one.step == restored + 1) - killed_s,
        total_s=last_s(one for one in steps if one.step == highest + 1) - killed_s,
        redone_steps=highest - restored,
    )


def _beyond(channel: Channel, old: frozenset[int]) -> frozenset[int]:
    """Return the new processes that have finished a step no old one had."""
    highest = max(channel.reached[pid] for pid in old)
    return frozenset(pid for pid, step in channel.reached.items() if pid not in old and step > highest)


def torchrun_needs() -> str:
    """Return what prevents torchrun from taking part, or an empty string, without loading torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "distributed/run.py").exists():
        return "a torch with torch.distributed.run"
    return "" if importlib.util.find_spec("safetensors") else SAFETENSORS_NEEDS


def torchrun_command() -> list[str]:
    options = {
        "--nproc-per-node": WORLD_SIZE,
        "--max-restarts": 100,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"127.0.0.1:{free_port()}",
    }
    flags = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "torch.distributed.run", *flags, *worker_module(TORCHRUN)[1:]]


def interpreter(python: str) -> str:
    """Return an interpreter's absolute path, since processes run in folders of their own.

    A link is not resolved, because its location determines the virtual environment.
    """
    return str(Path(shutil.which(python) or python).absolute())


# --- torchft ----------------------------------------------------------------------------------------------------------


def name_torchft(parser: argparse.ArgumentParser) -> None:
    """Add ``--torchft``."""
    parser.add_argument(
        "--torchft",
        type=interpreter,
        default=sys.executable,
        metavar="PYTHON",
        help="Python interpreter in which torchft is installed (default: this one)",
    )


def torchft_needs(python: str) -> str:
    """Return what prevents torchft from taking part, or an empty string.

    The interpreter must be able to import torchft, and the lighthouse must be beside it.
    """
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torchft') is None)"
    found = subprocess.run([python, "-c", program], cwd=REPOSITORY, check=False, capture_output=True)
    if found.returncode == 0 and _lighthouse(python) is not None:
        return ""
    return f"torchft and its torchft_lighthouse beside {python}; --torchft names another interpreter"


def _lighthouse(python: str) -> str | None:
    return shutil.which("torchft_lighthouse", path=str(Path(python).parent))


def start_torchft(stage: Stage, python: str, shared: Mapping[str, str] = MappingProxyType({})) -> Callable[[int], int]:
    """Start torchft's lighthouse; return a function that starts a rank's worker and returns its pid."""
    lighthouse = _lighthouse(python)
    assert lighthouse is not None, "torchft_needs() was not asked"
    port = free_port()
    # With the 10000 ms of torchft's README, survivors stand still for 10 s.
    flags = ["--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=1000"]
    stage.start(LIGHTHOUSE, [lighthouse, f"--bind=127.0.0.1:{port}", *flags], {})
    wait_until_listening(port, stage)
    command = [python, *worker_module(TORCHFT)[1:]]

    def start(rank: int) -> int:
        variables = {**shared, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "BENCHMARK_RANK": str(rank)}
        return stage.start(worker_name(rank), command, variables).pid

    return start


def recover_torchft(victim: int, rng: random.Random, python: str, within_s: float) -> Restart | None:
    """Kill a rank and restart it at once, as torchft documents; return None if it did not rejoin in time."""
    with Stage() as stage:
        channel = stage.channel
        start = start_torchft(stage, python)
        pids = [start(rank) for rank in range(WORLD_SIZE)]
        wait_until_training(stage, WORLD_SIZE, rng)
        killed_s = time.monotonic()
        stage.end(worker_name(victim))
        pids[victim] = start(victim)

        def recovered() -> bool:
            highest = highest_before(channel, killed_s)
            return all(channel.reached.get(pid, 0) > highest for pid in pids)

        try:
            channel.wait_for(recovered, within_s, "torchft's recovery")
        except TimeoutError:
            return None
        return rejoined(channel, killed_s, frozenset(pids) - {pids[victim]}, pids[victim])


def highest_before(channel: Channel, killed_s: float) -> int:
    """Return the last step before the kill. Call it again later: reports of such steps may still be on their way."""
    return max(one.step or 0 for one in channel.select("stepped") if one.at_s <= killed_s)


def rejoined(channel: Channel, killed_s: float, survivors: frozenset[int], newcomer: int) -> Restart:
    """Evaluate the events of a process that returns to survivors that have not waited for it."""
    new = frozenset({newcomer})
    highest = highest_before(channel, killed_s)

    def first_s(pid: int) -> float:
        steps = channel.select("stepped", since_s=killed_s, pids=frozenset({pid}))
        return min(one.at_s for one in steps if (one.step or 0) > highest) - killed_s

    return Restart(
        asks_s=last_s(channel.select("asks", pids=new)) - killed_s,
        stepped_s=max(map(first_s, survivors)),
        total_s=max(map(first_s, survivors | new)),
        redone_steps=0,  # torchft skips the step that the loss spoiled
    )
