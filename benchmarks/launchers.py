"""Recovery under the launchers that users have: one table from one run.

``python -m benchmarks.launchers [--quick] [--peers PYTHON]``. Under each launcher four ranks train the MLP of
``workers.mlp``; one rank is killed with ``kill -9``, and then the launcher's coordinator. A rank has recovered when it
has finished a step that no rank had finished before the kill. A launcher that is not installed, or whose job fails on
this machine, is a row with the line that it printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.moments import Channel
from benchmarks.processes import (
    REPOSITORY,
    Stage,
    free_port,
    processes_below,
    wait_until_listening,
    worker_module,
    worker_name,
)
from benchmarks.recovery_peers import start_torchft, torchft_needs
from benchmarks.recovery_trials import WORLD_SIZE, last_s, wait_until_training
from benchmarks.report import MISSING, Progress, Report, median, table

RECOVERED_WITHIN_S = 120.0
WATCHED_S = 10.0
"""After the coordinator is killed, ranks that make no step for this long do not train."""
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to start the job.

    Attributes:
        name: in the table.
        start: starts the job on a stage; returns a function that finds the coordinator's pid.
        needs: returns what prevents this launcher from taking part, or an empty string.
    """

    name: str
    start: Callable[[Stage, str], Callable[[], int]]
    needs: Callable[[str], str] = lambda python: ""


@dataclass(frozen=True, slots=True)
class Row:
    """One launcher's figures; None if not measured, with the line that says why in ``problem``."""

    total_s: float | None = None
    redone_steps: int | None = None
    step_ms: float | None = None
    trains_without_coordinator: bool | None = None
    problem: str = ""


# --- the launchers ----------------------------------------------------------------------------------------------------


def with_modules(python: str, *names: str) -> str:
    """Return what an interpreter lacks, or an empty string."""
    run = subprocess.run(
        [python, "-c", "; ".join(f"import {name}" for name in names)],
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
    )
    return "" if run.returncode == 0 else run.stderr.strip().splitlines()[-1][:_SHOWN]


def _path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "runtime")])}


