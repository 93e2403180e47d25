"""Read CAUSE_TABLE, a TOML file with a user's own rows for the table of causes."""

from __future__ import annotations

import re
import signal
import tomllib
from typing import Any

from samebits.config import Settings
from samebits.core.causes.table import DEFAULT, CauseClass, CauseTable, Remedy, Retry, Row
from samebits.core.hangs import Hang
from samebits.errors import SettingsError
from samebits.named_file import read_named_file

MAX_BYTES = 64 << 10
MAX_ROWS = 64
MAX_CHARS = 200
KEYS = ("fault", "error", "exit_status", "signal", "hang", "class", "again", "strategy", "fix")
CONDITIONS = ("error", "exit_status", "signal", "hang")
_CLASSES = {"unknown" if one is CauseClass.UNKNOWN else one.value: one for one in CauseClass}
_RETRIES = {one.name.lower(): one for one in (Retry.YES, Retry.ONCE, Retry.NO)}
_STRATEGIES = {one.value: one for one in Remedy}
_HANGS = {one.name.lower(): one for one in Hang}
_OTHERWISE = dict.fromkeys((Remedy.SPARE, Remedy.SHRINK, Remedy.DRAIN, Remedy.RESTART), (Remedy.RESTART, Remedy.WAIT))
"""Fallback if a job cannot apply the strategy, for example without a spare."""
_HEAD = re.compile(r"^\s*\[\[\s*cause\s*\]\]", re.MULTILINE)
_AT_LINE = re.compile(r" \(at line (\d+), column \d+\)$")


