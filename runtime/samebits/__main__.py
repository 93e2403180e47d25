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
        description="Serve as the scheduler of the job that the environment describes, until the job is over. Exits "
        "with 0 when the job finished. Its state survives kill -9: start it again in the same way.",
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
    # In a terminal's foreground. If the starter ignores SIGINT for its processes, it stays ignored.
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
    from samebits.service import log
    from samebits.service.relay import RelayService

    argparse.ArgumentParser(
        prog="samebits relay",
        description="Carry the messages of this host's workers over one connection to the scheduler, until SIGTERM. "
        "SCHED_HOST=relay:127.0.0.1:8119,<the scheduler's host> names both, here and in the workers.",
    ).parse_args(arguments)
    settings, warnings = config.read(role_required=False)
    log.set_up("relay")
    for warning in warnings:
        log.warn(warning)
    service = RelayService(settings)
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
        description="Hold the seat of the worker that the environment describes, and run a script that is not ported; "
        "`samebits run --plain` starts one for each worker.",
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
        run: takes the words after its name and returns the exit status.
        is_shown: whether ``--help`` lists it; the others are called by scripts and containers.
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
        "relay", "carry this host's workers' messages over one connection to the scheduler", _relay, is_shown=False
    ),
    Subcommand("status", "show the job's state; --json for programs", _in("commands.status")),
    Subcommand(
        "history", "show what happened, every recovery and where the time went; --html, --otel, --follow", _history
    ),
    Subcommand(
        "dashboard", "serve a page that shows the job, while it runs and after its end", _in("dashboard.command")
    ),
    Subcommand("drill", "run a script with and without faults, and compare the bits", _in("commands.drill.command")),
    Subcommand("cluster", "simulate hosts on this machine; cut them off, kill and heal them", _in("commands.cluster")),
    Subcommand("follow", "follow the job to its end; Ctrl-C ends the job", _in("commands.follow")),
    Subcommand("ps", "list the job's processes on this machine; --json for programs", _in("commands.ps")),
    Subcommand(
        "stack",
        "show each local worker's line of the script, and its threads",
        _in("commands.stack"),
    ),
    Subcommand("logs", "show the ends of the logs; -f follows, a RANK selects one worker", _in("commands.logs")),
    Subcommand(
        "probe",
        "report whether a process of the job is alive or ready, for Kubernetes",
        _in("commands.probe"),
        is_shown=False,
    ),
    Subcommand(
        "keep",
        "run a process in a container, and restart it as long as that can help",
        _in("commands.keep"),
        is_shown=False,
    ),
    Subcommand(
        "slurm",
        "for scripts/slurm: print which process runs where in a Slurm allocation",
        _in("hosts.slurm"),
        is_shown=False,
    ),
    Subcommand("stop", "end the job gracefully; it can be continued later", _in("commands.stop")),
    Subcommand(
        "drain", "have workers, or all of a host, leave at their next commit, and wait for it", _in("commands.drain")
    ),
    Subcommand("scale", "change the number of workers; --add, --remove", _in("commands.scale")),
    Subcommand("autoscale", "size the job by its load and by each worker's gain", _in("commands.autoscale")),
    Subcommand("clean", "free memory and folders that this folder's jobs left, after asking", _in("commands.clean")),
    Subcommand("ckpt", "list, verify, show or export checkpoints, also during training", _in("commands.ckpt.command")),
    Subcommand("steps", "show the step logs, and where two of them differ", _in("commands.steps")),
    Subcommand("plain", "hold a worker's seat for a script that is not ported", _plain, is_shown=False),
    Subcommand("ranktable", "check, make and join Ascend's rank tables", _in("hosts.rank_table")),
    Subcommand("explain", "print every variable, exit code and cause, and what each means", _in("commands.explain")),
    Subcommand("doctor", "check what a job needs on this machine", _in("commands.doctor")),
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
