"""Detect that this worker's machine will be preempted, by running a user's command periodically.

Clouds announce a preemption through a metadata server, clusters through a file or a node's label, so a user's command
decides. Exit status 0 means that a preemption was announced. A command that fails, hangs or does not exist does not
count as an announcement, and the problem is logged once. An announcement is handled like SIGTERM.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable

from samebits.config import Settings
from samebits.service import log
from samebits.store.child_processes import end_group

EVERY_S = 5.0
TIMEOUT_S = 10.0
_SHELLS_OWN = 126
"""Statuses from here on come from the shell or env: the command cannot be run (127: not found)."""


class PreemptionLook:
    """Runs a command in a separate thread until it announces a preemption.

    Args:
        command: the command, split into words as in a shell but not run by one.
        told: called once, in that thread, with a sentence that gives the reason to leave.
        every_s: seconds between the end of one run and the next.
        timeout_s: how long the command may take.
    """

    def __init__(
        self, command: str, told: Callable[[str], object], every_s: float = EVERY_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._words = shlex.split(command)
        self._told = told
        self._every_s, self._timeout_s = every_s, timeout_s
        self._over = threading.Event()
        self._problem = ""

    @classmethod
    def of(cls, settings: Settings) -> PreemptionLook | None:
        """Return an object that makes this process leave at its next commit; None if not configured."""
        command = settings.preemption_command
        return None if command is None else cls(command, _leave)

    def start(self) -> None:
        """Start a daemon thread."""
        threading.Thread(target=self._run, name="samebits-preemption", daemon=True).start()

    def stop(self) -> None:
        """Stop running the command."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._is_announced():
                self._told(f"this machine is about to be taken away ({self._words[0]}, PREEMPTION_COMMAND)")
                return
            self._over.wait(self._every_s)

    def _is_announced(self) -> bool:
        try:
            status = self._status()
        except subprocess.TimeoutExpired:
            problem = f"has not ended after {self._timeout_s:g} s"
        except (OSError, ValueError) as error:
            problem = f"cannot be run: {error.strerror if isinstance(error, OSError) else error}"
        else:
            if status == 0:
                return True
            problem = _problem_of(status)
        if problem and problem != self._problem:
            log.warn(
                f"PREEMPTION_COMMAND: {self._words[0]} {problem}: until it is repaired, only SIGTERM announces a "
                "preemption to this worker. Fix: have it exit with status 0 if this machine is about to be taken away, "
                "and with 1 otherwise"
            )
        self._problem = problem
        return False

    def _status(self) -> int:
        """Run the command and return its exit status; kill the processes that it leaves behind.

        Raises:
            subprocess.TimeoutExpired: the command hung.
        """
        command = subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        has_ended = end_group(command, self._timeout_s)
        status = command.wait()
        if not has_ended:
            raise subprocess.TimeoutExpired(self._words, self._timeout_s)
        return status


def _problem_of(status: int) -> str:
    """Return the problem that this exit status indicates, or "" if it may simply mean no."""
    if status < 0:
        return f"was killed by signal {-status}"
    return f"ended with status {status}" if status >= _SHELLS_OWN else ""


def _leave(why: str) -> None:
    log.say(f"asked to leave: {why}")
    os.kill(os.getpid(), signal.SIGTERM)  # the main thread decides when it may leave
