"""``python -m tests.torch_versions [VERSION ...]``: run probes, tests and killed jobs with other torch versions.

Each version gets its own environment below ``--folder``, deleted before the next one is made unless ``--keep`` is
given: those with CUDA take about 7 GB. Prints its progress, then one row per version, and one JSON object last; the
status is 1 if anything failed or a version could not be installed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from samebits.training.torch_private import TRIED
from tests.torch_versions.checks import Row, check
from tests.torch_versions.environment import Environment
from tests.torch_versions.table import table


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_versions", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("versions", nargs="*", type=version, metavar="VERSION", help=f"default: {' '.join(TRIED)}")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where environments are made")
    parser.add_argument("--keep", action="store_true", help="leave them there, and use those that were left there")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    rows = [try_version(one, folder, keeps=arguments.keep) for one in arguments.versions or TRIED]
    print(table(rows))
    print(json.dumps({"versions": [asdict(row) | {"is_fine": row.is_fine} for row in rows]}))
    return 0 if all(row.is_fine for row in rows) else 1


def version(word: str) -> str:
    """Return the version if it may be part of a folder's name."""
    if re.fullmatch(r"\d+(\.\w+)*(\+[\w.]+)?", word) is None:
        raise argparse.ArgumentTypeError(f"{word!r} is no version. Fix: give one such as 2.12.1")
    return word


def try_version(wanted: str, folder: Path, *, keeps: bool) -> Row:
    """Run everything with one version."""
    began_s, row = time.monotonic(), Row(wanted)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f} s] {wanted}: {text}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    prefix = "samebits-torch-"
    own = folder / f"{prefix}{wanted}" if keeps else Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    environment = Environment(own, wanted)
    try:
        row.reason = environment.make(say)
        if row.reason:
            say(f"cannot be installed: {row.reason}")
        else:
            check(environment, row, say)
    finally:
        if not keeps:
            shutil.rmtree(own, ignore_errors=True)
    row.seconds = round(time.monotonic() - began_s, 1)
    say("fine" if row.is_fine else "not fine")
    return row


if __name__ == "__main__":
    sys.exit(main())
