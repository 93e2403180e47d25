"""The command line: ``samebits <subcommand>``, or ``python -m samebits``.

This module holds the table of subcommands, runs the scheduler's service, and turns a :class:`SameBitsError` into a
message and an exit status. Most subcommands are modules of ``samebits.commands``, which are imported when called.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import select
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from samebits import __version__
from samebits.errors import WRONG_WORDS, SameBitsError, StoreError
from samebits.net.descriptors import require_descriptors
from samebits.printable import PrintableStream, raw_of
from samebits.spelling import near_name, spelled
from samebits.store import durable

Arguments = Sequence[str]


def main(argv: Arguments | None = None) -> int:
    """Run one subcommand; return the exit status.

    Args:
        argv: the words after the program's name; None: those of this process.
    """
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without `·` must not make a command fail
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _printable_output():
            try:
                return _run(words)
            finally:
                print(end="", flush=True)
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        # Unsent output would raise again when Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # the reader closed the pipe, as in `samebits steps | head`
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"samebits: {where}{durable.reason_of(error)}", file=sys.stderr, flush=True)
        return StoreError.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _open_standard_streams() -> None:
    """Open ``/dev/null`` for each standard stream that was closed when this process was started.

    Otherwise the next file that is opened, a lock or a log, would get its descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: this stream's
            stream = os.fdopen(null, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else WRONG_WORDS
    if words == ["--version"]:
        print(f"samebits {__version__}")
        return 0
    subcommand = next((entry for entry in SUBCOMMANDS if entry.name == words[0]), None)
    if words[0] in RENAMED:
        again = shlex.join(words[1:])
        print(
            f"samebits: `{words[0]}` was renamed. Fix: samebits {RENAMED[words[0]]} {again}".rstrip(),
            file=sys.stderr,
        )
        return WRONG_WORDS
    if subcommand is None:
        meant = near_name(words[0], (entry.name for entry in SUBCOMMANDS))
        more = f": did you mean {meant}? Fix: samebits --help lists all" if meant else f"\n{_usage()}"
        print(f"samebits: there is no subcommand {words[0]!r}{more}", file=sys.stderr)
        return WRONG_WORDS
    try:
        require_descriptors()
        return subcommand.run(words[1:])
    except SameBitsError as error:
        for line in str(error).splitlines():
            print(f"samebits: {line}", file=sys.stderr, flush=True)
        return error.exit_code


@contextlib.contextmanager
def _printable_output() -> Iterator[None]:
    """Escape control characters in printed text, which may come from another user's file or process."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (None if one is None else PrintableStream(raw_of(one)) for one in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _output_is_closed() -> bool:
    """Return whether the reader of standard output is gone (poll(2))."""
    output = select.poll()
    output.register(sys.stdout, 0)
    return bool(output.poll(0))


# ---- the subcommands


def _scheduler(arguments: Arguments) -> int:
    import argparse

    from samebits import config
    from samebits.config import Role
    from samebits.errors import SettingsError
    from samebits.service import log
    from samebits.service.scheduling.loop import SchedulerService
    from samebits.store.owner import claim_folder

    argparse.ArgumentParser(
        prog="samebits scheduler",
        description="Run the scheduler of the job that the environment variables describe, until the job is over. "
        "Exits with 0 if the job finished. After kill -9, start it again in the same way; no state is lost.",
    ).parse_args(arguments)
    settings, warnings = config.read(role_required=False)
    if settings.role is Role.WORKER:
        raise SettingsError(["ROLE=worker: this command is the scheduler's. Fix: export ROLE=scheduler, or unset it"])
    if settings.role is Role.SCHEDULER:
        settings, warnings = config.read()
    elif not settings.worker_num:
        raise SettingsError(["WORKER_NUM is not set: expected the number of workers. Fix: export WORKER_NUM=4"])
    log.set_up("scheduler")
    for warning in warnings:
        log.warn(warning)

    def claim_logs(job: str, name: str) -> None:
        if settings.enable_recovery and settings.log_dir.is_dir():
            claim_folder(settings.log_dir, job, name)

    service = SchedulerService(replace(settings, role=Role.SCHEDULER), on_job=claim_logs)
    # Ctrl-C reaches a scheduler in a terminal's foreground. If its starter ignores SIGINT, so does the scheduler.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: service.stop("Ctrl-C at the scheduler"))
    signal.signal(signal.SIGTERM, lambda *_: service.abandon())
    ended = service.serve()
    if ended.kind.exit_code:
        log.warn(ended.text)
    return ended.kind.exit_code


def _relay(arguments: Arguments) -> int:
    import argparse

    from samebits import config
    from samebits.option_types import seconds
    from samebits.service import log
    from samebits.service.relay import RelayService

    parser = argparse.ArgumentParser(
        prog="samebits relay",
        description="Pass the messages of this host's workers to the scheduler over one connection, until SIGTERM. "
        "Here and in the workers, SCHED_HOST=relay:127.0.0.1:8119,<the scheduler's host> names both.",
    )
    parser.add_argument("--linger", type=seconds, metavar="S", help="exit after S seconds without a worker")
    options = parser.parse_args(arguments)
    settings, warnings = config.read(role_required=False)
    log.set_up("relay")
    for warning in warnings:
        log.warn(warning)
    service = RelayService(settings, options.linger)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: service.stop())
    service.serve()
    return 0


def _plain(arguments: Arguments) -> int:
    import argparse

    from samebits.service import plain

    parser = argparse.ArgumentParser(
        prog="samebits plain",
        description="Run a script that does not call samebits, and hold the seat of its worker; `samebits run --plain` "
        "starts one such process per worker.",
        usage="%(prog)s -- PROGRAM [arguments ...]",
    )
    if "--" not in arguments[:1]:
        parser.parse_args(arguments)
    if len(arguments) < 2:
        parser.error("no script was given, as in `-- python train.py`")
    return plain.main(arguments[1:])


def _in(module: str) -> Callable[[Arguments], int]:
    """Return a subcommand whose module is imported when it is called."""

    def run(arguments: Arguments) -> int:
        return int(importlib.import_module(f"samebits.{module}").main(arguments))

    return run


def _history(arguments: Arguments) -> int:
    named = {word.partition("=")[0] for word in arguments}
    module = "dashboard.report" if "--html" in named else "commands.otel" if "--otel" in named else "commands.history"
    return _in(module)(arguments)


@dataclass(frozen=True, slots=True)
class Subcommand:
    """An entry of the table of subcommands.

    Attributes:
        run: called with the words after the subcommand's name; returns the exit status.
        is_shown: whether ``--help`` lists the subcommand; hidden ones are called by scripts and containers.
    """

    name: str
    summary: str
    run: Callable[[Arguments], int]
    is_shown: bool = True


SUBCOMMANDS = (
    Subcommand("run", "start a job here and follow it to its end", _in("commands.run.command")),
    Subcommand("recover", "restart the missing processes of the job here, and follow it", _in("commands.recover")),
    Subcommand("scheduler", "serve as a job's scheduler", _scheduler),
    Subcommand(
        "relay", "pass this host's workers' messages to the scheduler over one connection", _relay, is_shown=False
    ),
    Subcommand("status", "show the job's state; --json for programs", _in("commands.status")),
    Subcommand(
        "history", "show what happened, each recovery, and where the time went; --html, --otel, --follow", _history
    ),
    Subcommand("dashboard", "serve a page that shows the job during and after its run", _in("dashboard.command")),
    Subcommand(
        "drill", "run a script with and without faults, and compare the final bits", _in("commands.drill.command")
    ),
    Subcommand(
        "cluster", "simulate several hosts on this machine; cut off, kill and heal them", _in("commands.cluster")
    ),
    Subcommand("follow", "follow the job to its end; Ctrl-C ends the job", _in("commands.follow")),
    Subcommand("ps", "list the job's processes on this machine; --json for programs", _in("commands.ps")),
    Subcommand(
        "stack",
        "show which line of the script each local worker executes, and its threads",
        _in("commands.stack"),
    ),
    Subcommand("logs", "show the last lines of the logs; -f follows them", _in("commands.logs")),
    Subcommand(
        "probe",
        "report whether a process of the job is alive or ready, for Kubernetes",
        _in("commands.probe"),
        is_shown=False,
    ),
    Subcommand(
        "keep",
        "run a process in a container, and restart it while that can help",
        _in("commands.keep"),
        is_shown=False,
    ),
    Subcommand(
        "slurm",
        "for scripts/slurm: print the placement of processes in a Slurm allocation",
        _in("hosts.slurm"),
        is_shown=False,
    ),
    Subcommand("stop", "stop the job; `recover` continues it", _in("commands.stop")),
    Subcommand("drain", "make workers, or all workers of a host, leave at their next commit", _in("commands.drain")),
    Subcommand("scale", "change the number of workers", _in("commands.scale")),
    Subcommand("autoscale", "adapt the number of workers to the load", _in("commands.autoscale")),
    Subcommand(
        "clean", "free memory and folders that this folder's jobs left behind; asks first", _in("commands.clean")
    ),
    Subcommand("ckpt", "list, verify, show or export checkpoints", _in("commands.ckpt.command")),
    Subcommand("steps", "show step logs, and the first step at which two differ", _in("commands.steps")),
    Subcommand("plain", "run a script that does not call samebits, as one worker", _plain, is_shown=False),
    Subcommand("ranktable", "check, create and join Ascend's rank tables", _in("hosts.rank_table")),
    Subcommand("explain", "print the meaning of variables, exit codes and causes", _in("commands.explain")),
    Subcommand("doctor", "check this machine for what a job needs", _in("commands.doctor")),
)

RENAMED = {
    "add": "scale --add",
    "remove": "scale --remove",
    "report": "history --html",
    "trace": "history --otel",
    "env": "explain variables",
    "exit-codes": "explain exit-codes",
    "causes": "explain causes",
}
"""Subcommands of earlier releases, and their replacements."""


def _usage() -> str:
    shown = [entry for entry in SUBCOMMANDS if entry.is_shown]
    width = max(len(entry.name) for entry in shown)
    rows = "\n".join(f"  {entry.name:<{width}}  {entry.summary}" for entry in shown)
    usage = "usage: samebits <subcommand> [--help]\n       samebits --version"
    return f"{usage}\n\nA job is started with {spelled('run')}.\n\n{rows}"


if __name__ == "__main__":
    sys.exit(main())
