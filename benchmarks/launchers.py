"""Recovery under the launchers that users have: one table from one run.

``python -m benchmarks.launchers [--quick] [--peers PYTHON] [--into docs/launchers.json]``. Under each launcher four
ranks train the MLP of ``workers.mlp``; one rank is killed with ``kill -9``, and then the launcher's coordinator. A rank
has recovered when it has finished a step that no rank had finished before the kill. A launcher that is not installed,
or whose job fails on this machine, is a row with the line that it printed. The floor is the time until the kernel
reports the death of such a process, plus 2.5 steps of plain DDP.

``--into`` stores the rows with the date, and updates what the docs show of them: the table in
docs/explanation/comparison.md, the first rows of the README's table, and the README's chart, each in both languages.
``--pages FILE`` only does the latter.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.moments import Channel
from benchmarks.pictures import redraw
from benchmarks.processes import (
    REPOSITORY,
    Stage,
    free_port,
    processes_below,
    wait_until_listening,
    worker_module,
    worker_name,
)
from benchmarks.recovery_peers import highest_before, start_torchft, torchft_needs
from benchmarks.recovery_report import STEPS_OF_A_SLOWER_MACHINE
from benchmarks.recovery_trials import TRAINING_WITHIN_S, WORLD_SIZE, detection_s, last_s, wait_until_training
from benchmarks.report import MISSING, Progress, Report, median, rounded, table

RECOVERED_WITHIN_S = 60.0
SETTLES_S = 10.0
"""Seconds of training before a kill. Spares get ready in the first half; speed is measured in the second."""
WHOLE_RUN_S = 1500.0
"""One more trial of each launcher begins only if it is likely to end within this time."""
WATCHED_S = 10.0
"""Ranks that make no step for this long after the coordinator was killed count as stopped."""
_SHOWN = 160
_PAGES = ("docs/explanation/comparison.md", "docs/explanation/comparison.zh-CN.md")
_READMES = ("README.md", "README.zh-CN.md")
_FIGURES = "docs/until-stepping.json"
BEGIN, END = "<!-- launchers:begin -->\n", "<!-- launchers:end -->"


def _kill_pid(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Job:
    """A job that runs.

    Attributes:
        coordinator: finds the coordinator's pid.
        kill: kills a rank by its pid; also restarts it if that is the user's task under this launcher.
    """

    coordinator: Callable[[], int]
    kill: Callable[[int], None] = _kill_pid


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to start the job.

    Attributes:
        name: its name in the table.
        start: starts the job on a stage.
        needs: returns what prevents this launcher from taking part, or an empty string.
    """

    name: str
    start: Callable[[Stage, str], Job]
    needs: Callable[[str], str] = lambda python: ""


@dataclass(frozen=True, slots=True)
class Row:
    """One launcher's figures, each None if not measured; ``problem`` is then the line that explains why."""

    total_s: float | None = None
    redone_steps: int | None = None
    step_ms: float | None = None
    trains_without_coordinator: bool | None = None
    problem: str = ""


# --- the launchers ----------------------------------------------------------------------------------------------------


