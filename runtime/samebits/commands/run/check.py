"""``run --check``: find out whether a script would recover exactly, without killing a process.

The script runs as a separate job in separate folders. Its workers compute some steps twice and record the results
(``training.run.retaken_steps``). New processes then repeat the last steps.
This command starts the job, ends it once nothing is left to compare, and reports.

The job's folder is removed unless the check has failed. If this command is killed, the next check removes the folder.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from samebits import config
from samebits.account.event_log import read_events
from samebits.account.events import EventKind
from samebits.commands.drill.command import free_port
from samebits.commands.drill.rehearsal import free_environment
from samebits.commands.run.options import RunRequest
from samebits.commands.run.prepare import require_script, say
from samebits.errors import HiddenStateError, StoreError
from samebits.launcher.interrupts import Signals
from samebits.store import durable
from samebits.store.child_processes import die_with
from samebits.store.process_identity import ProcessIdentity, host_id, read_pid_file
from samebits.store.retaken_report import RetakenReport, read_report

_LOOK_S = 1.0
"""Seconds between two reads of the report, while the job runs and no signal arrives."""
_GRACE_S = 30.0
_REST_S = 30.0
"""Seconds for the rest of the script, once its training function has returned."""
_REMOVAL_S = 10.0
"""Seconds in which the job's last processes, which may still write, must be gone."""
_PREFIX = "samebits-check-"
_LINES = 12
_INTERRUPTED = 130
_SETTINGS = {
    "ENABLE_RECOVERY": "1",
    "HIDDEN_STATE": "check",
    "DIE_WITH_ME": "1",
    "MAX_RESTARTS": "1",
    "REGISTER_COOLDOWN": "0",
    "SHARD_COPY_EVERY": "off",
    "SPARE_NUM": "0",
    "AUDIT": "0",
    "CONSISTENCY": "majority:0",
    "DASHBOARD": "",
    "CLUSTER_SECRET": "",
}
"""Settings of a check's job: only repeated steps are compared, and each worker is replaced once."""


def main(words: Sequence[str], request: RunRequest) -> int:
    """Check the script in this command line.

    Returns:
        0 if every repeated step gave an equal result; the job's own exit code if it ended before that.

    Raises:
        HiddenStateError: a repeated step gave a different result, a value outside the state changed, or nothing could
            be compared.
        UsageError: there is no such script.
    """
    require_script(request)
    _remove_abandoned(Path(tempfile.gettempdir()))
    with Signals((signal.SIGHUP,)) as signals:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        owner = folder / _owner_file()
        durable.replace_note(owner, ProcessIdentity.current().to_line().encode())
        say(
            f"checking {request.script} in a separate job in {folder}. Output, files written elsewhere and data sent "
            "to a tracker are real, as in any job"
        )
        code = 1
        try:
            code = _check(words, request, folder, signals)
        finally:
            if code in (0, _INTERRUPTED):
                _remove(folder)
            else:
                owner.unlink()
                say(f"the check's logs are in {folder / 'device'}")
    return code


def _owner_file() -> str:
    """Return the name of the pid file of a check on this host; process ids of other hosts mean nothing here."""
    return f"owner-{host_id().rpartition('#')[2]}.pid"


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's checks that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, StoreError):  # of another user
            owner = read_pid_file(folder / _owner_file())
            if owner is not None and not owner.is_alive():
                _remove(folder)


def _remove(folder: Path) -> None:
    until_s = time.monotonic() + _REMOVAL_S
    while folder.exists() and time.monotonic() < until_s:
        shutil.rmtree(folder, ignore_errors=True)


def _check(words: Sequence[str], request: RunRequest, folder: Path, signals: Signals) -> int:
    log_dir, output = folder / "device", folder / "follower.log"
    with os.fdopen(durable.create(output), "wb") as log:
        job = subprocess.Popen(
            [sys.executable, "-P", "-m", "samebits", "run", *words_of_job(words, request)],
            env=_environment(config.whole_environment(), folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=functools.partial(die_with, os.getpid()),
            start_new_session=True,  # Ctrl-C reaches only this command, which then ends the job
        )
        try:
            _wait_for_end(job, signals, log_dir)
        finally:
            runs_on = job.poll() is None
            code = _end(job)
    report = read_report(log_dir)
    if report.failure:
        raise HiddenStateError(report.failure)
    if report.named:
        raise HiddenStateError(f"{_counted(report)}; the findings may affect later steps: {report.named}")
    if signals.caught:
        say(f"interrupted: {_counted(report)} until then")
        return _INTERRUPTED
    if report.has_returned and runs_on:
        say(f"the script was still running {_REST_S:g} s after its training function had returned, so it was stopped")
    elif not report.is_over and code != 0:
        say(f"the check's job ended before it was over: {_cause(folder, output)}")
        return code
    if not report.equal:
        why = "; ".join(report.skipped) or "the script ended before its fifth commit"
        fix = "`samebits drill` kills such a job and compares the bits" if report.skipped else "let it train longer"
        raise HiddenStateError(f"no step could be run twice, so there is no result: {why}. Fix: {fix}")
    for skipped in report.skipped:
        say(f"not compared: {skipped}")
    print(
        f"check passed: {_counted(report)}; in steps 1 to {report.steps}, no change was seen that a recovery "
        "would lose",
        flush=True,
    )
    return 0


def _wait_for_end(job: subprocess.Popen[bytes], signals: Signals, log_dir: Path) -> None:
    """Wait until the job ends, nothing is left to compare, the script takes too long, or a signal arrives."""
    ended, until_s = os.pidfd_open(job.pid), math.inf
    try:
        while not (signals.caught or (report := read_report(log_dir)).is_over) and time.monotonic() < until_s:
            if report.has_returned:
                until_s = min(until_s, time.monotonic() + _REST_S)
            if ended in select.select([ended, signals.fileno()], [], [], _LOOK_S)[0]:
                return
    finally:
        os.close(ended)


def _cause(folder: Path, output: Path) -> str:
    """Return why the check's job ended: the last entry of its history, or its follower's last line."""
    with contextlib.suppress(StoreError):
        for event in reversed(read_events(folder / "recovery")):
            if event.kind is EventKind.INTERRUPTED:
                return event.text
    return "\n".join(output.read_text(errors="replace").splitlines()[-_LINES:])


def _counted(report: RetakenReport) -> str:
    if not report.equal:
        return "no step was taken twice"
    text = f"{len(report.equal)} steps were taken twice with equal bits ({_listed(report.equal)})"
    return f"{text}, and {_listed(report.restarted)} once more in new processes" if report.restarted else text


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def words_of_job(words: Sequence[str], request: RunRequest) -> list[str]:
    """Return the arguments of ``samebits run`` without --check, with a free port."""
    own = len(words) - len(request.args)
    return ["--sched-port", str(free_port()), *(one for one in words[:own] if one != "--check"), *words[own:]]


def _environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    folders = {"RECOVERY_PATH": "recovery", "CHECKPOINT_PATH": "ckpt_of_rank", "LOG_DIR": "device"}
    return free_environment(environ) | _SETTINGS | {name: str(folder / one) for name, one in folders.items()}


def _end(job: subprocess.Popen[bytes]) -> int:
    """End the check's job as a user would, and return its exit code."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            job.kill()  # the job's processes end with it (DIE_WITH_ME)
    return job.wait()
