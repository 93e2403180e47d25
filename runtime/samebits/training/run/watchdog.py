"""Detect a main thread that does not leave a broken collective, by what the thread does, not only by time.

After the group was broken, the main thread leaves its collective within milliseconds. A thread that stays in torch's
communication for seconds without using any CPU is stuck for good (gloo can miss the end of a connection). The process
then gives up its seat so that a replacement takes it. A thread that computes, or waits in the user's own code, is left
alone: it fails at its next collective.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

from samebits.errors import StuckError
from samebits.service import log
from samebits.training.group.breaker import run_aside
from samebits.training.group.calling_place import PACKAGE_FOLDER, TORCH_FOLDER
from samebits.training.run.main_thread_probe import main_thread_cpu_ticks

STDERR = 2  # the descriptor, whatever sys.stderr is
LOOK_EVERY_S = 0.5
STUCK_LOOKS = 2  # consecutive looks that must find the thread idle in a collective

_has_left = threading.Event()
_COMMUNICATION = (f"{TORCH_FOLDER}distributed/", f"{TORCH_FOLDER}autograd/", f"{PACKAGE_FOLDER}training/")


def guarded(break_group: Callable[[str], object], record: Callable[[str], None] | None = None) -> Callable[[str], None]:
    """Return ``break_group`` extended to watch the main thread until ``left`` is called.

    Args:
        break_group: called with the reason.
        record: called with the reason in another thread, once the group is broken.
    """
    _has_left.clear()

    def break_and_watch(reason: str) -> None:
        break_group(reason)
        if record is not None:
            run_aside(functools.partial(record, reason), "samebits-record")
        threading.Thread(target=_watch, args=(reason,), name="samebits-watchdog", daemon=True).start()

    return break_and_watch


def left() -> None:
    """Note that the main thread has left its generation."""
    _has_left.set()


def _watch(reason: str) -> None:
    looks, cpu_before = 0, main_thread_cpu_ticks()
    while not _has_left.wait(LOOK_EVERY_S):
        cpu = main_thread_cpu_ticks()
        at_rest = cpu is not None and cpu == cpu_before and _is_communicating()
        looks, cpu_before = (looks + 1 if at_rest else 0), cpu
        if looks >= STUCK_LOOKS:
            log.warn(
                f"the main thread did not leave its collective {looks * LOOK_EVERY_S:g} s after the group was "
                f"broken ({reason}): this process gives up its seat. Its stacks:"
            )
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
            os._exit(StuckError.exit_code)


def _is_communicating() -> bool:
    """Return whether the main thread's innermost Python frame is in torch's communication or backward pass."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(_COMMUNICATION)
