"""Detect a main thread that is stuck in a broken collective, by its activity rather than by a clock alone.

After the group is broken, the main thread leaves its collective within milliseconds. A thread that stays in torch's
communication for whole seconds without using any CPU is stuck for good, because gloo can miss the end of a connection.
On an accelerator the thread may also be stuck in the script's own read of a result that never arrives. The process then
gives up its seat, so that a replacement can take it. A thread that computes, or waits for something else, is left
alone, since it fails at its next collective. So is a thread that waits for a device whose queue may legitimately take
that long.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from samebits.errors import StuckError
from samebits.service import log
from samebits.training.group.breaker import run_aside
from samebits.training.group.calling_place import PACKAGE_FOLDER, TORCH_FOLDER
from samebits.training.run.main_thread_probe import main_thread_cpu_ticks

STDERR = 2  # the file descriptor, even if sys.stderr was replaced
LOOK_EVERY_S = 0.5
BREAK_WITHIN_S = 10.0  # twice as long as an abort may take
STUCK_LOOKS = 2  # consecutive looks that must find the thread idle in a collective

_has_left = threading.Event()
_COMMUNICATION = (f"{TORCH_FOLDER}distributed/", f"{TORCH_FOLDER}autograd/", f"{PACKAGE_FOLDER}training/")


def guarded(
    break_group: Callable[[str], object],
    is_over: Callable[[], bool],
    record: Callable[[str], None] | None = None,
    *,
    is_busy: Callable[[], bool] = lambda: False,
    patience_s: Callable[[], float] = lambda: 0.0,
) -> Callable[[str], None]:
    """Return a wrapper of ``break_group`` that also watches the main thread until :func:`left` is called.

    The watch starts before the group is broken, since breaking it may hang.

    Args:
        break_group: called with the reason.
        is_over: returns whether everything that ``break_group`` started has ended; until then, for at most
            BREAK_WITHIN_S, no look counts.
        record: called with the reason in another thread, once the group is broken.
        is_busy: returns whether the main thread's stream of an accelerator has work left; an idle thread is then also
            stuck if it is in the script's own read.
        patience_s: returns how many seconds the work queued on the device may take; until then the thread is left
            alone.
    """
    _has_left.clear()

    def break_and_watch(reason: str) -> None:
        threading.Thread(
            target=_watch, args=(reason, is_over, is_busy, patience_s), name="samebits-watchdog", daemon=True
        ).start()
        break_group(reason)
        if record is not None:
            run_aside(functools.partial(record, reason), "samebits-record")

    return break_and_watch


def left() -> None:
    """Record that the main thread has left its generation."""
    _has_left.set()


def _watch(
    reason: str, is_over: Callable[[], bool], is_busy: Callable[[], bool], patience_s: Callable[[], float]
) -> None:
    looks, cpu_before = 0, main_thread_cpu_ticks()
    until_s = time.monotonic() + BREAK_WITHIN_S
    while not _has_left.wait(LOOK_EVERY_S):
        if not is_over() and time.monotonic() < until_s:
            continue
        cpu = main_thread_cpu_ticks()
        at_rest = cpu is not None and cpu == cpu_before and (_is_communicating() or is_busy())
        looks, cpu_before = (looks + 1 if at_rest else 0), cpu
        if looks >= STUCK_LOOKS and looks * LOOK_EVERY_S >= patience_s():
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
