"""The progress of a job for people: one line that is drawn over on a terminal, plain lines on change elsewhere.

How it looks and how often it is said live here, and how the loss is read from a log; never what happened. The one idea:
an event is a line that stays, progress is a line that goes.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import TextIO

from runtime.ops.job_view import JobView

PLAIN_STEP_LINE_S = 5.0  # without a terminal, steps alone are said this often
_READ_BYTES = 65536

# MindSpore's LossMonitor: `epoch: 1 step: 20, loss is 2.3025`; and plainer: `epoch 1 step 20 loss 2.3025`.
_LOSS = re.compile(
    r"\bepoch\b\W*\d+\W+step\b\W*\d+\W+loss\b(?:\s+is\b)?[\s:=]*([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
)


# What a process of ours says with a remedy, but for what its environment says, which was said before it was started.
_ADVICE = re.compile(r"^\S+ \S+ samebits ((?:worker|spare) \S+: (?![A-Z][A-Z_]+\b).*Fix: .*)$", re.MULTILINE)


class LossTail:
    """The last loss that a worker's log tells, and what it asks its user to do; earlier lines do not count.

    ``loss`` is what was known before this log told any. ``advice`` is for the caller to take.
    """

    def __init__(self, log: Path, loss: str = "") -> None:
        self.log = log
        self.advice: list[str] = []
        self._rest = ""
        try:
            self._offset = log.stat().st_size
        except FileNotFoundError:
            self._offset = 0
        self.loss = loss

    def read(self) -> str:
        """Take in what was appended; the last loss as it was written, empty before the first."""
        try:
            with self.log.open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes == self._offset:
                    return self.loss
                file.seek(max(self._offset, size_bytes - _READ_BYTES) if size_bytes > self._offset else 0)
                text = self._rest + file.read(_READ_BYTES).decode(errors="replace")
                self._offset = file.tell()
        except FileNotFoundError:
            return self.loss
        whole, _, self._rest = text.rpartition("\n")
        self.advice += _ADVICE.findall(whole)
        found = _LOSS.findall(whole)
        if found:
            self.loss = found[-1]
        return self.loss


def progress_line(view: JobView | None, loss: str, *, is_linked: bool, running: int) -> str:
    """``training · step 340 · loss 0.1234 · 4/4 workers, 1 spare``; ``running`` workers count where nobody tells."""
    if view is None:
        return f"waiting for the scheduler · {running} workers started"
    is_missed = not is_linked and not view.training_finished and running > 0
    parts = ["scheduler away" if is_missed else view.phase, f"step {view.step}"]
    if loss:
        parts.append(f"loss {loss}")
    alive = view.alive if is_linked else min(running, view.alive)  # who has left may still be ending
    parts.append(world_text(view, alive))
    if is_linked and view.seat_free_in_s is not None:
        parts.append(f"seat free in {math.ceil(view.seat_free_in_s)} s")
    return " · ".join(parts)


def world_text(view: JobView, alive: int) -> str:
    """``4/4 workers, 1 spare``; after a shrink ``3/3 workers (4 wanted)``, with ``1 joining`` before it grows."""
    text = f"{alive}/{view.world_size} workers"
    if view.world_size < view.wanted_size:
        text += f" ({view.wanted_size} wanted)"
    if view.joining:
        text += f", {view.joining} joining"
    if view.spares_alive:
        text += f", {view.spares_alive} spare{'s' if view.spares_alive > 1 else ''}"
    return text


class Screen:
    """Where a follower speaks. A reader who has gone away (a closed pipe) is no reason to leave the job alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._is_open = True
        self._drawn = ""
        self._said = self._key = ""
        self._said_at = float("-inf")

    def say(self, text: str) -> None:
        """One event: a line that stays."""
        self._write(f"{self._erased()}samebits: {text}\n{self._drawn}")

    def progress(self, text: str, key: object, now: float) -> None:
        """How it stands. Without a terminal it is said when ``key`` changes, else every few seconds."""
        if self._is_terminal:
            shown = text[: max(20, shutil.get_terminal_size().columns - 1)]
            if shown != self._drawn:
                erased, self._drawn = self._erased(), shown
                self._write(f"{erased}{shown}")
        elif text != self._said and (repr(key) != self._key or now - self._said_at >= PLAIN_STEP_LINE_S):
            self._said, self._key, self._said_at = text, repr(key), now
            self._write(f"{text}\n")

    def close(self) -> None:
        """Leave the cursor at the beginning of a line."""
        if self._drawn:
            self._drawn = ""
            self._write("\n")

    def _erased(self) -> str:
        return "\r\x1b[K" if self._drawn else ""

    def _write(self, text: str) -> None:
        if not self._is_open:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # a reader that has enough, a terminal that was closed, a full disk
            self._is_open = False
            # What the stream still holds would fail once more when Python flushes it at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