def descendant(pid: int, *words: str) -> int:
    """Return the first process below this one whose command line has all the words."""
    for child in processes_below(pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            if all(word in command for word in words):
                return child
    raise LookupError(f"no process below {pid} runs {' '.join(words)}")


def torchrun(
    worker: Sequence[str], backend: str, module: str = "torch.distributed.run"
) -> Callable[[Stage, str], Callable[[], int]]:
    """Return the starter for torchrun with a rendezvous backend."""

    def start(stage: Stage, python: str) -> Callable[[], int]:
        port, flags = free_port(), [f"--nproc-per-node={WORLD_SIZE}", "--max-restarts=100"]
        flags += [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark"]
        variables = {**_path(), "REGISTER_COOLDOWN": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [python, "-m", module, *flags, *worker]
        agent = stage.start(backend, command, variables, is_parent=True)
        if backend != "samebits":
            return lambda: agent.pid
        return lambda: descendant(agent.pid, "samebits", "scheduler")

    return start


def torchft(stage: Stage, python: str) -> Callable[[], int]:
    start = start_torchft(stage, python)
    for rank in range(WORLD_SIZE):
        start(rank)
    return lambda: stage.pids()["lighthouse"]


def _cluster(stage: Stage, python: str) -> str:
    """Start a Ray cluster; return its address."""
    port = free_port()
    command = [python, *worker_module("ray_cluster")[1:], str(port)]
    variables = {**_path(), "RAY_worker_niceness": "0"}  # by default 15, which no other launcher's ranks have
    stage.start("ray-cluster", command, variables, gated=True, is_parent=True)
    wait_until_listening(port, stage)
    return f"127.0.0.1:{port}"


def ray_train(stage: Stage, python: str) -> Callable[[], int]:
    variables = {**_path(), "RAY_ADDRESS": _cluster(stage, python), "RAY_TRAIN_V2_ENABLED": "1"}
    stage.start("ray-train", [python, *worker_module("ray_train")[1:]], variables, is_parent=True)
    return lambda: descendant(stage.pids()["ray-cluster"], "ray::TrainController")


def ray_samebits(stage: Stage, python: str) -> Callable[[], int]:
    variables = {**_path(), "RAY_ADDRESS": _cluster(stage, python), "REGISTER_COOLDOWN": "0"}
    words = ["--on", "ray", "-n", str(WORLD_SIZE), "--spares", "1", *worker_module("recovery")[1:]]
    stage.start("ray-samebits", [python, "-m", "samebits", "run", *words], variables, is_parent=True)
    return lambda: descendant(stage.pids()["ray-cluster"], "samebits", "scheduler")


def plain(stage: Stage, python: str) -> Callable[[], int]:
    shared = {**_path(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD_SIZE)}
    for rank in range(WORLD_SIZE):
        command = [python, *worker_module("recovery")[1:], "plain"]
        stage.start(worker_name(rank), command, {**shared, "RANK": str(rank)})
    return os.getpid


UNPORTED, PORTED = worker_module("torchrun")[1:], worker_module("recovery")[1:]
PLAIN = Launcher("plain DDP, without a launcher", plain)
LAUNCHERS = (
    Launcher("torchrun c10d", torchrun(UNPORTED, "c10d")),
    Launcher("torchrun samebits, unported", torchrun(UNPORTED, "samebits")),
    Launcher("torchrun samebits, ported", torchrun(PORTED, "samebits")),
    Launcher("Ray Train", ray_train, lambda python: with_modules(python, "ray.train.torch")),
    Launcher("Ray samebits, one spare", ray_samebits, lambda python: with_modules(python, "ray")),
    Launcher(
        "lm-resiliency",
        torchrun(UNPORTED, "lm_resiliency"),
        lambda python: with_modules(python, "lm_resiliency.integrations.torchrun"),
    ),
    Launcher("torchft", torchft, torchft_needs),
    Launcher(
        "NVRx ft_launcher",
        torchrun(UNPORTED, "c10d", "nvidia_resiliency_ext.fault_tolerance.launcher"),
        lambda python: with_modules(python, "nvidia_resiliency_ext.fault_tolerance.launcher"),
    ),
)


# --- one row ----------------------------------------------------------------------------------------------------------


def measure(launcher: Launcher, python: str, rng: random.Random) -> Row:
    """Kill a rank of a launcher's job and then its coordinator."""
    if problem := launcher.needs(python):
        return Row(problem=problem)
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(_quiet(Stage()))
        channel = stage.channel
        try:
            coordinator = launcher.start(stage, python)
            steps = wait_until_training(stage, WORLD_SIZE, rng)
        except (TimeoutError, ChildProcessError) as error:
            return Row(problem=_last_line(stage) or str(error))
        step_ms = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1) * 1e3
        if launcher is PLAIN:
            return Row(step_ms=step_ms)
        victim = rng.choice(sorted(channel.reached))
        highest = max(channel.reached.values())
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        try:
            channel.wait_for(
                lambda: len(_beyond(channel, highest, victim)) == WORLD_SIZE, RECOVERED_WITHIN_S, "the recovery"
            )
        except (TimeoutError, ChildProcessError) as error:
            return Row(step_ms=step_ms, problem=str(error))
        total_s, redone = evaluate(channel, highest, killed_s, _beyond(channel, highest, victim))
        return Row(total_s, redone, step_ms, _outlives(stage, coordinator(), stack))


def _beyond(channel: Channel, highest: int, victim: int) -> frozenset[int]:
    return frozenset(pid for pid, step in channel.reached.items() if step > highest and pid != victim)


def evaluate(channel: Channel, highest: int, killed_s: float, pids: frozenset[int]) -> tuple[float, int]:
    """Return the seconds until every rank finished a step beyond ``highest``, and the number of steps redone."""
    firsts = []
    for pid in pids:
        steps = channel.select("stepped", since_s=killed_s, pids=frozenset({pid}))
        firsts.append(min((one for one in steps if (one.step or 0) > highest), key=lambda one: one.at_s))
    resumed = [one.step or 0 for one in channel.select("trains", since_s=killed_s, pids=pids)]
    return last_s(firsts) - killed_s, max(0, highest - min(resumed, default=highest))


def _outlives(stage: Stage, coordinator: int, stack: contextlib.ExitStack) -> bool:
    """Kill the coordinator; return whether every rank keeps stepping in its process."""
    channel = stage.channel
    ranks = frozenset(pid for pid in channel.reached if Path(f"/proc/{pid}").exists())
    for pid in ranks:  # orphans, if the coordinator is their parent
        descriptor = os.pidfd_open(pid)
        stack.callback(os.close, descriptor)
        stack.callback(_kill, descriptor)
    os.kill(coordinator, signal.SIGKILL)
    killed_s = time.monotonic()
    deadline_s = killed_s + WATCHED_S
    while time.monotonic() < deadline_s:
        time.sleep(0.1)
        channel.drain()
    late_s = killed_s + WATCHED_S / 2
    return all(channel.select("stepped", since_s=late_s, pids=frozenset({pid})) for pid in ranks)


def _kill(descriptor: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)


@contextlib.contextmanager
def _quiet(stage: Stage) -> Iterator[Stage]:
    """Close the stage at the end, without printing logs."""
    try:
        yield stage
    finally:
        stage.close()


def _last_line(stage: Stage) -> str:
    """Return the last line with an error in the job's logs."""
    lines = [line.strip() for line in stage.logs().splitlines() if "Error" in line or "error:" in line]
    return lines[-1][:_SHOWN] if lines else ""


# --- the table --------------------------------------------------------------------------------------------------------


def report(undisturbed: Sequence[Row], rows: dict[str, list[Row]], load: tuple[float, ...]) -> tuple[Report, str]:
    """Return the report and the table."""
    plain_ms = [row.step_ms for row in undisturbed if row.step_ms is not None]
    lines, figures = [], {}
    for name, trials in rows.items():
        totals = [row.total_s for row in trials if row.total_s is not None]
        redone = [row.redone_steps for row in trials if row.redone_steps is not None]
        steps = [row.step_ms for row in trials if row.step_ms is not None]
        kept = [row.trains_without_coordinator for row in trials if row.trains_without_coordinator is not None]
        problem = next((row.problem for row in trials if row.problem), "")
        ratio = median(plain_ms) / median(steps) if plain_ms and steps else None
        lines.append(
            [
                name,
                f"{median(totals):.3g} s" if totals else "–",
                f"{min(redone)}–{max(redone)}" if redone else "–",
                ("training continues" if all(kept) else "training stops") if kept else "–",
                f"{ratio:.2f}" if ratio else "–",
                problem or "",
            ]
        )
        measured = {"recovered_s": totals, "steps_redone": redone, "step_ms": steps}
        figures[name] = {key: median(values) for key, values in measured.items() if values}
    ours = {name: figure for name, figure in figures.items() if "samebits" in name}
    peers = {name: figure or MISSING for name, figure in figures.items() if name not in ours}
    header = ["launcher", "kill → all stepping", "steps redone", "coordinator killed", "steps/s ÷ plain", "printed"]
    floor = {"plain_step_ms": median(plain_ms)} if plain_ms else {}
    text = table(header, lines) + "\n1, 5 and 15 min load average: " + ", ".join(f"{one:.1f}" for one in load)
    return Report("launchers", floor=floor, peers=peers, ours=ours, ratios={}), text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launchers", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one trial of each launcher instead of three")
    parser.add_argument("--only", metavar="TEXT", default="", help="only launchers whose names contain this")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the ranks (default: 1)")
    parser.add_argument(
        "--peers",
        type=lambda python: str(Path(shutil.which(python) or python).absolute()),
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter that has the peers (default: this)",
    )
    arguments = parser.parse_args()
    rng, progress = random.Random(arguments.seed), Progress(f"{WORLD_SIZE} ranks under each launcher lose one")
    undisturbed: list[Row] = []
    rows: dict[str, list[Row]] = {}
    chosen = [one for one in LAUNCHERS if arguments.only in one.name]
    for trial in range(1 if arguments.quick else 3):
        undisturbed.append(measure(PLAIN, arguments.peers, rng))
        for launcher in chosen:
            row = measure(launcher, arguments.peers, rng)
            rows.setdefault(launcher.name, []).append(row)
            progress.say(f"trial {trial + 1}, {launcher.name}: {row}")
    made, text = report(undisturbed, rows, os.getloadavg())
    made.print(text)


if __name__ == "__main__":
    main()
