"""``samebits logs``: print the last lines of the job's logs, and new lines as they are written."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from samebits.core.replacement_names import root_of
from samebits.errors import UsageError
from samebits.launcher import job_spec
from samebits.launcher.processes import SCHEDULER, name_of, node_of, process_names, replaced_names
from samebits.launcher.worker_logs import LogLines, last_lines, size_of
from samebits.option_types import whole

LOOK_S = 0.2
LAST_LINES = 20


def main(arguments: Sequence[str]) -> int:
    """Run ``logs``."""
    parser = argparse.ArgumentParser(
        prog="samebits logs",
        description="Show the last lines of the logs of this folder's job, or of one worker's log.",
    )
    parser.add_argument("worker", nargs="?", metavar="RANK", help="a worker's NODE_ID, or `scheduler`")
    parser.add_argument("-f", "--follow", action="store_true", help="keep running, and show new lines")
    parser.add_argument("-n", "--lines", type=whole(), default=LAST_LINES, help=f"lines per log (default {LAST_LINES})")
    options = parser.parse_args(arguments)
    settings = job_spec.settings_here(only_looks=True)
    nodes = job_spec.nodes_of(settings.log_dir, settings)
    if options.follow:
        job_spec.require_job(settings)
    elif not any((settings.log_dir / f"{name}.log").exists() for name in process_names(nodes)):
        raise UsageError(f"LOG_DIR={settings.log_dir} holds no log. Fix: change to the folder the job was started in")
    names = _names(settings.log_dir, nodes, options.worker)
    width = max(map(len, names)) if len(names) > 1 else 0
    news = LogLines(settings.log_dir, names)
    for name in names:
        for line in last_lines(settings.log_dir / f"{name}.log", options.lines):
            print(_prefixed(name, line, width))
    while options.follow:
        for name, line in news.take():
            print(_prefixed(name, line, width))
        sys.stdout.flush()
        time.sleep(LOOK_S)
    return 0


def _names(log_dir: Path, nodes: Sequence[str], asked: str | None) -> list[str]:
    """Return the names of the logs to show.

    For a worker, these are its predecessors' logs and its own. Otherwise they are all logs, with a predecessor's in
    place of an empty one.

    Raises:
        UsageError: there is no such worker.
    """
    names, replaced = process_names(nodes), replaced_names(log_dir, nodes)
    if asked == SCHEDULER:
        return [SCHEDULER]
    if asked is None:
        silent = {root_of(node) for node in nodes if not size_of(log_dir / f"{name_of(node)}.log")}
        for name in replaced:
            root = root_of(node_of(name) or "")
            if root in silent and size_of(log_dir / f"{name}.log"):
                silent.discard(root)
                names.append(name)
        return names
    node = node_of(asked) or asked
    found = [name for name in [*reversed(replaced), *names] if node in (node_of(name), root_of(node_of(name) or ""))]
    if not found:
        known = ", ".join(dict.fromkeys(map(root_of, nodes)))
        raise UsageError(f"no log of worker {node!r} here: expected {SCHEDULER}, or one of {known}")
    return found


def _prefixed(name: str, line: str, width: int) -> str:
    return f"[{name}]{'':<{width - len(name)}} {line}" if width else line
