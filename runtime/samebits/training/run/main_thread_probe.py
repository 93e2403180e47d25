"""Sample the main thread from outside: its phase, its line in the script, and whether it is idle.

Sampling from another thread keeps the training path free of hooks. The control thread reads two counters twice per
heartbeat, and the thread's frames and CPU time only if neither counter has moved for a while. ``core.watch.hang_judge``
judges the result.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from types import FrameType

from samebits.core.reports import MAX_PLACE_CHARS, Phase, Progress
from samebits.printable import printable
from samebits.start_folder import start_folder
from samebits.tracebacks import is_of_the_script
from samebits.training.group.calling_place import PACKAGE_FOLDER, TORCH_FOLDER
from samebits.training.main_thread_time import main_thread

STILL_S = 2.0
"""Seconds without progress after which a rank reports its position, unless a step has taken as long before."""
FIRST_STEPS = 2
"""Number of first steps that do not represent later ones, because they build, compile and warm up."""

_PHASES = (  # by the start of a file's path; the first match counts
    (f"{PACKAGE_FOLDER}training/process/key_value.py", Phase.USER),  # the script itself waits for a key
    (f"{PACKAGE_FOLDER}training/group/", Phase.COMMUNICATION),
    (f"{TORCH_FOLDER}distributed/", Phase.COMMUNICATION),
    (f"{TORCH_FOLDER}_dynamo/", Phase.COMPILING),
    (f"{TORCH_FOLDER}_inductor/", Phase.COMPILING),
    (f"{TORCH_FOLDER}utils/data/", Phase.DATA),
    (f"{TORCH_FOLDER}optim/", Phase.OPTIMIZER),
    (f"{TORCH_FOLDER}autograd/", Phase.BACKWARD),
    (f"{TORCH_FOLDER}nn/", Phase.FORWARD),
    (f"{PACKAGE_FOLDER}store/checkpoint/writer.py", Phase.STORING),  # reads the writer process's answer
    (f"{PACKAGE_FOLDER}training/", Phase.COMMIT),
    (f"{PACKAGE_FOLDER}store/", Phase.COMMIT),
)
_RUN = f"{PACKAGE_FOLDER}training/run/elastic_run.py"
_WAITS = frozenset(
    f"{PACKAGE_FOLDER}training/group/{name}.py" for name in ("breakable_group", "breakable_works", "breaker", "group")
)
"""Files whose functions wait on behalf of many others, so their names do not explain a wait."""
_CALLS_THE_SCRIPT = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD})
"""Phases that call the script's own code: a dataset, a module, a hook."""


class MainThreadProbe:
    """Samples the main thread's progress during one generation.

    Args:
        step: returns the completed optimizer steps.
        collectives: returns the collectives launched in the generation's group so far.
        step_timeout_s: HANG's timeout in seconds, if set; a stuck rank then reports within half of it.
        forms: the group is formed and the state restored. No step is completed meanwhile, so a thread that has left a
            wait, or is at another instruction than before, makes progress, and its place is one in this package.
    """

    def __init__(
        self,
        step: Callable[[], int],
        collectives: Callable[[], int],
        step_timeout_s: float | None = None,
        *,
        forms: bool = False,
    ) -> None:
        self._step = step
        self._collectives = collectives
        self._most_s = float("inf") if step_timeout_s is None else step_timeout_s / 2
        self._seen = (step(), collectives())
        self._steps = 0
        self._moved_at = time.monotonic()
        self._longest_s = 0.0
        self._cpu_ticks: int | None = None
        self._forms = forms
        self._stack = 0  # hash of the thread's last position and waits, while the group is formed

    def look(self) -> Progress | None:
        """Return what the main thread is doing, or None while it makes progress or a pause is expected."""
        seen, now = (self._step(), self._collectives()), time.monotonic()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        has_moved = seen != self._seen
        if self._forms:
            before, self._stack = self._stack, _position_of(frame)
            has_moved = has_moved or self._stack != before
        if has_moved:
            if self._steps >= FIRST_STEPS:
                self._longest_s = max(self._longest_s, now - self._moved_at)
            self._steps += max(0, seen[0] - self._seen[0])
            self._seen = seen
        if has_moved or now < _pause_until:
            self._moved_at = now
        still_s = now - self._moved_at
        if frame is None or still_s < min(max(STILL_S, self._longest_s), self._most_s):
            self._cpu_ticks = None
            return None
        ticks_before, self._cpu_ticks = self._cpu_ticks, main_thread_cpu_ticks()
        phase = phase_of(frame)
        return Progress(
            phase=phase,
            collectives=seen[1],
            steps=self._steps,
            still_s=still_s,
            longest_s=self._longest_s,
            rests=ticks_before is not None and self._cpu_ticks == ticks_before,
            place=_place_while_forming(frame) if self._forms else place_of(frame, phase),
        )


