"""``samebits explain``: print the tables of variables, exit codes and causes, for people, web pages and programs.

These are the tables in use: those of ``samebits.config``, ``samebits.exit_codes`` and ``samebits.core.causes.table``.
"""

from __future__ import annotations

import argparse
import json
import signal
import textwrap
from collections.abc import Sequence

from samebits import config, errors
from samebits.core.causes.table import TABLE, Retry, Row
from samebits.core.hangs import Hang
from samebits.doc_tables import chinese, markdown
from samebits.errors import UsageError
from samebits.exit_codes import EXIT_CODES, ExitCode, exit_code_table, exit_code_table_zh
from samebits.service import cause_file

SAYS: dict[Hang, str] = {
    Hang.STUCK: "worker 2 is in train.py:46 (time.sleep), workers 0 and 1 wait for it in all_reduce #812",
    Hang.BUSY: "worker 2 is in train.py:46 (evaluate) and computes",
    Hang.LOADING: "worker 2 is in train.py:46 (read) and waits for data",
    Hang.SAVING: "worker 2 is in train.py:46 (state.commit) and waits for the disk of CHECKPOINT_PATH",
    Hang.COMPILING: "worker 2 is in train.py:46 (model) and compiles",
    Hang.APART: "worker 2 is in another collective, all_reduce #811",
    Hang.LINK: "all workers wait in the same collective, all_reduce #812, and none leaves it",
    Hang.NOBODY_WAITS: "and no rank waits for another",
}
"""Example messages for a stall that its process reports, after ``no step for 12 s:``."""

_RETRIES = {Retry.YES: "forever", Retry.ONCE: "once", Retry.NO: "no", Retry.OVER: "–"}


def heading(row: Row) -> str:
    """Return a row's fault, class and reaction as one line."""
    return f"{row.fault}: {row.cause.value}; tried again: {_RETRIES[row.retry]}; {_strategies(row)}"


def says(row: Row) -> str:
    """Return an example message for this cause."""
    parts = [SAYS.get(hang, f"it {hang.value}") for hang in sorted(row.hangs, key=lambda one: one.name)]
    parts += [notice.value for notice in row.notices]
    parts += row.texts
    if row.is_out_of_memory:
        parts.append("out of memory (the kernel's limit for its control group, 8.00 GiB)")
    if row.is_failure and not row.texts:
        parts.append("failed at train.py:88: KeyError: 'x'")
    if row.statuses and len(row.statuses) < 256:
        parts += sorted(kind.__name__ for kind in _errors() if kind.exit_code in row.statuses)
    elif row.statuses:
        parts.append("ended with status 3")
    if row.signals:
        names = sorted(signal.Signals(one).name for one in row.signals if len(row.signals) < 9)
        parts += names or ["was killed by signal 9 (SIGKILL)"]
    return " / ".join(parts)


def cause_table() -> str:
    """Return the table of docs/reference/messages.md, one row per cause."""
    head = ("fault", "what the message says", "class", "again?", "what is done", "fix")
    rows = [(row.fault, _quoted(row), row.cause.value, _RETRIES[row.retry], _strategies(row), row.fix) for row in TABLE]
    return markdown(head, [map(_cell, row) for row in rows])


def cause_table_zh() -> str:
    """Return the same table for docs/reference/messages.zh-CN.md."""
    classes, remedies, retries, causes = (chinese(one) for one in ("classes", "remedies", "retries", "causes"))
    rows = []
    for row in TABLE:
        fault, fix = causes[row.fault]
        done = "、".join(remedies[one.name] for one in row.strategies)
        rows.append((fault, _quoted(row), classes[row.cause.name], retries[row.retry.name], done, fix))
    return markdown(chinese("heads")["causes"], [map(_cell, row) for row in rows])


def plain(row: Row) -> dict[str, object]:
    """Return a row as plain values, for programs."""
    return {
        "fault": row.fault,
        "says": says(row),
        "class": row.cause.value,
        "again": _RETRIES[row.retry],
        "strategies": [one.value for one in row.strategies],
        "fix": row.fix,
    }


def _strategies(row: Row) -> str:
    return ", ".join(one.value for one in row.strategies)


def _quoted(row: Row) -> str:
    text = says(row)
    return f"`{text}`" if text else "–"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<pid>", "`<pid>`")


def _errors() -> list[type[errors.SameBitsError]]:
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    return [one for one in kinds if issubclass(one, errors.SameBitsError) and one is not errors.SameBitsError]


_WIDTH = 100
_COLUMNS = ("name", "default", "value", "meaning")
_TOPICS = ("variables", "exit-codes", "causes")


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits explain",
        description="Print every environment variable of a job, the meaning of each exit code, or the causes of "
        "failures and the job's reaction to each, beginning with your own causes (CAUSE_TABLE). A number explains "
        "one exit code, and a variable's name that variable.",
    )
    parser.add_argument("topic", metavar="|".join((*_TOPICS, "CODE", "VARIABLE")))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of JSON objects")
    form.add_argument("--markdown", action="store_true", help="print the table of the page in docs/")
    form.add_argument("--zh", action="store_true", help="print the table of the Chinese page in docs/")
    options = parser.parse_args(arguments)
    if options.topic == "variables":
        _variables(options)
    elif options.topic == "exit-codes":
        _exit_codes(EXIT_CODES, options)
    elif options.topic == "causes":
        _causes(options)
    elif row := next((one for one in config.environment_rows() if one[0] == options.topic.upper()), None):
        _variable(row, options)
    else:
        _exit_codes(_of_number(options.topic, parser), options)
    return 0


def _of_number(text: str, parser: argparse.ArgumentParser) -> tuple[ExitCode, ...]:
    if not (text.isdecimal() and text.isascii() and len(text) <= 3):
        parser.error(f"{text[:40]!r}: expected {', '.join(_TOPICS)}, an exit code or a variable's name")
    found = tuple(one for one in EXIT_CODES if one.code == int(text))
    if not found:
        raise UsageError(
            f"exit code {text} is not a SameBits exit code: it comes from the script, from Python or from a signal "
            "(128 + its number). Fix: read the last lines of the process with `samebits logs`"
        )
    return found


def _variables(options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([dict(zip(_COLUMNS, row, strict=True)) for row in config.environment_rows()]))
    else:
        print(config.environment_table_zh() if options.zh else config.environment_table())


def _variable(row: Sequence[str], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([dict(zip(_COLUMNS, row, strict=True))]))
        return
    name, default, value, meaning = row
    print(f"{name}  default: {default}; value: {value}")
    print(textwrap.fill(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6))


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
        print(cause_table_zh() if options.zh else cause_table())
        return
    settings, _ = config.read(config.whole_environment(), role_required=False)
    rows = (*cause_file.table_of(settings).own, *TABLE)
    if options.json:
        print(json.dumps([plain(row) for row in rows]))
        return
    for row in rows:
        print(heading(row))
        for text in (says(row), row.fix):
            if text:
                print(textwrap.fill(text, _WIDTH, initial_indent="      ", subsequent_indent="      "))