def with_modules(python: str, *names: str) -> str:
    """Return which of these modules an interpreter lacks, or an empty string."""
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
    worker: Sequence[str], backend: str, program: Sequence[str] = ("-m", "torch.distributed.run"), conf: str = ""
) -> Callable[[Stage, str], Job]:
    """Return the starter for torchrun with a rendezvous backend.

    Args:
        worker: the script and its arguments.
        backend: the value of ``--rdzv-backend``.
        program: the arguments of Python that start torchrun.
        conf: the value of ``--rdzv-conf``, in which ``{folder}`` is replaced by the stage's folder.
    """

    def start(stage: Stage, python: str) -> Job:
        port, flags = free_port(), [f"--nproc-per-node={WORLD_SIZE}", "--max-restarts=100"]
        flags += [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark"]
        flags += [f"--rdzv-conf={conf.format(folder=stage.folder)}"] if conf else []
        variables = {**_path(), "REGISTER_COOLDOWN": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [python, *program, *flags, *worker]
        agent = stage.start(backend, command, variables, is_parent=True)
        if backend != "samebits":
            return Job(lambda: agent.pid)
        return Job(lambda: descendant(agent.pid, "samebits scheduler"))

    return start


def torchft(stage: Stage, python: str) -> Job:
    start = start_torchft(stage, python)
    ranks = {start(rank): rank for rank in range(WORLD_SIZE)}

    def restart(pid: int) -> None:
        stage.end(worker_name(ranks[pid]))
        start(ranks[pid])

    return Job(lambda: stage.pids()["lighthouse"], restart)


def _cluster(stage: Stage, python: str) -> str:
    """Start a Ray cluster; return its address."""
    port = free_port()
    command = [python, *worker_module("ray_cluster")[1:], str(port)]
    variables = {**_path(), "RAY_worker_niceness": "0"}  # by default 15, which no other launcher's ranks have
    stage.start("ray-cluster", command, variables, gated=True, is_parent=True)
    wait_until_listening(port, stage)
    return f"127.0.0.1:{port}"


def ray_train(stage: Stage, python: str) -> Job:
    variables = {**_path(), "RAY_ADDRESS": _cluster(stage, python), "RAY_TRAIN_V2_ENABLED": "1"}
    stage.start("ray-train", [python, *worker_module("ray_train")[1:]], variables, is_parent=True)
    return Job(lambda: descendant(stage.pids()["ray-cluster"], "ray::TrainController"))


def ray_samebits(stage: Stage, python: str) -> Job:
    variables = {**_path(), "RAY_ADDRESS": _cluster(stage, python), "REGISTER_COOLDOWN": "0"}
    words = ["--on", "ray", "-n", str(WORLD_SIZE), "--spares", "1", *worker_module("recovery")[1:]]
    stage.start("ray-samebits", [python, "-m", "samebits", "run", *words], variables, is_parent=True)
    wait_until_entered(stage.channel, WORLD_SIZE + 1)
    return Job(lambda: descendant(stage.pids()["ray-cluster"], "samebits scheduler"))


def samebits_run(spares: int, *options: str) -> Callable[[Stage, str], Job]:
    """Return the starter for ``samebits run`` with these options, which give the job this many spares."""

    def start(stage: Stage, python: str) -> Job:
        start_samebits_run(stage, *options)
        wait_until_entered(stage.channel, WORLD_SIZE + spares)
        pid_file = stage.folder / "device" / "scheduler.pid"
        return Job(lambda: int(pid_file.read_text().split()[0]))

    return start


def start_samebits_run(stage: Stage, *options: str) -> None:
    """Start ``samebits run`` with these options."""
    words = ["-n", str(WORLD_SIZE), "--sched-port", str(free_port()), *options, *PORTED]
    stage.start("run", [sys.executable, "-m", "samebits", "run", *words], _path(), is_parent=True)


def wait_until_entered(channel: Channel, processes: int) -> None:
    """Wait until that many processes of ours have entered the job; a spare that has is warm."""

    def have_entered() -> bool:
        return len({one.pid for one in channel.select("enters")}) >= processes

    channel.wait_for(have_entered, TRAINING_WITHIN_S, f"the start of {processes} processes")


def plain(stage: Stage, python: str) -> Job:
    shared = {**_path(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD_SIZE)}
    for rank in range(WORLD_SIZE):
        command = [python, *worker_module("recovery")[1:], "plain"]
        stage.start(worker_name(rank), command, {**shared, "RANK": str(rank)})
    return Job(os.getpid)


_LM_RESILIENCY = """
from lm_resiliency.integrations.torchrun import get_rendezvous_handler_creator
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main

rendezvous_handler_registry.register("lm_resiliency", get_rendezvous_handler_creator())
main()
"""
"""torchrun with that backend, whose entry point in 0.2.0 cannot be called by torch 2.13."""
_LM_CONF = "store_type=tcp,read_timeout=120,lm_resiliency_restart_context_path={folder}/context.json"
UNPORTED, PORTED = worker_module("torchrun")[1:], worker_module("recovery")[1:]
PLAIN = Launcher("plain DDP, without a launcher", plain)
RUN, RUN_WITHOUT_SPARE, PORTED_OURS, RAY_OURS, TORCHRUN, RAY, LM, TORCHFT, NVRX = (
    "samebits run",
    "samebits run --spares 0",
    "torchrun samebits, ported",
    "Ray samebits, one spare",
    "torchrun c10d",
    "Ray Train",
    "lm-resiliency",
    "torchft",
    "NVRx ft_launcher",
)
LAUNCHERS = (
    Launcher(RUN, samebits_run(1)),
    Launcher(RUN_WITHOUT_SPARE, samebits_run(0, "--spares", "0")),
    Launcher(TORCHRUN, torchrun(UNPORTED, "c10d")),
    Launcher("torchrun samebits, unported", torchrun(UNPORTED, "samebits")),
    Launcher(PORTED_OURS, torchrun(PORTED, "samebits")),
    Launcher(RAY, ray_train, lambda python: with_modules(python, "ray.train.torch")),
    Launcher(RAY_OURS, ray_samebits, lambda python: with_modules(python, "ray")),
    Launcher(
        LM,
        torchrun(UNPORTED, "lm_resiliency", ("-c", _LM_RESILIENCY), _LM_CONF),
        lambda python: with_modules(python, "lm_resiliency.integrations.torchrun"),
    ),
    Launcher(TORCHFT, torchft, torchft_needs),
    Launcher(
        NVRX,
        torchrun(UNPORTED, "c10d", ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher")),
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
            job = launcher.start(stage, python)
            wait_until_training(stage, WORLD_SIZE, rng)
            settled_s = time.monotonic() + SETTLES_S
            channel.wait_for(lambda: time.monotonic() >= settled_s, 2 * SETTLES_S, "steady training")
        except (TimeoutError, ChildProcessError) as error:
            return Row(problem=_last_line(stage) or str(error))
        step_ms = _step_ms(channel, settled_s - SETTLES_S / 2)
        if launcher is PLAIN:
            return Row(step_ms=step_ms)
        victim = rng.choice(sorted(channel.reached))
        killed_s = time.monotonic()
        job.kill(victim)
        try:
            channel.wait_for(
                lambda: len(recovered(channel, killed_s, victim)) == WORLD_SIZE, RECOVERED_WITHIN_S, "the recovery"
            )
        except (TimeoutError, ChildProcessError) as error:
            return Row(step_ms=step_ms, problem=str(error))
        total_s, redone = evaluate(channel, killed_s, recovered(channel, killed_s, victim))
        return Row(total_s, redone, step_ms, _outlives(stage, job.coordinator(), stack))


def _step_ms(channel: Channel, since_s: float) -> float:
    """Return the milliseconds from one step to the next, on the rank that was slowest since that time."""
    by_pid: dict[int, list[float]] = {}
    for one in channel.select("stepped", since_s=since_s):
        by_pid.setdefault(one.pid, []).append(one.at_s)
    return max((times[-1] - times[0]) / (len(times) - 1) for times in by_pid.values() if len(times) > 1) * 1e3


def recovered(channel: Channel, killed_s: float, victim: int) -> frozenset[int]:
    """Return the pids of the ranks that have finished a step that no rank had finished before the kill."""
    highest, steps = highest_before(channel, killed_s), channel.select("stepped", since_s=killed_s)
    return frozenset(one.pid for one in steps if (one.step or 0) > highest and one.pid != victim)


def evaluate(channel: Channel, killed_s: float, pids: frozenset[int]) -> tuple[float, int]:
    """Return the seconds until each of these ranks finished a new step, and the number of steps redone."""
    highest, firsts, redone = highest_before(channel, killed_s), [], 0
    for pid in pids:
        earlier = [one.step or 0 for one in channel.select("stepped", pids=frozenset({pid})) if one.at_s <= killed_s]
        steps = channel.select("stepped", since_s=killed_s, pids=frozenset({pid}))
        firsts.append(min((one for one in steps if (one.step or 0) > highest), key=lambda one: one.at_s))
        first = min(one.step or 0 for one in steps)
        if not earlier or first <= max(earlier):  # else a survivor that continued where it was
            redone = max(redone, highest + 1 - first)
    return last_s(firsts) - killed_s, redone


def _outlives(stage: Stage, coordinator: int, stack: contextlib.ExitStack) -> bool:
    """Kill the coordinator; return whether every rank keeps stepping in the same process."""
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


_WORDS = ("training continues", "training stops")


def summary(undisturbed: Sequence[Row], rows: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, Any]]:
    """Return each launcher's figures over its trials, without those that were not measured."""
    plain_ms = [row.step_ms for row in undisturbed if row.step_ms is not None]
    found: dict[str, dict[str, Any]] = {}
    for name, trials in rows.items():
        totals = [row.total_s for row in trials if row.total_s is not None]
        redone = [row.redone_steps for row in trials if row.redone_steps is not None]
        steps = [row.step_ms for row in trials if row.step_ms is not None]
        kept = [row.trains_without_coordinator for row in trials if row.trains_without_coordinator is not None]
        figures: dict[str, Any] = {"trials": len(totals)}
        if totals:
            figures["recovered_s"] = [min(totals), median(totals), max(totals)]
        if redone:
            figures["steps_redone"] = [min(redone), max(redone)]
        if kept:
            figures["trains_without_coordinator"] = all(kept)
        if steps:
            figures["step_ms"] = median(steps)
        if steps and plain_ms:
            figures["speed_vs_plain"] = round(median(plain_ms) / median(steps), 3)
        if problems := [row.problem for row in trials if row.problem]:
            figures["printed"] = f"{len(problems)} of {len(trials)}: {problems[0]}" if totals else problems[0]
        found[name] = figures
    return found


def cells(
    name: str, figures: Mapping[str, Any], words: Sequence[str] = ("training continues", "training stops")
) -> list[str]:
    """Return a launcher's row."""
    low, middle, high = figures.get("recovered_s", (0, 0, 0))
    spread = f"{middle:.3g} s" if figures["trials"] < 2 else f"{middle:.3g} s ({low:.3g}–{high:.3g})"
    least, most = figures.get("steps_redone", (0, 0))
    return [
        name,
        spread if "recovered_s" in figures else "–",
        (f"{least}–{most}" if least != most else f"{least}") if "steps_redone" in figures else "–",
        words[0 if figures["trains_without_coordinator"] else 1] if "trains_without_coordinator" in figures else "–",
        f"{figures['speed_vs_plain']:.2f}" if "speed_vs_plain" in figures else "–",
        figures.get("printed", ""),
    ]


def floor_s(undisturbed: Sequence[Row], detections_s: Sequence[float]) -> float | None:
    """Return the least time that a recovery takes on this machine: the kernel's notice, and 2.5 steps of plain DDP."""
    plain_ms = [row.step_ms for row in undisturbed if row.step_ms is not None]
    if not plain_ms or not detections_s:
        return None
    return rounded(median(detections_s) + STEPS_OF_A_SLOWER_MACHINE * median(plain_ms) / 1e3)


def report(
    undisturbed: Sequence[Row],
    rows: Mapping[str, Sequence[Row]],
    load: tuple[float, ...],
    detections_s: Sequence[float] = (),
) -> tuple[Report, str]:
    """Return the report and the table."""
    found = summary(undisturbed, rows)
    measured = {
        name: {
            key: value[1] if key == "recovered_s" else max(value) if key == "steps_redone" else value
            for key, value in figures.items()
            if key in ("recovered_s", "steps_redone", "step_ms")
        }
        for name, figures in found.items()
    }
    ours = {name: figures for name, figures in measured.items() if "samebits" in name}
    peers = {name: figures or MISSING for name, figures in measured.items() if name not in ours}
    header = ["launcher", "kill → all stepping", "steps redone", "coordinator killed", "steps/s ÷ plain", "printed"]
    plain_ms = [row.step_ms for row in undisturbed if row.step_ms is not None]
    floor: dict[str, Any] = {"plain_step_ms": median(plain_ms)} if plain_ms else {}
    least_s = floor_s(undisturbed, detections_s)
    floor |= {} if least_s is None else {"recovered_s": least_s}
    lines = [*_floor_cells(least_s, "floor"), *(cells(name, figures) for name, figures in found.items())]
    text = table(header, lines) + "\n1, 5 and 15 min load average: " + ", ".join(f"{one:.1f}" for one in load)
    ratios = {f"{name} speed": one["speed_vs_plain"] for name, one in found.items() if "speed_vs_plain" in one}
    return Report("launchers", floor=floor, peers=peers, ours=ours, ratios=ratios), text


def _floor_cells(least_s: float | None, name: str) -> list[list[str]]:
    return [] if least_s is None else [[name, f"{least_s:.3g} s", "0", "–", "1.00", ""]]


# --- the pages --------------------------------------------------------------------------------------------------------


def page_table(stored: Mapping[str, Any], *, is_chinese: bool) -> str:
    """Return the stored run's Markdown table, and a sentence about the run."""
    if is_chinese:
        header = "启动器 | kill 到全部 rank 重新迈步 | 重做的步数 | 协调者被杀 | 步/秒 ÷ 普通 DDP | 它打印的内容"
        words, least = ("训练继续", "训练停止"), "下限：内核报告死亡，再加普通 DDP 的 2.5 步"
        about = "[测量](../launchers.json)于 {date}，{cores} 个核心，负载 {load:.1f}，每行最多 {trials} 次。"
    else:
        header = "launcher | kill → all ranks step | steps redone | coordinator killed | steps/s ÷ plain DDP | printed"
        words, least = _WORDS, "floor: the kernel reports the death, then 2.5 steps of plain DDP"
        about = (
            "[Measured](../launchers.json) on {date}: {cores} cores, load {load:.1f}, at most {trials} trials a row."
        )
    rows = _floor_cells(stored.get("floor_s"), least)
    rows += [cells(name, figures, words) for name, figures in stored["rows"].items()]
    lines = [f"| {header} |", "|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    trials = max((figures["trials"] for figures in stored["rows"].values()), default=0)
    return "\n".join([about.format(**{**stored, "trials": trials}), "", *lines, ""])


def fill_pages(stored: Mapping[str, Any], folder: Path) -> None:
    """Replace what both languages show of a run: the comparison's table, the README's first rows, and its chart."""
    for page in (folder / name for name in _PAGES):
        before, _, rest = page.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(before + BEGIN + page_table(stored, is_chinese="zh-CN" in page.name) + END + after)
    for page in (folder / name for name in _READMES):
        shown = readme_rows(stored, is_chinese="zh-CN" in page.name)
        lines = page.read_text().splitlines(keepends=True)
        page.write_text("".join(shown.get(line.split(" | ")[0], line) for line in lines))
    redraw(folder / _FIGURES, json.dumps(_figures(stored)), stored["date"])


def _figures(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored run in the form of a report's last line, as far as the chart needs it."""
    found = {
        name: {"recovered_s": figures["recovered_s"][1]}
        for name, figures in stored["rows"].items()
        if "recovered_s" in figures
    }
    return {
        "benchmark": "launchers",
        "machine": {"cores": stored["cores"]},
        "versions": {"torch": stored.get("torch", "2.13")},
        "ours": {name: one for name, one in found.items() if "samebits" in name},
        "peers": {name: one for name, one in found.items() if "samebits" not in name},
    }


_README_COLUMNS = (TORCHRUN, TORCHFT, NVRX, LM, RAY)


def readme_rows(stored: Mapping[str, Any], *, is_chinese: bool) -> dict[str, str]:
    """Return the lines of the README's table that come from a run, by their first cell."""
    rows = stored["rows"]
    spare, restart = (
        cells(name, rows.get(name, {"trials": 0}))
        for name in (RUN if RUN in rows else RAY_OURS, RUN_WITHOUT_SPARE if RUN_WITHOUT_SPARE in rows else PORTED_OURS)
    )
    peers = [cells(name, rows.get(name, {"trials": 0})) for name in _README_COLUMNS]
    if is_chinese:
        heads = "到全部 rank 重新迈步", "重做的步数"
        ours = f"有热备 {spare[1]}，无热备 {restart[1]}", f"{spare[2]}；无热备 {restart[2]}"
    else:
        heads = "all ranks step again after", "steps redone"
        ours = f"{spare[1]} with a spare, {restart[1]} without", f"{spare[2]}; {restart[2]} without a spare"
    own = ours[0], spare[2] if spare[2] == restart[2] else ours[1]
    return {
        f"| {head}": f"| {head} | {mine} | " + " | ".join(one[number] for one in peers) + " |\n"
        for number, (head, mine) in enumerate(zip(heads, own, strict=True), 1)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launchers", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one trial of each launcher instead of three")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="measure only launchers whose names contain this text"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed that selects the killed ranks and the times (default: 1)"
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="store the rows in this file, and update the tables in the docs; with --only, keep the file's other rows",
    )
    parser.add_argument(
        "--pages", type=Path, metavar="FILE", help="measure nothing; update the tables in the docs from this file"
    )
    parser.add_argument(
        "--peers",
        type=lambda python: str(Path(shutil.which(python) or python).absolute()),
        default=sys.executable,
        metavar="PYTHON",
        help="Python interpreter in which the other systems are installed (default: this one)",
    )
    arguments = parser.parse_args()
    if arguments.pages is not None:
        fill_pages(json.loads(arguments.pages.read_text()), REPOSITORY)
        return
    undisturbed, rows, detections_s = measured_rows(arguments)
    made, text = report(undisturbed, rows, os.getloadavg(), detections_s)
    if arguments.into is not None:
        document = made.document()
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        machine, versions = document["machine"], document["versions"]
        stored: dict[str, Any] = {"date": today, "cores": machine["cores"], "load": os.getloadavg()[2]}
        earlier = json.loads(arguments.into.read_text())["rows"] if arguments.only and arguments.into.exists() else {}
        found = {**earlier, **summary(undisturbed, rows)}
        stored |= {"torch": versions["torch"], "floor_s": floor_s(undisturbed, detections_s)}
        stored["rows"] = {one.name: found.pop(one.name) for one in LAUNCHERS if one.name in found} | found
        arguments.into.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        fill_pages(stored, REPOSITORY)
    made.print(text)


def measured_rows(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, list[Row]], list[float]]:
    """Run the trials; return the rows of plain DDP, those of each launcher, and the kernel's notices in seconds."""
    rng, progress = random.Random(arguments.seed), Progress(f"{WORLD_SIZE} ranks under each launcher lose one")
    began_s = time.monotonic()
    undisturbed: list[Row] = []
    detections_s: list[float] = []
    rows: dict[str, list[Row]] = {}
    chosen = [one for one in LAUNCHERS if arguments.only in one.name]
    for trial in range(1 if arguments.quick else 3):
        used_s = time.monotonic() - began_s
        if trial and used_s * (trial + 1) / trial > WHOLE_RUN_S:
            break
        undisturbed.append(measure(PLAIN, arguments.peers, rng))
        detections_s.append(detection_s())
        for launcher in chosen:
            earlier = rows.setdefault(launcher.name, [])
            if (
                any(row.problem and row.step_ms is None for row in earlier)
                or sum(bool(row.problem) for row in earlier) > 1
            ):
                continue
            row = measure(launcher, arguments.peers, rng)
            earlier.append(row)
            progress.say(f"trial {trial + 1}, {launcher.name}: {row}")
    return undisturbed, rows, detections_s


if __name__ == "__main__":
    main()
