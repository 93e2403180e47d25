"""``samebits ckpt ls`` and ``show``: a table of every rank's points, and one point's manifest, tensors and values.

``show`` prints verified content only: the manifest contains its own hash, and the chunks with the data's header are
checked. The newest point that all ranks have follows the table.
"""

from __future__ import annotations

import json
import time
from typing import Any

from samebits.commands.ckpt.addressing import Folder
from samebits.commands.ckpt.wording import age_text, jsonable, plain_values, size_text, table
from samebits.errors import UsageError
from samebits.printable import counted
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import EntryState, FolderEntry, FoundPoint, TensorEntry

HEAD = ("slot", "step", "generation", "rank", "size", "age", "state")


def run(folder: Folder, *, as_json: bool) -> int:
    """List the folder; return status 0 whatever it contains.

    Raises:
        UsageError: there is no such folder.
    """
    entries = checkpoints.survey(folder.path)
    now_s = time.time()
    if as_json:
        print(json.dumps(_object(folder, entries, now_s), allow_nan=False))
        return 0
    if not entries:
        if not folder.path.is_dir() and not folder.is_plain:
            raise UsageError(f"no folder {folder.path}{folder.elsewhere()}")
        print(f"no points in {folder.path}{folder.elsewhere()}")
        return 0
    print(table([HEAD, *(_row(entry, now_s) for entry in entries)]))
    print("\n".join(_below(folder, entries)))
    return 0


def _row(entry: FolderEntry, now_s: float) -> tuple[str, ...]:
    header, point = entry.header, entry.point
    return (
        str(entry.slot),
        "–" if point is None else str(point.step),
        "–" if point is None else str(point.generation),
        "–" if header is None else f"{header.rank} of {header.world_size}",
        size_text(entry.size_bytes),
        age_text(now_s - entry.changed_at_s),
        entry.state.value + (f": {_short(entry)}" if entry.why else ""),
    )


def _short(entry: FolderEntry) -> str:
    """Return the reason without the directory, which the row already shows."""
    return entry.why.replace(f"{entry.path}: ", "").replace(f"{entry.path}/", "")


def _below(folder: Folder, entries: list[FolderEntry]) -> list[str]:
    counts = {state: sum(entry.state is state for entry in entries) for state in EntryState}
    size = size_text(sum(entry.size_bytes for entry in entries))
    told = [counted(counts[EntryState.WHOLE], "whole point")]
    told += [
        f"{counts[state]} {state.value}" for state in EntryState if counts[state] and state is not EntryState.WHOLE
    ]
    lines = [f"{folder.path}: {', '.join(told)}; {size}"]
    newest = checkpoints.newest_common_point(entries)
    if newest is None:
        lines.append("no point is held by all ranks of its world")
    else:
        lines.append(f"the newest that all {newest[1]} ranks hold: {newest[0]}")
    below = [str(one) for one in checkpoints.folders_with_points(folder.path) if one != folder.path]
    lines += [f"more in {one}: samebits ckpt ls --folder {one}" for one in below]
    return [*lines, "a point counts as whole by its manifest and file sizes; `samebits ckpt verify` reads every byte"]


def _object(folder: Folder, entries: list[FolderEntry], now_s: float) -> dict[str, Any]:
    newest = checkpoints.newest_common_point(entries)
    return {
        "folder": str(folder.path),
        "points": [_fields(entry, now_s) for entry in entries],
        "newest_common": None
        if newest is None
        else {"step": newest[0].step, "generation": newest[0].generation, "world_size": newest[1]},
    }


def _fields(entry: FolderEntry, now_s: float) -> dict[str, Any]:
    header, point = entry.header, entry.point
    return {
        "slot": entry.slot,
        "step": None if point is None else point.step,
        "generation": None if point is None else point.generation,
        "rank": None if header is None else header.rank,
        "world_size": None if header is None else header.world_size,
        "node": None if header is None else header.node,
        "job": None if header is None else header.job,
        "size_bytes": entry.size_bytes,
        "age_s": round(now_s - entry.changed_at_s, 3),
        "state": entry.state.value,
        "why": entry.why,
        "path": str(entry.path),
    }


def show(folder: Folder, name: str, *, as_json: bool) -> int:
    """Show the point with this name.

    Raises:
        UsageError: there is no such point.
        CheckpointError: the point is damaged.
    """
    found = folder.the_one_named(name)
    entries = checkpoints.tensor_entries(found)
    print(json.dumps(described(found, entries), allow_nan=False) if as_json else _description(found, entries))
    return 0


def described(found: FoundPoint, entries: list[TensorEntry]) -> dict[str, Any]:
    """Return everything except the tensors' bytes, as JSON values."""
    manifest = found.require_manifest()
    header = manifest.header
    return {
        "path": str(found.path),
        "job": header.job,
        "step": header.point.step,
        "generation": header.point.generation,
        "rank": header.rank,
        "world_size": header.world_size,
        "slot": header.slot,
        "node": header.node,
        "data_bytes": manifest.data_bytes,
        "chunk_bytes": manifest.chunk_bytes,
        "chunks": len(manifest.chunks),
        "tensors": [
            {"name": one.name, "dtype": one.dtype, "shape": list(one.shape), "bytes": one.end - one.start}
            for one in entries
        ],
        "tree": jsonable(manifest.tree),
        "layout": jsonable(manifest.layout),
    }


def _description(found: FoundPoint, entries: list[TensorEntry]) -> str:
    manifest = found.require_manifest()
    header = manifest.header
    saved_s = time.time() - found.path.stat().st_mtime
    rows = [("tensor", "dtype", "shape", "bytes")]
    rows += [(one.name, one.dtype, str(one.shape), str(one.end - one.start)) for one in entries]
    values = [f"{path} = {text}" for path, text in plain_values(manifest.tree, "state")]
    values += [f"{path} = {text}" for path, text in plain_values(manifest.layout, "layout")]
    return "\n".join(
        [
            f"{header.point}: rank {header.rank} of {header.world_size}, slot {header.slot}, node {header.node}, job "
            f"{header.job}",
            f"{found.path}: {counted(len(entries), 'tensor')}, {size_text(manifest.data_bytes)} in "
            f"{counted(len(manifest.chunks), 'chunk')} of {size_text(manifest.chunk_bytes)}; {age_text(saved_s)} old",
            "",
            table(rows),
            "",
            *values,
        ]
    )
