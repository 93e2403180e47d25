"""The lines of a job's logs, as they come: for ``samebits logs``, and for whoever follows a job with ``--tee``.

Reading from where the last reading ended lives here, and the subcommand; never what a line means. The one idea: a line
is given out once it is whole, under the name of the process that wrote it, and what is read at once is bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from samebits.core.lines import root_of
from samebits.errors import UsageError
from samebits.ops import kept_start
from samebits.ops.local_processes import SCHEDULER, name_of, node_of, process_names, replaced_names
from samebits.ops.option_types import whole
from samebits.store import durable

LOOK_S = 0.2
LAST_LINES = 20
_READ_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 16


class LogLines:
    """The logs of some processes, from their present ends on."""

    def __init__(self, log_dir: Path, names: Iterable[str]) -> None:
        self._logs = {name: log_dir / f"{name}.log" for name in names}
        self._offsets = {name: _size(log) for name, log in self._logs.items()}
        self._rests: dict[str, bytes] = {}

    def take(self) -> Iterator[tuple[str, str]]:
        """What was appended since the last call: the process's name, and a line without its end."""
        for name, log in self._logs.items():
            offset = self._offsets[name]
            if _size(log) < offset:
                offset, self._rests[name] = 0, b""  # cut back by somebody
            with contextlib.suppress(OSError), os.fdopen(durable.open_regular(log), "rb") as file:
                file.seek(offset)
                data = file.read(_READ_BYTES)
                self._offsets[name] = offset + len(data)
                *lines, rest = (self._rests.get(name, b"") + data).split(b"\n")
                if len(rest) > _LONGEST_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                self._rests[name] = rest
                yield from ((name, line.decode(errors="replace")) for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Run ``logs``."""
    parser = argparse.ArgumentParser(
        prog="samebits logs",
        description="Show the end of the logs of the job in this folder: all of them, or of one worker.",
    )
    parser.add_argument("worker", nargs="?", metavar="RANK", help="a worker's NODE_ID, or `scheduler`")
    parser.add_argument("-f", "--follow", action="store_true", help="stay and show what is written")
    parser.add_argument("-n", "--lines", type=whole(), default=LAST_LINES, help=f"lines of each (default {LAST_LINES})")
    options = parser.parse_args(arguments)
    settings = kept_start.settings_here(only_looks=True)
    nodes = kept_start.nodes_of(settings.log_dir, settings)
    if not options.follow and not any((settings.log_dir / f"{name}.log").exists() for name in process_names(nodes)):
        raise UsageError(f"LOG_DIR={settings.log_dir} holds no log. Fix: change to the folder the job was started in")
    names = _names(settings.log_dir, nodes, options.worker)
    width = max(map(len, names)) if len(names) > 1 else 0
    news = LogLines(settings.log_dir, names)
    for name in names:
        for line in _last_lines(settings.log_dir / f"{name}.log", options.lines):
            print(_prefixed(name, line, width))
    while options.follow:
        for name, line in news.take():
            print(_prefixed(name, line, width))
        sys.stdout.flush()
        time.sleep(LOOK_S)
    return 0


def _names(log_dir: Path, nodes: Sequence[str], asked: str | None) -> list[str]:
    """Whose logs are shown: of a worker also of those before it in its place; of one that said nothing, the one before.

    Raises:
        UsageError: there is no such worker.
    """
    names, replaced = process_names(nodes), replaced_names(log_dir, nodes)
    if asked == SCHEDULER:
        return [SCHEDULER]
    if asked is None:
        silent = {root_of(node) for node in nodes if not _size(log_dir / f"{name_of(node)}.log")}
        for name in replaced:
            root = root_of(node_of(name) or "")
            if root in silent and _size(log_dir / f"{name}.log"):
                silent.discard(root)
                names.append(name)
        return names
    node = node_of(asked) or asked
    found = [name for name in [*reversed(replaced), *names] if node in (node_of(name), root_of(node_of(name) or ""))]
    if not found:
        known = ", ".join(dict.fromkeys(map(root_of, nodes)))
        raise UsageError(f"there is no log of worker {node!r} here: expected {SCHEDULER}, or one of {known}")
    return found


def _prefixed(name: str, line: str, width: int) -> str:
    return f"[{name}]{'':<{width - len(name)}} {line}" if width else line


def _last_lines(log: Path, count: int) -> list[str]:
    with contextlib.suppress(FileNotFoundError), os.fdopen(durable.open_regular(log), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
        return [line.decode(errors="replace") for line in file.read().splitlines()[-count:]] if count else []
    return []


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0
