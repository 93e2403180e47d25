"""``run``: starts a job on this machine and follows it to its end; scripts/run.sh calls it.

Only the order of things lives here: what a start needs is ``prepare``'s, starting is ``spawning``'s, the rest is the
follower's. The one idea: nothing runs before everything is checked, and from the first process on whoever asks to stop
is heard, so that nothing that is started can be forgotten.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runtime import config
from runtime.config import Settings
from runtime.errors import SameBitsError
from runtime.ops import kept_start, prepare
from runtime.ops.follow import Follower, Signals
from runtime.ops.local_processes import SCHEDULER, end, name_of
from runtime.ops.log_ends import LogEnds
from runtime.ops.prepare import Ready
from runtime.ops.spawning import Program, StartLock, hear_signals, launch, reserved
from runtime.store.process_identity import ProcessIdentity

TERM_GRACE_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits run",
        description="Check that a job may start in this folder with this environment, move a finished job's folders "
        "aside, start its workers and its scheduler on this machine, and follow it to its end. scripts/run.sh calls "
        "it, with the environment completed.",
    )
    parser.add_argument("--fresh", action="store_true", help="move an unfinished job's folders aside as well")
    parser.add_argument("--detach", action="store_true", help="leave the job to itself once it is started")
    parser.usage = "%(prog)s [--fresh] [--detach] -- SCRIPT [ARGUMENTS ...]"
    # Taken apart here: what belongs to the script is none of the parser's business, whatever it looks like.
    words = list(arguments)
    command = words[words.index("--") + 1 :] if "--" in words else []
    options = parser.parse_args(words[: len(words) - len(command) - 1] if command else words)
    if not command:
        parser.error("which script? expected `-- SCRIPT [ARGUMENTS ...]`")
    hear_signals()
    ready = prepare.read_start(command)
    settings = ready.settings
    with StartLock(settings.log_dir) as lock:
        prepare.prepare(settings, ready.start, fresh=options.fresh)
        logs = LogEnds(settings.log_dir)
        logs.begin_all()
        with Signals() as signals:
            _start(ready)
            lock.release()
            if ready.said:
                prepare.say(ready.said)
            print(
                f"samebits: {_counted(settings)} and a scheduler of '{command[0]}' started; their logs are in "
                f"{settings.log_dir}",
                flush=True,
            )
            if options.detach and not signals.caught:
                return 0
            return Follower(settings, signals, logs=logs).run().verdict.exit_code


def _start(ready: Ready) -> None:
    """Start everything, the scheduler last; where that fails nothing of this new job stays."""
    settings, start = ready.settings, ready.start
    environment = {**config.whole_environment(), **start.environment}
    program = Program(
        start.folder,
        start.interpreter,
        start.script,
        start.args,
        environment,
        only_scheduler={"REBUILD": "0"},  # what begins here is a new job
    )
    names = [*map(name_of, kept_start.first_nodes(settings)), SCHEDULER]
    started: list[ProcessIdentity] = []
    with reserved(settings.log_dir, names) as berths:
        try:
            launch(berths, program, started)
        except SameBitsError:
            prepare.say("the start failed: ending what was started")
            for identity in started:
                end(identity, TERM_GRACE_S)
            raise


def _counted(settings: Settings) -> str:
    workers = f"{settings.worker_num} worker{'s'[: settings.worker_num != 1]}"
    return workers + (f", {settings.spare_num} spare{'s'[: settings.spare_num != 1]}" if settings.spare_num else "")
