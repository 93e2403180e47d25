"""``samebits ckpt show``: print one point's manifest, its tensors, and the state's other values.

Only verified content is shown: the manifest contains its own hash, and the chunks with the data's header are checked.
"""

from __future__ import annotations

import json
import time
from typing import Any

from samebits.commands.ckpt.addressing import Folder
from samebits.commands.ckpt.wording import age_text, jsonable, plain_values, size_text, table
from samebits.printable import counted
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import FoundPoint, TensorEntry


def run(folder: Folder, name: str, *, as_json: bool) -> int:
    """Show the point with this name.

    Raises:
        UsageError: there is no such point.
        CheckpointError: the point is damaged.
    """
    found = folder.the_one_named(name)
    entries = checkpoints.tensor_entries(found)
    print(json.dumps(described(found, entries), allow_nan=False) if as_json else _text(found, entries))
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


def _text(found: FoundPoint, entries: list[TensorEntry]) -> str:
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
