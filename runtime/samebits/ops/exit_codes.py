"""``exit-codes``: prints the table of what a process of ours ends with, for people, for pages and for programs.

Only the printing lives here. The one idea: the table is ``samebits.exit_codes``', and a page holds what this prints.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from samebits.exit_codes import EXIT_CODES, exit_code_table, exit_code_table_zh

_WIDTH = 100


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits exit-codes",
        description="Print what a process of ours ends with, and whether starting the same again can help.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of JSON objects, for programs")
    form.add_argument("--markdown", action="store_true", help="as docs/exit-codes.md has it")
    form.add_argument("--zh", action="store_true", help="as docs/exit-codes.zh-CN.md has it")
    options = parser.parse_args(arguments)
    if options.json:
        rows = [
            {"code": one.code, "name": one.name, "again": one.again.value, "meaning": one.meaning} for one in EXIT_CODES
        ]
        print(json.dumps(rows))
    elif options.markdown or options.zh:
        print(exit_code_table_zh() if options.zh else exit_code_table())
    else:
        width = max(len(one.name) for one in EXIT_CODES)
        print(f"code  {'name':<{width}}  again?")
        for one in EXIT_CODES:
            print(f"{one.code:>4}  {one.name:<{width}}  {one.again.value}")
            print(textwrap.fill(one.meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return 0
