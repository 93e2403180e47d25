"""``samebits ckpt export``: write one point, or one step of all ranks, as a file or directory for other programs.

An export overwrites nothing without ``--force``, appears completely or not at all, and is never in the checkpoint
folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samebits.commands.ckpt.addressing import Folder
from samebits.commands.ckpt.verifying import ReadProgress
from samebits.commands.ckpt.wording import jsonable, size_text
from samebits.errors import CheckpointError, UsageError
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import FoundPoint

SAFETENSORS, TORCH, DCP = "safetensors", "torch", "dcp"
FORMATS = (SAFETENSORS, TORCH, DCP)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def run(folder: Folder, name: str, file: Path, *, form: str | None, force: bool) -> int:
    """Write the point with this name to the file.

    Raises:
        UsageError: there is no such point, or the file may not be written.
        CheckpointError: the point is damaged, or holds a value that the format cannot store.
        StoreError: a disk error.
    """
    found = folder.the_one_named(name)
    path = file.absolute()
    _require_place(folder, found, path, force=force)
    form = form or (TORCH if path.suffix in TORCH_SUFFIXES else SAFETENSORS)
    if form == DCP:
        from samebits.training.checkpoint.dcp import export_dcp

        points = _of_all_ranks(found) if _is_sharded(found) else [found]
        export_dcp([checkpoints.read(one) for one in points], path)
        size = size_text(sum(one.stat().st_size for one in path.iterdir()))
        print(f"{path}: {size}, {form}, {found.point} of slot {', '.join(str(_slot(one)) for one in points)}, verified")
        return 0
    if form == TORCH:
        from samebits.training.checkpoint.export import export_for_torch

        export_for_torch(checkpoints.read(found), path, replace=force)
    else:
        progress = ReadProgress(found.require_manifest().data_bytes, "exporting")
        checkpoints.export_tensors(found, path, metadata_of(found), replace=force, on_bytes=progress.add)
        progress.clear()
    print(f"{path}: {size_text(path.stat().st_size)}, {form}, {found.point} of slot {_slot(found)}, verified")
    return 0


def _is_sharded(found: FoundPoint) -> bool:
    tree: Any = found.require_manifest().tree
    own = tree.get("own") if isinstance(tree, dict) else None
    return isinstance(own, dict) and bool(own.get("shards"))


def _of_all_ranks(found: FoundPoint) -> list[FoundPoint]:
    """Return every rank's point of this step, in rank order.

    All are needed, because a rank's point contains only its own part of a sharded state.
    """
    wanted = found.require_manifest().header
    root = found.path.parent.parent
    by_rank: dict[int, FoundPoint] = {}
    for slot in checkpoints.slots_in(root):
        directory = checkpoints.rank_directory(root, slot)
        for one in checkpoints.scan(directory, wanted.job):
            header = None if one.manifest is None else one.manifest.header
            if header is not None and (header.point, header.world_size) == (wanted.point, wanted.world_size):
                by_rank[header.rank] = one
    missing = [str(rank) for rank in range(wanted.world_size) if rank not in by_rank]
    if missing:
        raise CheckpointError(
            f"{root} holds no complete checkpoint of {wanted.point} for rank {', '.join(missing)} of "
            f"{wanted.world_size}. The state is sharded, so the checkpoints of all ranks are needed. Fix: copy "
            "all ranks' folders into one, or choose a step that `samebits ckpt ls` shows for every rank"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def metadata_of(found: FoundPoint) -> dict[str, str]:
    """Return the metadata of an exported safetensors file: its origin, and the state's other values, as text."""
    manifest = found.require_manifest()
    header = manifest.header
    return {
        "format": "pt",
        "job": header.job,
        "step": str(header.point.step),
        "generation": str(header.point.generation),
        "rank": str(header.rank),
        "world_size": str(header.world_size),
        "tree": json.dumps(jsonable(manifest.tree), allow_nan=False),
        "layout": json.dumps(jsonable(manifest.layout), allow_nan=False),
    }


def _require_place(folder: Folder, found: FoundPoint, path: Path, *, force: bool) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist. Fix: create it, or choose another path")
    place = path.resolve()
    for ours in (folder.path, found.path):
        if place.is_relative_to(ours):
            raise UsageError(
                f"{path} is inside the checkpoint folder {ours}, which only the job may write. Fix: choose a path "
                "outside it"
            )
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Fix: give the name of a new file")
    if path.exists() and not force:
        raise UsageError(f"{path} already exists. Fix: choose another name, or pass --force")


def _slot(found: FoundPoint) -> int:
    return found.require_manifest().header.slot
