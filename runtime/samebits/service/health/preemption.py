"""Whether this worker's machine is about to be taken away: the user's command is asked every few seconds.

Clouds announce it by a metadata server, clusters by a file or a node's mark, each differently; so it is a command of
the user's, whose status 0 means yes. Here lives the asking, in a thread of its own. Never here: what follows, which is
the same as at SIGTERM. The one idea: a command that fails, hangs or does not exist is no announcement, and is said
once.
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
"""From here on a status is of the shell, or of env: the command cannot be run (127: it is not there)."""


class PreemptionLook:
    """Asks until the answer is yes; ``told`` is then called once, in this object's thread, with a sentence.

    Args:
        command: split into words as a shell does, and read by none.
        told: takes why this worker is to leave.
        every_s: seconds from one answer to the next question.
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
        """This process's, whose main thread then leaves at its next commit; None where there is nothing to ask."""
        command = settings.preemption_command
        return None if command is None else cls(command, _leave)

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="samebits-preemption", daemon=True).start()

    def stop(self) -> None:
        """No further question."""
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
                f"PREEMPTION_COMMAND: {self._words[0]} {problem}: until it is repaired only SIGTERM announces a "
                "preemption to this worker. Fix: let it end with status 0 if this machine is about to be taken away, "
                "with 1 if it is not"
            )
        self._problem = problem
        return False

    def _status(self) -> int:
        """Run the command and return its exit status; what it has started ends with it.

        Raises:
            subprocess.TimeoutExpired: it hung.
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
    """Say what is wrong with a command that ended with this status; empty if it may just have said no."""
    if status < 0:
        return f"was killed by signal {-status}"
    return f"ended with status {status}" if status >= _SHELLS_OWN else ""


def _leave(why: str) -> None:
    log.say(f"asked to leave: {why}")
    os.kill(os.getpid(), signal.SIGTERM)  # the main thread knows when it may
