"""``env``: prints the table of environment variables, the one docs/operating.md shows.

Only the subcommand lives here; the table is ``samebits.config``'s. The one idea: a person at a terminal needs no page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from samebits import config


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(prog="samebits env", description="Print every environment variable a job reads.")
    parser.add_argument("--zh", action="store_true", help="in Chinese")
    options = parser.parse_args(arguments)
    print(config.environment_table_zh() if options.zh else config.environment_table())
    return 0