_pause_until = 0.0


def expect_pause(seconds: float) -> None:
    """Announce that this rank's next step may take longer than usual, for example for an evaluation.

    Args:
        seconds: time from now during which no rank counts as hung; 0 cancels an earlier announcement.

    Raises:
        ValueError: ``seconds`` is not finite, or is below 0.

    Example::

        samebits.expect_pause(600)  # this evaluation takes up to ten minutes
    """
    global _pause_until
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"samebits.expect_pause({seconds!r}): expected seconds, 0 or more")
    _pause_until = time.monotonic() + seconds


def phase_of(frame: FrameType) -> Phase:
    """Return the phase of a thread from its innermost frame."""
    is_in_script = False
    for one in _outwards(frame):
        phase = _phase_of_file(one.f_code.co_filename)
        if phase is not None and (not is_in_script or phase in _CALLS_THE_SCRIPT):
            return phase
        is_in_script = is_in_script or is_of_the_script(one.f_code.co_filename)
    return Phase.USER if is_in_script else Phase.OUTSIDE


def _position_of(frame: FrameType | None) -> int:
    """Return a number that changes when the main thread moves, or waits at the same place for the next message."""
    stack = tuple((id(one.f_code), one.f_lasti) for one in _outwards(frame))
    return hash((stack, main_thread.messages))


def place_of(frame: FrameType, phase: Phase) -> str:
    """Return a text such as ``train.py:46 (time.sleep)`` or, in a collective, ``all_reduce at train.py:50``."""
    innermost = next((one for one in _outwards(frame) if is_of_the_script(one.f_code.co_filename)), None)
    if innermost is None:
        place = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
    else:
        place = f"{_shown(innermost.f_code.co_filename)}:{innermost.f_lineno}"
        if phase is not Phase.COMMUNICATION and (called := _call_in(innermost)):
            place += f" ({called})"
    if phase is Phase.COMMUNICATION:
        place = f"{_collective_in(frame)} at {place}"
    return printable(place, MAX_PLACE_CHARS)


def _place_while_forming(frame: FrameType) -> str:
    """Return ``group/meshes.py:330 (form_all)``: the innermost call of this package, or of the script, that tells."""
    inside = list(takewhile(lambda one: one.f_code.co_filename != _RUN, _outwards(frame)))
    found = next(filter(_tells, inside), next(filter(_is_ours, inside), frame))
    if is_of_the_script(found.f_code.co_filename):
        return place_of(found, Phase.USER)
    file = found.f_code.co_filename.removeprefix(f"{PACKAGE_FOLDER}training/")
    return printable(f"{file}:{found.f_lineno} ({found.f_code.co_name})", MAX_PLACE_CHARS)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE_FOLDER)


def _tells(frame: FrameType) -> bool:
    """Return whether a frame's function explains a wait: it is the script's, or one of ours with a public name."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    return is_of_the_script(file) or (_is_ours(frame) and file not in _WAITS and not name.startswith("_"))


def main_thread_cpu_ticks() -> int | None:
    """Return the main thread's CPU time in clock ticks (proc(5)); None if it cannot be read."""
    try:
        stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[11]) + int(fields[12])


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def _phase_of_file(file: str) -> Phase | None:
    return next((phase for place, phase in _PHASES if file.startswith(place)), None)


def _shown(file: str) -> str:
    path = Path(file)
    try:
        return str(path.relative_to(start_folder()))
    except (ValueError, OSError):
        return path.name


def _collective_in(frame: FrameType) -> str:
    """Return the name of the outermost collective function of torch on the stack, which the script called."""
    names = [one.f_code.co_name for one in _outwards(frame) if one.f_code.co_filename.endswith("distributed_c10d.py")]
    return names[-1] if names else "all_reduce"  # DistributedDataParallel's, for gradients


def _call_in(frame: FrameType) -> str:
    """Return the call in the frame's line as written in the source, or "" if the source is not available."""
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if position is None or None in position or position[0] != position[1]:
        return ""
    line, _, begin, end = position
    source = linecache.getline(frame.f_code.co_filename, line or 0).encode()[begin:end].decode(errors="replace")
    return source.partition("(")[0].strip()
