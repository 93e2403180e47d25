"""``samebits stack``: show each local worker's line of the script, its threads and its last collectives.

Workers are asked directly, so the command works without a scheduler, and while a worker holds the GIL or waits in a
collective.
The collectives can be written to files for torch's own analyser (``torchfrtrace``).
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from samebits.account.job_view import JobView, PresenceState, WorkerView
from samebits.commands import status
from samebits.errors import UsageError
from samebits.launcher import job_spec
from samebits.option_types import whole
from samebits.service import stacks
from samebits.store import collective_ring, durable, private
from samebits.store.collective_ring import Launched, RecordedCollectives
from samebits.store.process_identity import host_id
from samebits.tracebacks import place_in_dump

VERSION = "2.10"
PREFIX = "rank_"
BACKEND = "gloo"


def keep(folder: Path, contents: RecordedCollectives) -> Path:
    """Write one rank's file, readable by this user only; replaces an earlier file.

    Raises:
        StoreError: the folder cannot be used, or belongs to another user.
    """
    private.make_folder(folder, "--fr")
    path = folder / f"{PREFIX}{contents.rank}"
    durable.write_file_atomically(path, pickle.dumps(dump_of(contents), protocol=2))
    return path


def dump_of(contents: RecordedCollectives) -> dict[str, Any]:
    """Return the content of the file."""
    groups = {group.name: (group.description, group.ranks) for group in contents.groups}
    entries: list[dict[str, Any]] = []
    for since, one in _comparable(contents):
        name, description, ranks, op = _shown(contents.rank, one)
        groups.setdefault(name, (description, ranks))
        entries.append(_entry(since, one, name, description, op))
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(list(ranks))}
            for name, (description, ranks) in groups.items()
        },
        "pg_status": {},
        "entries": entries,
    }


def _comparable(contents: RecordedCollectives) -> Iterator[tuple[int, Launched]]:
    """Yield the launches that other ranks have recorded too, with the number of the preceding world collective.

    By that number, torchfrtrace leaves out launches older than the oldest one that every rank has, because ranks launch
    different numbers of sends. If older launches were overwritten, those before the first world collective are
    therefore left out here. If there is no such collective, sends and receives are left out, and each other launch has
    its own number.
    """
    whole = next((group for group in contents.groups if len(group.ranks) == contents.world_size), None)
    world = [one.group == whole and not one.is_pairwise for one in contents.launched]
    is_whole = bool(contents.launched) and contents.launched[0].number == 0
    since = 0 if is_whole or not any(world) else None
    for one, of_the_world in zip(contents.launched, world, strict=True):
        if of_the_world:
            since = one.sequence
        if any(world):
            if since is not None and (one.sequence or not one.is_pairwise):
                yield since, one
        elif not one.is_pairwise:
            yield one.number, one
        elif is_whole and one.sequence:
            yield 0, one


def _shown(rank: int, one: Launched) -> tuple[str, str, tuple[int, ...], str]:
    """Return name, description and ranks of the group under which a launch is shown, and its operation."""
    group = one.group
    if not one.is_pairwise or one.peer is None:
        return group.name, group.description, group.ranks, one.op
    peer = group.ranks[one.peer]
    sender, receiver = (rank, peer) if one.op == "send" else (peer, rank)
    ranks = tuple(sorted((sender, receiver)))
    at, arrow, to = (sender, "->", receiver) if one.op == "send" else (receiver, "<-", sender)
    op = f"{one.op} {ranks.index(at)}{arrow}{ranks.index(to)}"
    return f"{group.name}:{sender}->{receiver}", f"{group.description}: rank {sender} to {receiver}", ranks, op


def _entry(since: int, one: Launched, group: str, description: str, op: str) -> dict[str, Any]:
    place = one.place
    return {
        "record_id": since,
        "pg_id": int(one.group.name) if one.group.name.isdigit() else 0,
        "process_group": (group, description),
        "collective_seq_id": one.sequence,
        "p2p_seq_id": one.sequence if one.is_pairwise else 0,
        "op_id": one.sequence,
        "profiling_name": f"{BACKEND}:{op}",
        "time_created_ns": one.launched_ns,
        "input_sizes": [list(one.input_shape)],
        "input_dtypes": [one.input_dtype],
        "output_sizes": [list(one.output_shape)],
        "output_dtypes": [one.output_dtype],
        "state": "started" if one.over_ns is None else "completed",
        "time_discovered_started_ns": one.launched_ns,
        "time_discovered_completed_ns": one.over_ns,
        "retired": one.over_ns is not None,
        "timeout_ms": 0,
        "is_p2p": one.is_pairwise,
        "frames": [{"name": place.function, "filename": place.file, "line": place.line}] if place is not None else [],
    }


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits stack",
        description="Show which line of the script each worker on this machine executes, and its threads.",
    )
    parser.add_argument("rank", nargs="?", type=whole(), metavar="RANK", help="show only this worker")
    parser.add_argument(
        "--fr",
        type=Path,
        metavar="FOLDER",
        help="instead, write each worker's last collectives to FOLDER, for torch's `torchfrtrace FOLDER`",
    )
    options = parser.parse_args(arguments)
    view = status.find(job_spec.settings_here())
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
    """Return the workers of the current generation with their ranks."""
    return list(enumerate(worker for worker in view.workers if not worker.is_joining))


def told(rank: int, worker: WorkerView) -> list[str]:
    """Format one worker: where it is, in one line, then the output of Python's fault handler."""
    who = f"worker {worker.node} (rank {rank}, {worker.identity})"
    if worker.presence is not PresenceState.ALIVE:
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
    """Write one worker's last collectives to a file, and return a line about what was written or why not.

    Raises:
        StoreError: the folder cannot be used.
    """
    who = f"worker {worker.node} (rank {rank}, {worker.identity})"
    if worker.presence is PresenceState.ALIVE and worker.host != host_id():
        return _is_elsewhere(who, worker, f"samebits stack {rank} --fr {folder}")
    contents = collective_ring.read(worker.identity)
    if contents is None:
        return f"{who}: it is gone, or keeps no record of its collectives (another user's, or another release)"
    path = keep(folder, contents)
    last = f", the last: {contents.launched[-1]}" if contents.launched else ""
    return f"{who}: {len(contents.launched)} collectives in {path}{last}"


def _is_elsewhere(who: str, worker: WorkerView, command: str) -> str:
    return f"{who}: runs on {worker.host.partition('#')[0]}. Fix: call {command} there"
