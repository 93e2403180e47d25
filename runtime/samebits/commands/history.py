"""``samebits history``: print a job's events and their totals."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from samebits import strict_json
from samebits.account.event_log import line_of
from samebits.account.events import EventKind
from samebits.account.history import EventStream, StepColumn, account, line, required_events, summary
from samebits.launcher import job_spec
from samebits.option_types import whole

_QUIET = {EventKind.STEP, EventKind.CARRIED}


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits history",
        allow_abbrev=False,  # --html and --otel in full choose another command before this one parses
        description="Show what happened to this folder's job, or to the job whose RECOVERY_PATH is set: every "
        "decision of its scheduler, every recovery and what it cost, and where the time went.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with the account of time, recoveries and events"
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="keep printing new events until the job is finished; with --json, one object per line",
    )
    parser.add_argument("--html", metavar="FILE", nargs="?", help="write everything to one HTML file instead")
    parser.add_argument("--otel", action="store_true", help="send the history as OpenTelemetry spans instead")
    parser.add_argument("--last", type=whole(), default=200, metavar="N", help="show the last N events (default 200)")
    options = parser.parse_args(arguments)
    settings = job_spec.settings_here(only_looks=True)
    recovery_path, has_steps = settings.recovery_path, not settings.plain
    if options.follow:
        job_spec.require_job(settings)
        return _follow(EventStream(recovery_path), as_json=options.json, has_steps=has_steps)
    events = required_events(recovery_path)
    if options.json:
        told = account(events, has_steps=has_steps)
        print(strict_json.dumps({**told, "events": [event.plain() for event in events]}))
        return 0
    column = StepColumn()
    steps = [column.of(event) for event in events]
    shown = [one for one in zip(events, steps, strict=True) if one[0].kind not in _QUIET]
    if len(shown) > options.last > 0:
        print(f"({len(shown) - options.last} earlier events; --last shows more)")
    for event, step in shown[-options.last :] if options.last > 0 else []:
        print(line(event, step=step if has_steps else None))
    for text in summary(events, has_steps=has_steps):
        print(text)
    return 0


def _follow(stream: EventStream, *, as_json: bool, has_steps: bool) -> int:
    column = StepColumn()
    for event in stream.all(follows=True):
        step = column.of(event)
        if as_json:
            print(line_of(event), flush=True)
        elif event.kind not in _QUIET:
            print(line(event, step=step if has_steps else None), flush=True)
    return 0
