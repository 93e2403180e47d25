"""The progress of a job for people: one line that is drawn over on a terminal, plain lines on change elsewhere.

How it looks and how often it is said live here, and how the loss is read from a log; never what happened. The one idea:
an event is a line that stays, progress is a line that goes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from samebits.commands import spelled
from samebits.ops.job_line import Standing, line_of
from samebits.ops.job_view import JobView
from samebits.printable import PrintableStream, printable, printable_lines, raw_of

JSON_LINE_S = 1.0
PLAIN_STEP_LINE_S = 5.0  # without a terminal, steps alone are said this often
STDOUT, STDERR = 1, 2
GOES_ON = f"this command goes on without it. Fix: `{spelled('follow')}` shows the job"
_READ_BYTES = 65536

# MindSpore's LossMonitor: `epoch: 1 step: 20, loss is 2.3025`; and plainer: `epoch 1 step 20 loss 2.3025`.
_LOSS = re.compile(
    r"\bepoch\b\W*\d+\W+step\b\W*\d+\W+loss\b(?:\s+is\b)?[\s:=]*([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
)
_STEP = re.compile(r"\bstep\b[\s:=\[(#]*(\d{1,15})\b", re.IGNORECASE)

# What a process of ours says with a remedy, but for what its environment says, which was said before it was started.
_OWN_LINE = re.compile(r"\S+ \S+ samebits ")
_ADVICE = re.compile(r"^\S+ \S+ samebits ((?:worker|spare) \S+: (?![A-Z][A-Z_]+\b).*Fix: .*)$", re.MULTILINE)


class LossTail:
    """The last loss and step in a worker's log, and what it asks its user to do; earlier lines do not count.

    ``loss`` is what was known before this log told any. ``step`` is the script's own number, None before the first.
    ``advice`` is for the caller to take.
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
        self.step: int | None = None

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
        if steps := _STEP.findall("\n".join(line for line in whole.splitlines() if not _OWN_LINE.match(line))):
            self.step = int(steps[-1])
        return self.loss


def world_text(view: JobView, alive: int) -> str:
    """Return ``4/4 workers, 1 spare``.

    While a generation forms: ``2/4 workers ready``. After a shrink: ``3/3 workers (4 wanted)``, with ``1 joining``
    before it grows.
    """
    ready = alive if view.ready is None else min(view.ready, alive)
    text = f"{ready}/{view.world_size} workers{' ready' if ready < alive else ''}"
    if view.world_size < view.wanted_size:
        text += f" ({view.wanted_size} wanted)"
    if view.joining:
        text += f", {view.joining} joining"
    if view.spares_alive:
        text += f", {view.spares_alive} spare{'s' if view.spares_alive > 1 else ''}"
    return text


class _LastingFile(io.FileIO):
    """A standard stream whose loss does not end this process: a closed pipe, a closed terminal, a full disk."""

    def write(self, data: Any, /) -> int:
        """Write as usual; after a failure, to ``/dev/null``."""
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() != STDERR:
                with contextlib.suppress(OSError):  # it may be lost as well
                    os.write(STDERR, f"samebits: standard output is lost ({error.strerror}); {GOES_ON}\n".encode())
            return memoryview(data).nbytes


def keep_going_without_output() -> None:
    """Let this process, which supervises a job, outlive the readers of its standard output and error."""
    for name, number in (("stdout", STDOUT), ("stderr", STDERR)):
        shown = getattr(sys, name)
        stream = raw_of(shown)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            file = io.BufferedWriter(_LastingFile(number, "w", closefd=False))
            lasting = io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering)
            setattr(sys, name, PrintableStream(lasting) if isinstance(shown, PrintableStream) else lasting)


class Screen:
    """Where a follower speaks. A reader who has gone away (a closed pipe) is no reason to leave the job alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = raw_of(stream)
        self._is_terminal = stream.isatty()
        self._is_open = True
        self._drawn = ""
        self._said = self._key = ""
        self._said_at = float("-inf")

    def say(self, text: str) -> None:
        """One event: a line that stays."""
        self._write(f"{self._erased()}samebits: {printable(text)}\n{self._drawn}")

    @property
    def is_terminal(self) -> bool:
        """Whether a line can be drawn over."""
        return self._is_terminal

    def raw(self, text: str) -> None:
        """A line of somebody else's, such as a worker's log."""
        self._write(f"{self._erased()}{printable_lines(text)}\n{self._drawn}")

    def progress(self, standing: Standing, key: object, now: float) -> None:
        """How it stands. Without a terminal it is said when ``key`` changes, else every few seconds."""
        if self._is_terminal:
            shown = printable(line_of(standing, shutil.get_terminal_size().columns))
            if shown != self._drawn:
                erased, self._drawn = self._erased(), shown
                self._write(f"{erased}{shown}")
            return
        text = printable(line_of(standing))
        if text != self._said and (repr(key) != self._key or now - self._said_at >= PLAIN_STEP_LINE_S):
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


class JsonScreen(Screen):
    """The same for programs: a JSON object a line, ``event`` for what stays, ``progress`` for how it stands."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_terminal = False
        self._progress_at = float("-inf")

    def say(self, text: str) -> None:
        """One event."""
        self._write(json.dumps({"event": text}) + "\n")

    def raw(self, text: str) -> None:
        """A line of somebody else's."""
        self._write(json.dumps({"log": text}) + "\n")

    def progress(self, standing: Standing, key: object, now: float) -> None:
        """How it stands: once a second, and when ``key`` changes."""
        if repr(key) != self._key or now - self._progress_at >= JSON_LINE_S:
            self._key, self._progress_at = repr(key), now
            self._write(json.dumps({"progress": standing.as_json()}) + "\n")

    def end(self, kind: str, status: int, step: int, cause: str) -> None:
        """How the job ended, and the exit status that says so."""
        self._write(json.dumps({"end": kind, "status": status, "step": step, "cause": cause}) + "\n")
