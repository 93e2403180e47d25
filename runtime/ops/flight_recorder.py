"""A process's last collectives as a file that torch's own analyser reads (``torchfrtrace``): one a rank, in one folder.

Here lives that format, and nothing that reads it: it is torch's, and a pickle; we write one for who asks for it and
never read any. The names of its fields are those of torch's flight recorder, version 2.10.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from runtime.store import durable, private
from runtime.store.collective_ring import Contents, Launched

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
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            group.name: {"name": group.name, "desc": group.description, "ranks": str(list(group.ranks))}
            for group in contents.groups
        },
        "pg_status": {},
        "entries": [_entry(one) for one in contents.launched],
    }


def _entry(one: Launched) -> dict[str, Any]:
    return {
        "record_id": one.number,
        "pg_id": int(one.group.name) if one.group.name.isdigit() else 0,
        "process_group": (one.group.name, one.group.description),
        "collective_seq_id": one.sequence,
        "p2p_seq_id": 0,
        "op_id": one.sequence,
        "profiling_name": f"{BACKEND}:{one.op}",
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
        "is_p2p": False,
        "frames": [],
    }
