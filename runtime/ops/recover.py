"""``recover``: finds what is gone of the job that was started in this folder, and tells recover.sh what to start.

Asking the scheduler, reading journal and pid files, and ending what is in the way live here; what follows from it is
``recovering``'s. The one idea: everything a process of the job is started with comes from the kept start, nothing from
today's environment, so that the answer is shell text for a shell that knows nothing. But for a secret that was given
by value: that is kept nowhere, so the shell must have it, and it is never printed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence

from runtime import config
from runtime.config import Settings
from runtime.ops import kept_start
from runtime.ops.job_view import JobView, stored_view
from runtime.ops.kept_start import KeptStart
from runtime.ops.local_processes import SCHEDULER, end, is_stopped, process_names, read_pid_files, spoken
from runtime.ops.recovering import Recovery, Remains, plan_recovery
from runtime.ops.scheduler_link import ANSWER_TIMEOUT_S, ask_once, is_listening
from runtime.store.lock import read_holder
from runtime.store.process_identity import ProcessIdentity, host_id

TERM_GRACE_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand: prints shell text that recover.sh evaluates."""
    parser = argparse.ArgumentParser(
        prog="samebits recover",
        description="Say what must be started to bring back the job that was started in this folder, as shell text. "
        "To bring it back type: bash scripts/recover.sh",
    )
    parser.add_argument("--log-dir", action="store_true", help="print that job's log folder and do nothing else")
    options = parser.parse_args(arguments)
    log_dir, kept = kept_start.read_here()
    if options.log_dir:
        print(log_dir)
        return 0
    present, hidden = config.kept_environment(), config.secret_environment()
    secrets = kept_start.secrets_for(kept, {**present, **hidden})
    settings = kept.settings(secrets)
    if is_listening(settings):
        kept_start.require_secrets(kept, secrets)
    recovery = plan_recovery(look(settings))
    if recovery.start:
        kept_start.require_secrets(kept, secrets)
    for line in recovery.lines:
        _say(line)
    for lost in recovery.end:
        _say(f"ending {spoken(lost.name)} ({lost.identity}), which {lost.why}")
        end(lost.identity, TERM_GRACE_S)
    sys.stdout.write(shell_text(kept, recovery, {**present, **hidden}, secrets))
    return 0


def look(settings: Settings) -> Remains:
    """What is left of the job on this machine."""
    nodes = kept_start.nodes_of(settings.log_dir, settings)
    started = read_pid_files(settings.log_dir, process_names(nodes))
    stored = stored_view(settings.recovery_path) if settings.enable_recovery else None
    answer = ask_once(settings, ANSWER_TIMEOUT_S)
    told = JobView.of(answer) if answer is not None else None
    if told is not None and stored is not None and told.job != stored.job:
        _say(f"on SCHED_PORT={settings.sched_port} the scheduler of {told} answers: that is not {stored}")
        told = None
    scheduler = started.get(SCHEDULER)
    if told is None and scheduler is not None and is_stopped(scheduler):
        _say(f"the scheduler ({scheduler}) was stopped and hears nobody: let it go on with kill -CONT {scheduler.pid}")
    holder = read_holder(settings.recovery_path)
    return Remains(
        nodes=nodes,
        recovery=settings.enable_recovery,
        cool_down_s=settings.register_cooldown_s,
        started=started,
        view=told or stored,
        scheduler_serves=told is not None,
        scheduler_holds=holder is not None
        and holder.role.startswith(SCHEDULER)
        and holder.is_on_this_host()
        and holder.identity.is_alive(),
        is_alive=ProcessIdentity.is_alive,
        host=host_id(),
    )


def shell_text(
    kept: KeptStart, recovery: Recovery, present: Mapping[str, str], secrets: Mapping[str, str] | None = None
) -> str:
    """For a shell to evaluate: the job's folder and environment, and what to start in them.

    ``present`` is what the shell's environment says of the names that are kept or hold a secret: whatever the job was
    not started with is taken out. Of ``secrets`` a file's path is printed; a value stays where the shell has it.
    """
    if recovery.over:
        return "exit 0\n"
    secrets = secrets or {}
    surplus = [name for name in present if name not in kept.environment and name not in secrets]
    lines = [f"cd {shlex.quote(str(kept.folder))}"]
    if surplus:
        lines.append(f"unset {' '.join(surplus)}")
    by_value = config.secret_environment(secrets)
    exports = {**kept.environment, **{name: path for name, path in secrets.items() if name not in by_value}}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines += [
        f"interpreter={shlex.quote(kept.interpreter)}",
        f"script={shlex.quote(kept.script)}",
        f"args=({shlex.join(kept.args)})",
        f"gone=({shlex.join(recovery.start)})",
    ]
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    print(f"samebits: {text}", file=sys.stderr, flush=True)
