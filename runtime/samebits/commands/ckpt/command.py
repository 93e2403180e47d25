"""The command line of ``samebits ckpt``: its four subcommands, their options, and the checkpoint folder.

As with every other command, this is the folder of the job started in the current folder, unless ``--folder`` is given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samebits.commands.ckpt import listing, verifying
from samebits.commands.ckpt.addressing import Folder
from samebits.commands.ckpt.verifying import ReadProgress
from samebits.commands.ckpt.wording import jsonable, size_text
from samebits.errors import CheckpointError, UsageError
from samebits.launcher import job_spec
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import FoundPoint

POINT_HELP = "SLOT/STEP, as `ls` prints it, or a point's directory"
EPILOG = """\
A POINT is SLOT/STEP, as `ls` prints it, or the path of a point's directory.

  samebits ckpt ls [--json]                    list every rank's points, and whether they are complete
  samebits ckpt verify [POINT…]                read every byte of these or all points; exit with 74 if any is damaged
  samebits ckpt show POINT [--json]            show its tensors and values
  samebits ckpt export POINT FILE [--force]    write its tensors as safetensors, or FILE.pt for torch.load
  samebits ckpt export POINT DIR --format dcp  write all ranks' points for torch.distributed.checkpoint.load
  samebits ckpt … --folder FOLDER              read this folder, not that of the job started here
"""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; return the exit status."""
    options = _parser().parse_args(arguments)
    settings = None if options.folder is not None else job_spec.settings_here(only_looks=True)
    below = options.folder if settings is None else settings.checkpoint_path
    if options.folder is None and isinstance(below, str):
        raise UsageError(
            f"CHECKPOINT_PATH={below}: `samebits ckpt` reads local folders only. Fix: copy the objects into a local "
            "folder and name it with --folder; `samebits doctor` checks whether this URL can be listed"
        )
    folder = Folder(Path(below).resolve(), settings is None, settings is not None and settings.plain)
    match options.word:
        case "ls":
            return listing.run(folder, as_json=options.json)
        case "verify":
            return verifying.run(folder, options.points)
        case "show":
            return listing.show(folder, options.point, as_json=options.json)
        case _:
            return export(folder, options.point, options.file, form=options.format, force=options.force)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samebits ckpt",
        description="Inspect checkpoints, also while the job trains. Changes nothing in the checkpoint folder.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = parser.add_subparsers(dest="word", required=True, metavar="ls|verify|show|export")
    ls = _add(
        words, "ls", "List every rank's points. `whole` is judged by manifests and sizes; `verify` reads every byte."
    )
    ls.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    verify = _add(words, "verify", "Compare every byte with what was saved. Exit with 0 only if all points are intact.")
    verify.add_argument("points", nargs="*", metavar="POINT", help=f"{POINT_HELP}; default: all points")
    show = _add(words, "show", "Show a point's job and rank, its tensors, and its other values.")
    show.add_argument("point", metavar="POINT", help=POINT_HELP)
    show.add_argument("--json", action="store_true", help="print one JSON object, with values in full")
    export = _add(words, "export", "Verify a point and write it in a format for other programs.")
    export.add_argument("point", metavar="POINT", help=POINT_HELP)
    export.add_argument(
        "file", metavar="FILE", type=Path, help="the file to write; a name that ends in .pt selects torch's format"
    )
    export.add_argument(
        "--format",
        choices=FORMATS,
        help="safetensors: the tensors by name. torch: the state as nested dictionaries, for torch.load(weights_only="
        "True). dcp: a new directory FILE that torch.distributed.checkpoint.load reads at any world size; a sharded "
        "state is read from all ranks' points of that step. Default: torch if FILE ends in .pt, else safetensors",
    )
    export.add_argument("--force", action="store_true", help="replace FILE if it exists")
    return parser


def _add(words: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    word = words.add_parser(name, help=text.partition(".")[0], description=text)
    word.add_argument(
        "--folder", help="a job's checkpoint folder (default: CHECKPOINT_PATH of the job that was started here)"
    )
    return word


# ---- ``export``: one point, or one step of all ranks, as a file or directory for other programs
#
# An export overwrites nothing without ``--force``, appears completely or not at all, and is never in the checkpoint
# folder.

SAFETENSORS, TORCH, DCP = "safetensors", "torch", "dcp"
FORMATS = (SAFETENSORS, TORCH, DCP)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def export(folder: Folder, name: str, file: Path, *, form: str | None, force: bool) -> int:
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
