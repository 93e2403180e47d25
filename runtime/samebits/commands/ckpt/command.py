"""The command line of ``samebits ckpt``: its four subcommands, their options, and the checkpoint folder.

As with every other command, this is the folder of the job started in the current folder, unless ``--folder`` is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from samebits.commands.ckpt import exporting, listing, verifying
from samebits.commands.ckpt.addressing import Folder
from samebits.errors import UsageError
from samebits.launcher import job_spec

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
            return exporting.run(folder, options.point, options.file, form=options.format, force=options.force)


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
        choices=exporting.FORMATS,
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