def read_rules(text: str, name: str) -> CauseTable:
    """Return the table of causes, with the rows of this text first.

    Args:
        text: the file's content.
        name: the file's name, for messages.

    Raises:
        SettingsError: the text is invalid.
    """
    if len(text) > MAX_BYTES:
        raise _wrong(name, 1, f"more than {MAX_BYTES} characters", "leave out what is not needed")
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _AT_LINE.search(str(error))
        reason = _AT_LINE.sub("", str(error))
        raise _wrong(name, int(at[1]) if at else text.count("\n") + 1, f"not TOML: {reason}", "correct it") from None
    except RecursionError:
        raise _wrong(name, 1, "too many nested brackets", "correct it") from None
    lines = [text.count("\n", 0, text.index("[[", head.start())) + 1 for head in _HEAD.finditer(text)]
    others = sorted(set(found) - {"cause"})
    if others:
        raise _wrong(
            name, _line_of(text, others[0]), f"{_shown(others[0])} is not known", "write [[cause]] and its keys"
        )
    rows = found.get("cause", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _wrong(name, _line_of(text, "cause"), "`cause` is not a list of tables", "begin each with [[cause]]")
    if len(rows) > MAX_ROWS:
        raise _wrong(name, 1, f"{len(rows)} rows, at most {MAX_ROWS} are read", "leave out what is not needed")
    return CauseTable(tuple(_row(row, name, lines[at] if at < len(lines) else 1) for at, row in enumerate(rows)))


def _row(row: dict[str, Any], name: str, line: int) -> Row:
    unknown = sorted(set(row) - set(KEYS))
    if unknown:
        raise _wrong(name, line, f"the key {_shown(unknown[0])} is not known", f"use only {', '.join(KEYS)}")
    for key in ("fault", "error", "fix"):
        text = row.get(key, "")
        if not isinstance(text, str) or len(text) > MAX_CHARS or not text.isprintable() or (key in row and not text):
            raise _wrong(
                name, line, f"{key} = {_shown(text)}", f"write 1 to {MAX_CHARS} printable characters in quotes"
            )
    if not any(key in row for key in CONDITIONS):
        raise _wrong(name, line, "a row without a condition", f"add one of {', '.join(CONDITIONS)}")
    cause = _one_of(row, "class", _CLASSES, name, line)
    strategy = _one_of(row, "strategy", _STRATEGIES, name, line)
    if cause is None or strategy is None:
        fix = f"add class, one of {', '.join(_CLASSES)}, and strategy, one of {', '.join(_STRATEGIES)}"
        raise _wrong(name, line, "a row without class or strategy", fix)
    hang = _one_of(row, "hang", _HANGS, name, line)
    if hang is not None and strategy in (Remedy.STOP, Remedy.DRAIN, Remedy.SHRINK):
        done = "restart (it is ended and replaced), roll back (the group is formed again) or wait (it is only named)"
        raise _wrong(name, line, f"strategy = {_shown(strategy.value)} of a hang", f"write {done}")
    usual = Retry.ONCE if cause in (CauseClass.SOFTWARE, CauseClass.DATA) and hang is None else Retry.YES
    retry = Retry.NO if strategy is Remedy.STOP else _one_of(row, "again", _RETRIES, name, line) or usual
    return Row(
        fault=row.get("fault", "as in your cause table"),
        cause=cause,
        retry=retry,
        strategies=tuple(dict.fromkeys((strategy, *_OTHERWISE.get(strategy, ())))),
        fix=row.get("fix", ""),
        statuses=_numbers(row, "exit_status", 0, 255, name, line),
        signals=_signals(row, name, line),
        texts=(row["error"],) if "error" in row else (),
        hangs=frozenset() if hang is None else frozenset({hang}),
    )


def _one_of(row: dict[str, Any], key: str, values: dict[str, Any], name: str, line: int) -> Any:
    """Return the value that the key's word selects; None if the key is missing."""
    if key not in row:
        return None
    word = row[key]
    if not isinstance(word, str) or word not in values:
        raise _wrong(name, line, f"{key} = {_shown(word)}", f"write one of {', '.join(values)}")
    return values[word]


def _numbers(row: dict[str, Any], key: str, least: int, most: int, name: str, line: int) -> frozenset[int]:
    if key not in row:
        return frozenset()
    number = row[key]
    if type(number) is not int or not least <= number <= most:
        raise _wrong(name, line, f"{key} = {_shown(number)}", f"write a whole number from {least} to {most}")
    return frozenset({number})


def _signals(row: dict[str, Any], name: str, line: int) -> frozenset[int]:
    word = row.get("signal")
    if not isinstance(word, str):
        return _numbers(row, "signal", 1, 64, name, line)
    if word not in signal.Signals.__members__:
        raise _wrong(name, line, f"signal = {_shown(word)}", "write a signal's name, such as SIGUSR1, or its number")
    return frozenset({int(signal.Signals[word])})


def _line_of(text: str, key: str) -> int:
    found = re.search(rf"^\s*\[*\s*[\"']?{re.escape(key)}", text, re.MULTILINE)
    return 1 if found is None else text.count("\n", 0, found.end()) + 1


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _wrong(name: str, line: int, what: str, fix: str) -> SettingsError:
    return SettingsError([f"CAUSE_TABLE={name}, line {line}: {what}. Fix: {fix}"])


def table_of(settings: Settings) -> CauseTable:
    """Return the cause table of this job.

    Raises:
        SettingsError: the file is missing or invalid.
    """
    path = settings.cause_table
    if path is None:
        return DEFAULT
    fix = "correct the path, or unset CAUSE_TABLE"
    try:
        data = read_named_file(path, MAX_BYTES)
    except OSError as error:
        raise SettingsError([f"CAUSE_TABLE={path}: {error.strerror}. Fix: {fix}"]) from None
    if len(data) > MAX_BYTES:
        raise SettingsError([f"CAUSE_TABLE={path}: more than {MAX_BYTES} bytes. Fix: remove what is not needed"])
    try:
        return read_rules(data.decode(), str(path))
    except UnicodeDecodeError:
        raise SettingsError([f"CAUSE_TABLE={path}: not UTF-8. Fix: save it as UTF-8"]) from None
