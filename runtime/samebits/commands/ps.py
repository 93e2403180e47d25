"""``samebits ps``: list the job's processes on this machine with node, slot, role, pid and state.

Processes come from this user's pid files; a slot is shown only if the scheduler assigns it to exactly that process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from samebits.account.job_view import JobView, names_spare
from samebits.config import Settings
from samebits.errors import StoreError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.processes import SCHEDULER, is_stopped, name_of, node_of, process_names, read_pid_files
from samebits.launcher.relay_process import RELAY, served_by
from samebits.launcher.scheduler_link import ANSWER_TIMEOUT_S, ask_once, own_job
from samebits.printable import counted
from samebits.service.status import stored_view
from samebits.store.lock import read_holder
from samebits.store.process_identity import ProcessIdentity, host_id


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits ps",
        description="List the processes of the job that was started in this folder, on this machine.",
    )
    parser.add_argument("--json", action="store_true", help="a list of JSON objects instead of a table")
    options = parser.parse_args(arguments)
    settings = job_spec.settings_here()
    names = process_names(job_spec.nodes_of(settings.log_dir, settings))
    try:
        view = ask_once(settings, ANSWER_TIMEOUT_S)
        if view is None or own_job(settings) not in ("", view.job):
            view = stored_view(settings.recovery_path)
    except StoreError:
        view = None
    started = read_pid_files(settings.log_dir, names) or _started_by_others(view, settings)
    rows = rows_of(started, view, settings.max_worker_num) + _relay_rows(settings)
    if not rows and view is None:
        raise UsageError(
            f"no job was started here: LOG_DIR={settings.log_dir} lists no process, and no scheduler answers. Fix: "
            "change to the folder the job was started in"
        )
    if options.json:
        print(json.dumps(rows))
        return 0
    table: list[tuple[str, ...]] = [("node", "slot", "role", "pid", "state")]
    for row in rows:
        serves = f", serves {counted(row['serves'], 'connection')}" if "serves" in row else ""
        table.append((*("–" if row[key] is None else str(row[key]) for key in table[0][:-1]), row["state"] + serves))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _started_by_others(view: JobView | None, settings: Settings) -> dict[str, ProcessIdentity]:
    """Return this host's processes of a job that was started by another launcher, such as torchrun."""
    holder = read_holder(settings.recovery_path)
    found = {} if holder is None or not holder.is_on_this_host() else {SCHEDULER: holder.identity}
    nodes = view.nodes if view is not None else ()
    return found | {name_of(one.node): one.identity for one in nodes if one.host == host_id()}


def _relay_rows(settings: Settings) -> list[dict[str, Any]]:
    """Return the row of this host's relay, which is not a process of the job, with its number of workers."""
    row: dict[str, Any] = {"node": None, "slot": None, "role": RELAY}
    return [
        row | {"pid": one.pid, "started_at": one.started_at, "state": _state(one), "serves": served_by(one)}
        for one in read_pid_files(settings.log_dir, [RELAY]).values()
    ]


def _state(identity: ProcessIdentity) -> str:
    return "gone" if not identity.is_alive() else "stopped" if is_stopped(identity) else "runs"


def rows_of(started: Mapping[str, ProcessIdentity], view: JobView | None, max_world_size: int) -> list[dict[str, Any]]:
    """Return one row for the process that was started last under each name.

    ``slot`` is None for the scheduler, for a spare, and for a process that is no longer part of the job.
    """
    rows = []
    for name, identity in started.items():
        node = node_of(name)
        known = view.node(node) if view is not None and node is not None else None
        is_seated = known is not None and known.identity == identity
        is_spare = names_spare(node, max_world_size) if known is None or view is None else view.is_spare(node)
        rows.append(
            {
                "node": node,
                "slot": known.slot if known is not None and is_seated else None,
                "role": SCHEDULER if node is None else "spare" if is_spare else "worker",
                "pid": identity.pid,
                "started_at": identity.started_at,
                "state": _state(identity),
            }
        )
    return rows
