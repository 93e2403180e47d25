"""Start workers by forking a process that has already imported torch: the supervisor's end of the link.

A zygote only saves time. If anything differs from what it was started with (interpreter, folder, environment, way), if
a worker's command is not `python script args`, or if anything fails, the worker is started by ``spawning.spawn``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from samebits.ops.local_processes import node_of
from samebits.ops.spawning import OF_ONE_PROCESS, Program, Way, execute, spawn
from samebits.service import fork_orders
from samebits.service.fork_orders import Answer, Order
from samebits.store import private

NAME = "zygote"
ANSWER_S = 10.0  # a fork takes milliseconds; one that takes so long is not waited for any more
_PR_SET_CHILD_SUBREAPER = 36


class Zygote:
    """One host's, and one supervisor's: it ends when that ends.

    Args:
        log_dir: where its few words go.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log = log_dir / f"{NAME}.log"
        self._link: socket.socket | None = None
        self._pid = 0
        self._like: Program | None = None
        self._is_ready = False

    def start(self, program: Program) -> None:
        """Start the zygote for this program's workers, unless it runs; it takes seconds to become ready."""
        if self._link is not None or not _is_forkable(program) or not sys.platform.startswith("linux"):
            return
        ours, its = fork_orders.pair()
        words = [program.interpreter, "-P", "-m", "samebits.training.zygote", str(its.fileno())]
        log = private.open_to_append(self._log)
        its.set_inheritable(True)
        try:
            self._pid = execute(words, shared(program.environment), program.folder, log)
        finally:
            os.close(log)
            its.close()
        self._link, self._like, self._is_ready = ours, program, False

    def spawn(self, program: Program, name: str, log: int) -> int:
        """As ``spawning.spawn``: by a fork where that is the same, else plainly."""
        is_here = node_of(name) not in program.elsewhere
        pid = self._forked(program, name, log) if is_here and self._serves(program) else 0
        return pid or spawn(program, name, log)

    def end(self) -> None:
        """Have it end; what it has forked goes on."""
        if self._link is not None:
            self._link.close()
            self._link = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # this process's own child, not waited for yet: nobody else's pid
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _serves(self, program: Program) -> bool:
        like = self._like
        if self._link is None or like is None:
            return False
        is_like = (program.interpreter, program.folder, program.way) == (like.interpreter, like.folder, like.way)
        return is_like and shared(program.environment) == shared(like.environment) and self._answers(0.0)

    def _answers(self, timeout_s: float) -> bool:
        """Whether it has said that it is ready."""
        if not self._is_ready and self._link is not None and _is_readable(self._link, timeout_s):
            answer = fork_orders.receive_answer(self._link)
            self._is_ready = answer is not None and answer.text == fork_orders.READY
            if not self._is_ready:
                self.end()
        return self._is_ready

    def _forked(self, program: Program, name: str, log: int) -> int:
        """The pid of a worker that is this process's child and leads a session; 0 where there is none."""
        order = Order(
            str(program.folder), program.interpreter, program.script, program.args, program.environment_of(name)
        )
        answer: Answer | None = None
        assert self._link is not None
        try:
            with _as_subreaper():
                fork_orders.send_order(self._link, order, log)
                if _is_readable(self._link, ANSWER_S):
                    answer = fork_orders.receive_answer(self._link)
        except OSError:
            answer = None
        if answer is None:
            self.end()  # else it might answer late, with a second process of this name
        return 0 if answer is None else answer.pid


def _is_forkable(program: Program) -> bool:
    """Return whether its workers' command is all that a fork can become: `python script args`.

    A module, a program, and the launcher that holds a plain script's seat are other commands.
    """
    return program.worker_words() == Way.SCRIPT.words(program.interpreter, program.script, program.args)


def shared(environment: Mapping[str, str]) -> dict[str, str]:
    """What all workers have alike: what a library reads while it is loaded is there as well."""
    return {name: text for name, text in environment.items() if name not in OF_ONE_PROCESS}


@contextlib.contextmanager
def _as_subreaper() -> Iterator[None]:
    """Meanwhile this process becomes the parent of whoever is orphaned below it; later orphans are not its business."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _is_readable(link: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()  # select(2) knows no descriptor above 1023
    poll.register(link, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
