"""A process's last collectives as a file that torch's own analyser reads (``torchfrtrace``): one a rank, in one folder.

Here lives that format, and nothing that reads it: it is torch's, and a pickle; we write one for who asks for it and
never read any. The names of its fields are those of torch's flight recorder, version 2.10. The one idea: torchfrtrace
looks for each number of a group on every rank of it, so what one rank sends to another is shown in a group of the two.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samebits.store import durable, private
from samebits.store.collective_ring import Contents, Launched

VERSION = "2.10"
PREFIX = "rank_"
BACKEND = "gloo"


def keep(folder: Path, contents: Contents) -> Path:
    """Write one rank's file, for this user alone, instead of an earlier one.

    Raises:
        StoreError: the folder cannot be used, or is another user's.
    """
    private.make_folder(folder, "--fr")
    path = folder / f"{PREFIX}{contents.rank}"
    durable.write_file_atomically(path, pickle.dumps(dump_of(contents), protocol=2))
    return path


def dump_of(contents: Contents) -> dict[str, Any]:
    """What the file holds."""
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


def _comparable(contents: Contents) -> Iterator[tuple[int, Launched]]:
    """What other ranks have on record as well, each with the number of the whole world's collective that it follows.

    By that number torchfrtrace leaves out what is older than the oldest that every rank has: ranks launch different
    numbers of sends. So where older ones have given way what comes before the first such collective is left out here;
    where there is none, sends and receives are, and each has its own number.
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
    """Name, description and ranks of the group that it is shown in, and the op."""
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
