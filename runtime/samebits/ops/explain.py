"""``explain``: print the tables of variables, exit codes and causes, for people, for pages and for programs.

The tables are those that decide: ``samebits.config``'s, ``samebits.exit_codes``' and ``samebits.core.cause_table``'s.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from samebits import config
from samebits.core.cause_table import TABLE
from samebits.errors import UsageError
from samebits.exit_codes import EXIT_CODES, ExitCode, exit_code_table, exit_code_table_zh
from samebits.ops import causes
from samebits.service import cause_file

_WIDTH = 100
_COLUMNS = ("name", "default", "value", "meaning")
_TOPICS = ("variables", "exit-codes", "causes")


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits explain",
        description="Print every environment variable of a job, what each exit code means, or which causes are told "
        "apart and what is done about each; your own causes (CAUSE_TABLE) come first. A number explains one exit code.",
    )
    parser.add_argument("topic", metavar="|".join((*_TOPICS, "CODE")))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of JSON objects, for programs")
    form.add_argument("--markdown", action="store_true", help="as the page in docs/ shows it")
    form.add_argument("--zh", action="store_true", help="as the page in docs/ shows it in Chinese")
    options = parser.parse_args(arguments)
    if options.topic == "variables":
        _variables(options)
    elif options.topic == "exit-codes":
        _exit_codes(EXIT_CODES, options)
    elif options.topic == "causes":
        _causes(options)
    else:
        _exit_codes(_of_number(options.topic, parser), options)
    return 0


def _of_number(text: str, parser: argparse.ArgumentParser) -> tuple[ExitCode, ...]:
    if not (text.isdecimal() and text.isascii() and len(text) <= 3):
        parser.error(f"{text[:40]!r}: expected {', '.join(_TOPICS)} or an exit code")
    found = tuple(one for one in EXIT_CODES if one.code == int(text))
    if not found:
        raise UsageError(
            f"exit code {text} is none of SameBits': the script, Python or a signal (128 + its number) chose it. Fix: "
            "`samebits logs` shows what the process printed last"
        )
    return found


def _variables(options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([dict(zip(_COLUMNS, row, strict=True)) for row in config.environment_rows()]))
    else:
        print(config.environment_table_zh() if options.zh else config.environment_table())


def _exit_codes(shown: Sequence[ExitCode], options: argparse.Namespace) -> None:
    if options.json:
        rows = [{"code": one.code, "name": one.name, "again": one.again.value, "meaning": one.meaning} for one in shown]
        print(json.dumps(rows))
    elif options.markdown or options.zh:
        print(exit_code_table_zh() if options.zh else exit_code_table())
    else:
        width = max(len(one.name) for one in shown)
        print(f"code  {'name':<{width}}  again?")
        for one in shown:
            print(f"{one.code:>4}  {one.name:<{width}}  {one.again.value}")
            print(textwrap.fill(one.meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _causes(options: argparse.Namespace) -> None:
    if options.markdown or options.zh:
        print(causes.cause_table_zh() if options.zh else causes.cause_table())
        return
    settings, _ = config.read(config.whole_environment(), role_required=False)
    rows = (*cause_file.table_of(settings).own, *TABLE)
    if options.json:
        print(json.dumps([causes.plain(row) for row in rows]))
        return
    for row in rows:
        print(causes.heading(row))
        for text in (causes.says(row), row.fix):
            if text:
                print(textwrap.fill(text, _WIDTH, initial_indent="      ", subsequent_indent="      "))
