"""``python -m tests.mistakes``: make the mistakes; print how soon each was reported, and by which line.

With pytest's arguments (``-k dataloader``) only those. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.shell_job import ROOT
from tests.mistakes.told import PROPERTY, Row

SHOWN = 110


class _Rows:
    """The rows of every test that passed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            told: list[Any] = [row for name, row in report.user_properties if name == PROPERTY]
            self.rows += [Row(**row) for row in told]


def main() -> int:
    """Run the command; return pytest's exit status."""
    _, words = argparse.ArgumentParser(prog="python -m tests.mistakes", description=__doc__).parse_known_args()
    # otherwise the first row's seconds include it
    subprocess.run(["bash", str(ROOT / "scripts" / "setup.sh")], check=True)
    rows = _Rows()
    arguments = [str(Path(__file__).parent), "-q", "-p", "no:cacheprovider", *words]
    status = int(pytest.main(arguments, plugins=[rows]))
    for row in sorted(rows.rows, key=lambda one: -(one.after_s or 0.0)):
        after = "while it runs" if row.after_s is None else f"{row.after_s:6.2f} s after {row.fact}"
        print(f"{after:48} {row.mistake:58} {row.sentence[:SHOWN]}")
    print(json.dumps({"told": [asdict(row) for row in rows.rows], "status": status}))
    return status


if __name__ == "__main__":
    sys.exit(main())
