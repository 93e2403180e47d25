"""End this process if its main thread stays in a collective of a broken group, judged by the thread's activity.

After the group is broken, the main thread leaves its collective within milliseconds. A thread that stays in torch's
communication for seconds without using any CPU is stuck for good, because gloo can miss the end of a connection. On an
accelerator, the thread may also be stuck in the script's own read of a result that never arrives. A call of NCCL may be
stuck without being idle: torch polls the communicator's state on a whole core, for up to half an hour after the abort
(``C10D_NCCL_CHECK_TIMEOUT_GROUPEND``), so a thread that stays in one call for BREAK_WITHIN_S seconds also counts as
stuck. The process then gives up its seat, so that a replacement can take it. A thread that computes, or waits for
something else, is left alone, because its next collective will fail. The same applies to a thread that waits for a
device whose queued work may take that long.
"""

from __future__ import annotations

import concurrent.futures
import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from samebits.errors import StuckError
from samebits.service import log
from samebits.training import torch_private
from samebits.training.group.breaker import run_aside
from samebits.training.group.calling_place import PACKAGE_FOLDER, TORCH_FOLDER
from samebits.training.run.main_thread_probe import main_thread_cpu_ticks

STDERR = 2  # the file descriptor, even if sys.stderr was replaced
LOOK_EVERY_S = 0.5
BREAK_WITHIN_S = 10.0  # twice as long as an abort may take
STUCK_LOOKS = 2  # consecutive looks that must find the thread idle in a collective

_has_left = threading.Event()
_LAUNCHES = tuple(
    f"{TORCH_FOLDER}{file}"
    for file in (
        "distributed/distributed_c10d.py",
        "distributed/_functional_collectives.py",
        "nn/parallel/distributed.py",
    )
)
_COMMUNICATION = (
    *(f"{TORCH_FOLDER}distributed/", f"{TORCH_FOLDER}autograd/", f"{PACKAGE_FOLDER}training/"),
    *_LAUNCHES,
)
_BETWEEN = (f"{TORCH_FOLDER}_ops.py", torch_private.__file__)
"""Files that only pass a call on."""
_PRIMITIVES = (threading.__file__, concurrent.futures._base.__file__)
_GROUP = f"{PACKAGE_FOLDER}training/group/"


def guarded(
    break_group: Callable[[str], object],
    is_over: Callable[[], bool],
    record: Callable[[str], None] | None = None,
    *,
    is_busy: Callable[[], bool] = lambda: False,
    patience_s: Callable[[], float] = lambda: 0.0,
) -> Callable[[str], None]:
    """Return a wrapper of ``break_group`` that also watches the main thread until :func:`left` is called.

    The watch starts before the group is broken, because breaking it may hang.

    Args:
        break_group: called with the reason.
        is_over: returns whether everything that ``break_group`` started has ended; until then, for at most
            BREAK_WITHIN_S, no look counts.
        record: called with the reason in another thread, once the group is broken.
        is_busy: returns whether the main thread's stream of an accelerator has work left; an idle thread then counts as
            stuck even in the script's own read.
        patience_s: returns how many seconds the work queued on the device may take; until then the thread is left
            alone.
    """
    _has_left.clear()

    def break_and_watch(reason: str) -> None:
        threading.Thread(
            target=_watch, args=(reason, is_over, is_busy, patience_s), name="samebits-stuck", daemon=True
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
    began_s = time.monotonic()
    looks, cpu_before = 0, main_thread_cpu_ticks()
    call: _Call | None = None
    while not _has_left.wait(LOOK_EVERY_S):
        waited_s = time.monotonic() - began_s
        if not is_over() and waited_s < BREAK_WITHIN_S:
            continue
        cpu, call_before, call = main_thread_cpu_ticks(), call, _call()
        at_rest = cpu is not None and cpu == cpu_before and (call.starts(_COMMUNICATION) or is_busy())
        looks, cpu_before = (looks + 1 if at_rest else 0), cpu
        if looks >= STUCK_LOOKS and looks * LOOK_EVERY_S >= patience_s():
            _give_up(looks * LOOK_EVERY_S, reason)
        if waited_s < max(BREAK_WITHIN_S, patience_s()):
            call = None  # keep no reference to the thread's frames while it may leave as usual
        elif call == call_before and call.starts(_LAUNCHES):
            _give_up(waited_s, reason)


def _give_up(waited_s: float, reason: str) -> NoReturn:
    log.warn(
        f"the main thread did not leave its collective {waited_s:.0f} s after the group was broken ({reason}): this "
        "process gives up its seat. Its stacks:"
    )
    faulthandler.dump_traceback(file=STDERR, all_threads=True)
    os._exit(StuckError.exit_code)


@dataclass(frozen=True, slots=True)
class _Call:
    """The function call in which the main thread currently is.

    Attributes:
        frame: its innermost frame; while it is referenced, no other frame can be mistaken for it.
        instruction: the frame's last instruction.
        file: the innermost file that does not only pass the call on; empty if the thread has ended.
    """

    frame: FrameType | None
    instruction: int
    file: str

    def starts(self, places: tuple[str, ...]) -> bool:
        """Return whether the call was made from one of these files or folders."""
        return self.file.startswith(places)


def _call() -> _Call:
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    caller = frame
    while caller is not None and caller.f_code.co_filename in _PRIMITIVES:
        caller = caller.f_back
    if caller is not None and caller.f_code.co_filename.startswith(_GROUP):
        file = caller.f_code.co_filename  # a lock or an event that only a peer's progress would have released
    return _Call(innermost, -1 if innermost is None else innermost.f_lasti, file)
