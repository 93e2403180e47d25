"""``stack``: where the job's workers on this machine are, each with its line of the script and all its threads.

Only the table lives here; the question is ``service.stacks``', the collectives are ``store.collective_ring``'s. The one
idea: a worker is asked directly, so it works while the scheduler is away and while a worker holds the GIL or waits in a
collective.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from samebits.errors import UsageError
from samebits.ops import flight_recorder, kept_start, show
from samebits.ops.job_view import JobView, Presence, WorkerView
from samebits.ops.option_types import whole
from samebits.service import stacks
from samebits.store import collective_ring
from samebits.store.process_identity import host_id
from samebits.tracebacks import place_in_dump


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits stack",
        description="Show where the workers on this machine are: the script's line, then every thread.",
    )
    parser.add_argument("rank", nargs="?", type=whole(), metavar="RANK", help="of one worker; else all of them")
    parser.add_argument(
        "--fr",
        type=Path,
        metavar="FOLDER",
        help="instead, write each worker's last collectives there, for `torchfrtrace FOLDER` (torch's flight recorder)",
    )
    options = parser.parse_args(arguments)
    view = JobView.of(show.find(kept_start.settings_here()))
    asked = [(rank, one) for rank, one in ranked(view) if options.rank in (None, rank)]
    if not asked:
        there = ", ".join(str(rank) for rank, _ in ranked(view)) or "none"
        raise UsageError(f"there is no rank {options.rank} in {view}; its ranks are {there}. Fix: samebits stack")
    if options.fr is not None:
        lines = [recorded(rank, worker, options.fr) for rank, worker in asked]
        print("\n".join([*lines, f"torchfrtrace {options.fr} compares them, once the files of all ranks lie there"]))
    else:
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
        return [_is_elsewhere(who, worker, f"samebits stack {rank}")]
    answer = stacks.ask(worker.identity)
    if answer.silence is not None:
        return [f"{who}: {answer.silence.value}"]
    place = place_in_dump(answer.text, Path.cwd()) or "code that is not the script's"
    contents = collective_ring.read(worker.identity)
    last = f"; its last collective: {contents.launched[-1]}" if contents is not None and contents.launched else ""
    return [f"{who} is in {place}{last}", *(f"    {line}" for line in answer.text.splitlines())]


def recorded(rank: int, worker: WorkerView, folder: Path) -> str:
    """Write one worker's last collectives; a line on what was written, or why nothing was.

    Raises:
        StoreError: the folder cannot be used.
    """
    who = f"worker {worker.node} (rank {rank}, {worker.identity})"
    if worker.presence is Presence.ALIVE and worker.host != host_id():
        return _is_elsewhere(who, worker, f"samebits stack {rank} --fr {folder}")
    contents = collective_ring.read(worker.identity)
    if contents is None:
        return f"{who}: it is gone, or keeps no record of its collectives (another user's, or another release)"
    path = flight_recorder.keep(folder, contents)
    last = f", the last: {contents.launched[-1]}" if contents.launched else ""
    return f"{who}: {len(contents.launched)} collectives in {path}{last}"


def _is_elsewhere(who: str, worker: WorkerView, command: str) -> str:
    return f"{who}: runs on {worker.host.partition('#')[0]}. Fix: call {command} there"
