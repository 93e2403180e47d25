"""Measure the reuse of compiled code by a second start, a restarted worker and a spare that takes over.

``python -m benchmarks.compiling [--trials N]``. Each trial starts with an empty COMPILE_CACHE_PATH. A job of two
workers and a spare compiles (cold). Its worker 1 is killed, and the spare takes over the rank. The killed worker's node
is restarted as the next spare, which takes over the rank of a second killed worker. Then a second job starts with the
same folder. The floor is a plain process with torch's own cache folder, cold and again. The figure is the wall time of
a process's first step minus its second; hits and misses are inductor's own count.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from benchmarks.processes import Job, Stage, worker_module, worker_name
from benchmarks.report import Progress, Report, median, rounded, spread, table

TRIALS = 3
WITHIN_S = 600.0
COLD, AGAIN = "first start", "second start"
SPARE, RESTARTED = "spare that took over", "restarted worker"
PLAIN_COLD, PLAIN_AGAIN = "plain process", "plain process again"


class Trials:
    """Seconds by kind, and how many graphs were compiled that should have been cached."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.missed = 0

    def note(self, kind: str, text: str | None) -> None:
        seconds, hits, misses = (text or "").split()
        self.seconds[kind].append(float(seconds))
        if kind not in (COLD, PLAIN_COLD):
            self.missed += int(misses) + (int(hits) == 0)


def measure(trials: int, progress: Progress) -> Trials:
    found = Trials()
    for trial in range(trials):
        with Stage() as stage:
            for kind in (PLAIN_COLD, PLAIN_AGAIN):
                variables = {"TORCHINDUCTOR_CACHE_DIR": str(stage.folder / "plain")}
                stage.start("plain", [*worker_module("compiled"), "plain"], variables)
                _take(stage, found, {"plain": kind})
                stage.end("plain")
            progress.say(f"trial {trial + 1} of {trials}: a plain process, twice")
            cache = stage.folder / "compile_cache"
            job = _started(stage, cache, "first")
            stage.start(worker_name(2), [*worker_module("compiled"), "ours"], job.worker_variables(2))
            _take(stage, found, {worker_name(0): COLD, worker_name(1): COLD})
            stage.end(worker_name(1))
            _take(stage, found, {worker_name(2): SPARE})
            progress.say(f"trial {trial + 1} of {trials}: a first start, and a spare")
            job.start_worker(1, "ours")  # a spare from now on
            stage.end(worker_name(2))
            _take(stage, found, {worker_name(1): RESTARTED})
            for name in [*stage.pids()]:
                stage.end(name)
            _started(stage, cache, "second")
            _take(stage, found, {worker_name(0): AGAIN, worker_name(1): AGAIN})
            progress.say(f"trial {trial + 1} of {trials}: a restart, and a second start")
    return found


def _started(stage: Stage, cache: Path, name: str) -> Job:
    folders = {
        "RECOVERY_PATH": str(stage.folder / name / "recovery"),
        "CHECKPOINT_PATH": str(stage.folder / name / "ckpt"),
    }
    job = Job(stage, "compiled", 2, SPARE_NUM="1", COMPILE_CACHE_PATH=str(cache), **folders)
    job.start_scheduler()
    for slot in range(2):
        job.start_worker(slot, "ours")
    return job


def _take(stage: Stage, found: Trials, kinds: dict[str, str]) -> None:
    """Collect the figures of these processes, one from each."""
    stage.channel.wait_for(
        lambda: kinds.keys() <= {one.who for one in stage.channel.select("compiled")}, WITHIN_S, f"{kinds} to compile"
    )
    for moment in stage.channel.take():
        if moment.name == "compiled" and moment.who in kinds:
            found.note(kinds[moment.who], moment.text)


def report(found: Trials) -> Report:
    seconds = {kind: median(values) for kind, values in found.seconds.items()}

    def named(kind: str) -> str:
        return kind.replace(" ", "_") + "_s"

    ours = {named(kind): rounded(seconds[kind]) for kind in (COLD, AGAIN, SPARE, RESTARTED)}
    return Report(
        benchmark="compiling",
        floor={named(kind): rounded(seconds[kind]) for kind in (PLAIN_COLD, PLAIN_AGAIN)},
        peers={},
        ours={**ours, "graphs_compiled_again_count": found.missed},
        ratios={
            "saved_by_second_start": rounded(1 - seconds[AGAIN] / seconds[COLD]),
            "saved_by_spare": rounded(1 - seconds[SPARE] / seconds[COLD]),
            "saved_by_restarted_worker": rounded(1 - seconds[RESTARTED] / seconds[COLD]),
            "saved_by_plain_process": rounded(1 - seconds[PLAIN_AGAIN] / seconds[PLAIN_COLD]),
        },
    )


def people(found: Trials) -> str:
    cold = {kind: median(found.seconds[PLAIN_COLD if kind.startswith("plain") else COLD]) for kind in found.seconds}
    rows = [
        [kind, spread(values), f"{1 - median(values) / cold[kind]:.0%}"]
        for kind, values in sorted(found.seconds.items())
    ]
    return f"seconds of the first step beyond the second: median (lowest–highest)\n{table(['', 's', 'saved'], rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiling", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--trials", type=int, default=TRIALS, help=f"number of trials, each with an empty cache (default: {TRIALS})"
    )
    arguments = parser.parse_args()
    found = measure(arguments.trials, Progress(f"{arguments.trials} trials of two jobs and two plain processes each"))
    report(found).print(people(found))


if __name__ == "__main__":
    main()
