"""``samebits follow``: follow the job of this folder to its end, from any terminal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from samebits.errors import UsageError
from samebits.launcher import job_spec
from samebits.launcher.follower import Follower, naming_what_runs_on
from samebits.launcher.interrupts import Signals
from samebits.launcher.scheduler_link import ANSWER_TIMEOUT_S, ask_once
from samebits.scheduler_hosts import shown


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits follow",
        description="Follow the job that was started in this folder to its end. Exits with 0 only if the job finished. "
        "Ctrl-C ends the whole job, on a terminal only after a second Ctrl-C; kill -9 of this command does not.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of text")
    options = parser.parse_args(arguments)
    settings = job_spec.settings_here()
    job_spec.require_job(settings)
    if not job_spec.is_job_here(settings) and ask_once(settings, ANSWER_TIMEOUT_S) is None:
        raise UsageError(
            f"no job was started in {Path.cwd()}, and no scheduler answers at "
            f"{shown(settings.sched_host, settings.sched_port)}. Fix: change to the folder the job was started in, or "
            "correct SCHED_HOST and SCHED_PORT"
        )
    with Signals() as signals, naming_what_runs_on(settings):
        return Follower(settings, signals, as_json=options.json).run().verdict.exit_code
