"""``stop``: ends the job gracefully, as Ctrl-C in a follower does, and waits until nothing of it runs here.

Only the subcommand lives here; the ending itself is the follower's. The one idea: there is one way to end a job.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runtime.commands import spelled
from runtime.errors import UsageError
from runtime.ops import kept_start
from runtime.ops.clean import memory_line
from runtime.ops.follow import Follower
from runtime.ops.job_view import EndKind, stored_view
from runtime.ops.local_processes import process_names, read_pid_files
from runtime.ops.scheduler_link import is_listening
from runtime.ops.stop_signals import Signals


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    argparse.ArgumentParser(
        prog="samebits stop",
        description=f"End the job that was started in this folder; {spelled('recover')} goes on from there.",
    ).parse_args(arguments)
    settings = kept_start.settings_here()
    nodes = kept_start.nodes_of(settings.log_dir, settings)
    identities = read_pid_files(settings.log_dir, process_names(nodes)).values()
    if not any(identity.is_alive() for identity in identities) and not is_listening(settings):
        raise UsageError(
            f"nothing of a job runs here: no process named in {settings.log_dir}, no scheduler on "
            f"{settings.sched_host}, SCHED_PORT={settings.sched_port}. Fix: change to the folder the job was started in"
        )
    with Signals() as signals:
        verdict = Follower(settings, signals).run(stop_by="samebits stop").verdict
    view = stored_view(settings.recovery_path)
    memory = memory_line(view.job) if view is not None else ""
    if memory:
        print(f"samebits: {memory}; `samebits clean` frees it")
    return 0 if verdict.kind in (None, EndKind.STOPPED) else verdict.exit_code
