"""``stack``: where the job's workers on this machine are, each with its line of the script and all its threads.

Only the table lives here; the question is ``service.stacks``'. The one idea: a worker is asked directly, so it works
while the scheduler is away and while a worker holds the GIL or waits in a collective.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import UsageError
from runtime.ops import kept_start, show
from runtime.ops.job_view import JobView, Presence, WorkerView
from runtime.service import stacks
from runtime.store.process_identity import host_id
from runtime.tracebacks import place_in_dump


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits stack",
        description="Show where the workers on this machine are: the script's line, then every thread.",
    )
    parser.add_argument("rank", nargs="?", type=int, metavar="RANK", help="of one worker; else all of them")
    options = parser.parse_args(arguments)
    view = JobView.of(show.find(kept_start.settings_here()))
    asked = [(rank, one) for rank, one in ranked(view) if options.rank in (None, rank)]
    if not asked:
        there = ", ".join(str(rank) for rank, _ in ranked(view)) or "none"
        raise UsageError(f"there is no rank {options.rank} in {view}; its ranks are {there}. Fix: samebits stack")
    print("\n".join(line for rank, worker in asked for line in told(rank, worker)))
    return 0


def ranked(view: JobView) -> list[tuple[int, WorkerView]]:
    """The workers of the present generation with their ranks."""
    return list(enumerate(worker for worker in view.workers if not worker.is_joining))


def told(rank: int, worker: WorkerView) -> list[str]:
    """One worker: a line on where it is, then what Python's fault handler wrote."""
    who = f"worker {worker.node} (rank {rank}, {worker.identity})"
    if worker.presence is not Presence.ALIVE:
        return [
            f"{who}: {worker.presence.value}: {worker.reason}" if worker.reason else f"{who}: {worker.presence.value}"
        ]
    if worker.host != host_id():
        host = worker.host.partition("#")[0]
        return [f"{who}: runs on {host}. Fix: call samebits stack {rank} there"]
    answer = stacks.ask(worker.identity)
    if answer.silence is not None:
        return [f"{who}: {answer.silence.value}"]
    place = place_in_dump(answer.text, Path.cwd()) or "code that is not the script's"
    return [f"{who} is in {place}", *(f"    {line}" for line in answer.text.splitlines())]
