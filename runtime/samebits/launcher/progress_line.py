"""Show a job's progress: one redrawn line on a terminal, one line per change elsewhere, or JSON.

Events are printed as permanent lines. Progress comes from the scheduler and the script's own reports, or from the loss
in rank 0's log if the script reports nothing.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from samebits.account.job_view import JobView
from samebits.config import Settings
from samebits.core.replacement_names import root_of, titled
from samebits.launcher.processes import name_of
from samebits.launcher.worker_logs import LogLines
from samebits.printable import PrintableStream, counted, listed, printable, printable_lines, raw_of, shortened
from samebits.spelling import spelled
from samebits.store.progress_report import ProgressReport, read_report, report_file

WINDOW_S = 120.0  # the pace is measured over the last two minutes
_LEAST_S = 1.0  # shortest time between two views for measuring a pace
_STILL_STEPS, _STILL_LEAST_S = 5, 5.0
"""The pace is hidden after this many step durations without a step, and after at least this many seconds."""
_MOST_SAMPLES = 1000
_FEWEST_COLUMNS = 20


class Pace:
    """Training speed over the last minutes in steps per second, and the time lost to recoveries.

    Only time in which the job trained counts. After a recovery, steps are counted from the step to which the job
    returned.
    """

    def __init__(self) -> None:
        self._recoveries = 0
        self._settled: tuple[int, float] | None = None
        self._samples: collections.deque[tuple[float, int]] = collections.deque(maxlen=_MOST_SAMPLES)
        self._phase = ""
        self._phase_since = 0.0
        self._generation = 0
        self._lost_s = 0.0
        self._stands_since: float | None = None

    def look(self, view: JobView | None, now: float, shown: str | None = None) -> None:
        """Record the job's state at ``now``; ``shown`` replaces the name of the phase."""
        phase = view.phase if view is not None else "waiting"
        name = (phase if shown is None else shown).partition(";")[0]
        if name != self._phase:
            self._phase, self._phase_since = name, now
        if view is None or view.from_journal:
            return
        self._count_recoveries(view, now)
        if phase != "training" or view.alive < view.world_size:
            self._samples.clear()
            return
        if self._samples and view.step < self._samples[-1][1]:
            self._samples.clear()
        if not self._samples or view.step != self._samples[-1][1] or now - self._samples[-1][0] >= _LEAST_S:
            self._samples.append((now, view.step))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    def settle(self, recoveries: int, lost_s: float) -> None:
        """Replace the observed number and cost of recoveries, in seconds, by those in the job's history."""
        self._settled = recoveries, lost_s

    @property
    def recoveries(self) -> int:
        """Return the number of completed recoveries."""
        return self._recoveries if self._settled is None else self._settled[0]

    @property
    def is_cost_known(self) -> bool:
        """Return whether the recoveries' cost comes from the job's history."""
        return self._settled is not None

    def _count_recoveries(self, view: JobView, now: float) -> None:
        stands = view.generation > 0 and not view.training_finished and not view.job_finished
        is_held_up = stands and view.ended is None and (view.phase != "training" or view.alive < view.world_size)
        if self._generation and view.generation > self._generation:
            self._recoveries += view.generation - self._generation
        if is_held_up and self._generation and self._stands_since is None:
            self._stands_since = now
        elif not is_held_up and self._stands_since is not None:
            self._lost_s += now - self._stands_since
            self._stands_since = None
        if view.phase == "training" or self._generation:
            self._generation = max(self._generation, view.generation)

    def phase_s(self, now: float) -> float:
        """Return the duration of the current phase in seconds."""
        return now - self._phase_since

    def lost_s(self, now: float) -> float:
        """Return the total time without progress in seconds, as far as it was observed."""
        lost_s = self._lost_s if self._settled is None else self._settled[1]
        return lost_s + (0.0 if self._stands_since is None else now - self._stands_since)

    def steps_per_s(self) -> float | None:
        """Return the training speed, or None until it is known."""
        if len(self._samples) < 2:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        if ended - began < _LEAST_S or last <= first:
            return None
        pace = (last - first) / (ended - began)
        stepped = next(at for at, step in self._samples if step == last)
        return pace if ended - stepped <= max(_STILL_LEAST_S, _STILL_STEPS / pace) else None


def phase_text(view: JobView) -> str:
    """Return a description of the phase, such as ``recovering; waiting for workers 0 and 2``."""
    word, _, rest = view.phase.partition("; ")
    if word in ("filling", "forming"):
        word = "recovering" if view.generation else "starting"
    if rest.startswith(_WAITS):
        names = [root_of(name) for name in rest.removeprefix(_WAITS).replace(" and ", ", ").split(", ")]
        rest = f"{_WAITS}worker{'s' if len(names) > 1 else ''} {listed(names)}"
    rest = {"all are here": "all workers are here"}.get(rest, rest)
    return f"{word}; {rest}" if rest else word


_WAITS = "waiting for "


@dataclass(frozen=True, slots=True)
class ProgressFacts:
    """The facts that a progress line may show.

    Attributes:
        script: the script's name.
        phase: the phase; empty while the job trains.
        phase_s: seconds since the phase began.
        step, total_steps, steps_per_s: the training's progress.
        values: the script's reported values, in the form shown.
        world: a description of the workers.
        recoveries, lost_s: number and cost in seconds of the job's recoveries.
        is_cost_known: whether the cost comes from the job's history, which only the scheduler's host has. Otherwise,
            ``lost_s`` is only the time without progress that this command has seen.
        more: additional text, such as when a seat becomes free.
    """

    script: str
    world: str
    phase: str = ""
    phase_s: float = 0.0
    step: int | None = None
    total_steps: int | None = None
    steps_per_s: float | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    recoveries: int = 0
    lost_s: float = 0.0
    is_cost_known: bool = True
    more: str = ""

    @property
    def left_s(self) -> float | None:
        """Return the remaining training time in seconds at the current speed, or None if unknown."""
        if self.phase or self.step is None or not self.total_steps or not self.steps_per_s:
            return None
        return max(0, self.total_steps - self.step) / self.steps_per_s

    def as_json(self) -> dict[str, Any]:
        """Return all figures, for programs."""
        return {
            "script": self.script,
            "phase": self.phase or "training",
            "phase_s": round(self.phase_s, 3),
            "step": self.step,
            "total_steps": self.total_steps,
            "steps_per_s": None if self.steps_per_s is None else round(self.steps_per_s, 3),
            "left_s": None if self.left_s is None else round(self.left_s, 3),
            "values": dict(self.values),
            "workers": self.world,
            "recoveries": self.recoveries,
            "lost_s": round(self.lost_s, 3) if self.is_cost_known or not self.recoveries else None,
        }


def line_of(standing: ProgressFacts, columns: int | None = None) -> str:
    """Return a line that shows the progress.

    For example: ``train.py · step 1,180/3,000 · 43 steps/s · loss 0.0312 · 41 s left · 4/4 workers, 1 spare``.

    Args:
        standing: the facts to show.
        columns: the terminal's width; parts are left out until the line is shorter. None for all parts.
    """
    parts = [(rank, text) for rank, text in _parts(standing) if text]
    line = " · ".join(text for _, text in parts)
    if columns is None:
        return line
    most = max(_FEWEST_COLUMNS, columns - 1)  # a full last column wraps on some terminals
    while len(line) > most and len(parts) > 1:
        parts.remove(max(parts))
        line = " · ".join(text for _, text in parts)
    return shortened(line, most)


def _parts(standing: ProgressFacts) -> list[tuple[int, str]]:
    """Return the parts of the line in order, each with a rank. The part with the greatest rank is left out first."""
    step = "" if standing.step is None else f"step {standing.step:,}"
    if step and standing.total_steps:
        step += f"/{standing.total_steps:,}"
    values = [f"{name} {value}" for name, value in standing.values.items()]
    recoveries = ""
    if standing.recoveries or standing.lost_s >= 0.05:
        count, lost = standing.recoveries, f"{seconds(standing.lost_s, fine=True)} lost"
        if not standing.is_cost_known:
            lost = f"at least {lost}" if standing.lost_s >= 0.05 else "time lost unknown on this host"
        recoveries = f"{count} recover{'y' if count == 1 else 'ies'}, {lost}" if count else f"{lost} so far"
    return [
        (6, standing.script),
        (1, standing.phase),
        (3, seconds(standing.phase_s) if standing.phase and standing.phase_s >= 1 else ""),
        (0, step),
        (5, "" if standing.steps_per_s is None or standing.phase else f"{_figure(standing.steps_per_s)} steps/s"),
        *((4 if place == 0 else 10 + place, text) for place, text in enumerate(values)),
        (4, "" if standing.left_s is None else f"{seconds(standing.left_s)} left"),
        (2, standing.world),
        (7, recoveries),
        (2, standing.more),
    ]


def seconds(value: float, *, fine: bool = False) -> str:
    """Format seconds as ``41 s``, ``12 min`` or ``3.5 h``; ``fine`` shows tenths of a second below a minute."""
    if value < 60:
        return f"{value:.1f} s" if fine else f"{math.ceil(value)} s"
    if value < 3600:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 100 * 3600 else f"{value / 86400:.0f} days"


def _figure(value: float) -> str:
    """Format a speed with a few significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def shown_value(value: float) -> str:
    """Format a value the way a loss is written: ``0.0312``, ``2.3``, ``1e-05``, ``nan``."""
    return f"{value:.4g}" if math.isfinite(value) else str(value)


JSON_LINE_S = 1.0
PLAIN_STEP_LINE_S = 5.0  # without a terminal, the step is printed at this interval
STDOUT, STDERR = 1, 2
GOES_ON = f"this command continues without it. Fix: `{spelled('follow')}` shows the job"
_READ_BYTES = 65536

# MindSpore's LossMonitor: `epoch: 1 step: 20, loss is 2.3025`; and plainer: `epoch 1 step 20 loss 2.3025`.
_LOSS = re.compile(
    r"\bepoch\b\W*\d+\W+step\b\W*\d+\W+loss\b(?:\s+is\b)?[\s:=]*([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
)
_STEP = re.compile(r"\bstep\b[\s:=\[(#]*(\d{1,15})\b", re.IGNORECASE)

# A worker's or spare's message with a fix; warnings about its environment were printed before it started.
_OWN_LINE = re.compile(r"\S+ \S+ samebits ")
_ADVICE = re.compile(r"^\S+ \S+ samebits ((?:worker|spare) \S+: (?![A-Z][A-Z_]+\b).*Fix: .*)$", re.MULTILINE)


class LossTail:
    """The last loss and step in a worker's log, and the advice that the worker has logged.

    Lines that are already in the log are ignored. ``loss`` is the last known value until this log has one. ``step`` is
    the script's own number, or None before the first. The caller removes from ``advice`` what it has shown.
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
        """Read new lines, and return the last loss as written in the log, or "" before the first."""
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
    """Return a description such as ``4/4 workers, 1 spare``.

    While a generation forms, this is ``2/4 workers ready``; after the world has shrunk, ``3/3 workers (4 wanted)``,
    with ``1 joining`` before it grows, or ``1 waiting`` for its shard group.
    """
    ready = alive if view.ready is None else min(view.ready, alive)
    text = f"{ready}/{view.world_size} workers{' ready' if ready < alive else ''}"
    if view.world_size < view.wanted_size:
        text += f" ({view.wanted_size} wanted)"
    if view.joining > view.held_back:
        text += f", {view.joining - view.held_back} joining"
    if view.held_back:
        text += f", {view.held_back} waiting"
    if view.spares_alive:
        text += f", {counted(view.spares_alive, 'spare')}"
    return text


class _LastingFile(io.FileIO):
    """A standard stream that ignores write errors, such as a closed pipe or a full disk."""

    def write(self, data: Any, /) -> int:
        """Write as usual; after a failure, redirect the stream to ``/dev/null``."""
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() != STDERR:
                with contextlib.suppress(OSError):  # stderr may be lost as well
                    os.write(STDERR, f"samebits: standard output is lost ({error.strerror}); {GOES_ON}\n".encode())
            return memoryview(data).nbytes


def keep_going_without_output() -> None:
    """Make this process survive the loss of its standard output and error, because it supervises a job."""
    for name, number in (("stdout", STDOUT), ("stderr", STDERR)):
        shown = getattr(sys, name)
        stream = raw_of(shown)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            file = io.BufferedWriter(_LastingFile(number, "w", closefd=False))
            lasting = io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering)
            setattr(sys, name, PrintableStream(lasting) if isinstance(shown, PrintableStream) else lasting)


class Screen:
    """The terminal output of a follower, which keeps running if its output is closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = raw_of(stream)
        self._is_terminal = stream.isatty()
        self._is_open = True
        self._drawn = ""
        self._said = self._key = ""
        self._said_at = float("-inf")

    def say(self, text: str) -> None:
        """Print an event as a permanent line."""
        self._write(f"{self._erased()}samebits: {titled(printable(text))}\n{self._drawn}")

    def raw(self, text: str) -> None:
        """Print a line of another program's output, such as a worker's log."""
        self._write(f"{self._erased()}{printable_lines(text)}\n{self._drawn}")

    def progress(self, standing: ProgressFacts, key: object, now: float) -> None:
        """Show progress. Without a terminal, print a line when ``key`` changes, or every few seconds."""
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
        except OSError:  # a closed pipe, a closed terminal, a full disk
            self._is_open = False
            # Data left in the stream would fail again when Python flushes it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class JsonScreen(Screen):
    """Machine-readable output: one JSON object per line, with ``event`` or ``progress``."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_terminal = False
        self._progress_at = float("-inf")

    def say(self, text: str) -> None:
        """Print an event."""
        self._write(json.dumps({"event": text}) + "\n")

    def raw(self, text: str) -> None:
        """Print another program's line."""
        self._write(json.dumps({"log": text}) + "\n")

    def progress(self, standing: ProgressFacts, key: object, now: float) -> None:
        """Print progress once a second, and when ``key`` changes."""
        if repr(key) != self._key or now - self._progress_at >= JSON_LINE_S:
            self._key, self._progress_at = repr(key), now
            self._write(json.dumps({"progress": standing.as_json()}) + "\n")

    def end(self, kind: str, status: int, step: int, cause: str) -> None:
        """Print how the job ended, with its exit status."""
        self._write(json.dumps({"end": kind, "status": status, "step": step, "cause": cause}) + "\n")


LOOK_S = 1.0
_SENDER = re.compile(r"(?:worker|spare) [^:]*: (?:(?:rank \d+, )?step \d+: )?")


class Showing:
    """Shows one job on one screen.

    Args:
        settings: the job's settings.
        script: the script's name.
        tee: names of the workers whose log lines are shown.
        is_served: whether a scheduler listened when this follower started.
    """

    def __init__(
        self, settings: Settings, screen: Screen, script: str, tee: Sequence[str] = (), *, is_served: bool = False
    ) -> None:
        self.screen = screen
        self._settings = settings
        self._script = script
        self._tee = LogLines(settings.log_dir, tee) if tee else None
        self._pace = Pace()
        self._node = "0"
        self._tail = LossTail(settings.log_dir / f"{name_of(self._node)}.log")
        self._advised: set[str] = set()
        self._noticed = (0, 0)  # term and number of the last notice shown
        self._before = self._stamp()  # a report that already exists belongs to an earlier job
        self._report: ProgressReport | None = None
        self._total_steps: int | None = None
        self._is_served = is_served
        self._step_shown: int | None = None
        self._generation = 0  # the generation that ``_step_shown`` belongs to
        self._seat_told_s: float | None = None
        self._seat_free_at = 0.0

    def settle(self, recoveries: int, lost_s: float) -> None:
        """Use this number of recoveries, and their cost in seconds, from now on."""
        self._pace.settle(recoveries, lost_s)

    def show_lines(self) -> None:
        """Show the log lines added since the last call."""
        if self._tee is not None:
            for name, line in self._tee.take():
                self.screen.raw(f"[{name}]: {line}")

    def show_notices(self, view: JobView | None) -> None:
        """Show the scheduler's new warnings, except those that a worker's log has already shown."""
        for number, text in () if view is None else view.notices:
            assert view is not None
            if (view.term, number) > self._noticed:
                self._noticed = (view.term, number)
                if not _is_told(text, self._advised):
                    self.screen.say(text)
                    self._advised.add(text)

    def show(self, view: JobView | None, *, is_linked: bool, running: int, now: float) -> None:
        """Show the known progress.

        ``running`` is the number of running workers, used if the scheduler cannot be reached.
        """
        self.show_lines()
        self.show_notices(view)
        self._pace.look(view, now, self._phase(view, is_linked=is_linked, running=running))
        standing = self._standing(view, is_linked=is_linked, running=running, now=now)
        key = (view.phase, world_text(view, view.alive)) if view is not None and is_linked else (is_linked, running)
        self.screen.progress(standing, key, now)

    def _phase(self, view: JobView | None, *, is_linked: bool, running: int) -> str:
        """Return the name of the job's phase, or "" while the job trains."""
        if view is None:
            return "asking the scheduler" if self._is_served else "waiting for the scheduler"
        is_missed = not is_linked and not view.training_finished and running > 0
        return "scheduler unreachable" if is_missed else "" if view.phase == "training" else phase_text(view)

    def _standing(self, view: JobView | None, *, is_linked: bool, running: int, now: float) -> ProgressFacts:
        if view is None:
            phase = self._phase(view, is_linked=is_linked, running=running)
            running_text = f"{counted(running, 'worker')} running"
            return ProgressFacts(self._script, running_text, phase, self._pace.phase_s(now))
        phase = self._phase(view, is_linked=is_linked, running=running)
        alive = view.alive if is_linked else min(running, view.alive)  # workers that left may still be exiting
        seat = self._seat_free_in_s(view, now) if is_linked else None
        values = self._values(view)
        is_plain = self._settings.plain  # only the script knows its steps
        return ProgressFacts(
            script=self._script,
            world=world_text(view, alive),
            phase=phase,
            phase_s=self._pace.phase_s(now),
            step=self._tail.step if is_plain else self._step(view, phase),
            total_steps=self._total_steps,
            steps_per_s=None if is_plain else self._pace.steps_per_s(),
            values=values,
            recoveries=self._pace.recoveries,
            lost_s=self._pace.lost_s(now),
            is_cost_known=self._pace.is_cost_known,
            more="" if seat is None else f"seat free in {math.ceil(seat)} s",
        )

    def _step(self, view: JobView, phase: str) -> int | None:
        """Return the step to show, or None if it is not known yet.

        The step decreases only if a new generation has returned to an earlier one, because a restarted scheduler knows
        only the last saved step until the workers report theirs.
        """
        if view.generation < self._generation:
            return self._step_shown
        if view.generation > self._generation:
            self._generation, self._step_shown = view.generation, view.restore_step if self._step_shown else None
        if not phase or view.generation == 0 or view.step >= (self._step_shown or 1):
            self._step_shown = max(view.step, self._step_shown or 0)
        return self._step_shown

    def _seat_free_in_s(self, view: JobView, now: float) -> float | None:
        """Return the seconds until a seat becomes free, counted down between two messages.

        The scheduler sends nothing new while all workers wait for a seat.
        """
        told_s = view.seat_free_in_s
        if told_s != self._seat_told_s:
            self._seat_told_s = told_s
            self._seat_free_at = now + (told_s or 0.0)
        return None if told_s is None or self._seat_free_at <= now else self._seat_free_at - now

    def _values(self, view: JobView) -> dict[str, str]:
        """Return rank 0's report, or the last loss in its log. After a loss, rank 0 may be another node."""
        node = next((worker.node for worker in view.workers if not worker.is_joining), self._node)
        if node != self._node:
            self._node = node
            self._tail = LossTail(self._settings.log_dir / f"{name_of(node)}.log", self._tail.loss)
        loss = self._tail.read()
        for text in self._tail.advice:
            if not _is_told(text, self._advised):
                self.screen.say(text)
                self._advised.add(text)
        self._tail.advice = []
        if self._stamp() != self._before:
            self._report = read_report(self._settings.log_dir, self._node) or self._report
        if view.training_finished and not self._is_of_the_end(view):
            return {}
        if self._report is not None:
            self._total_steps = self._report.total_steps or self._total_steps
            if self._report.values:
                return {name: shown_value(value) for name, value in self._report.values.items()}
        return {"loss": loss} if loss else {}

    def _is_of_the_end(self, view: JobView) -> bool:
        """Return whether the values belong to the last step.

        Once training is finished, earlier values would be misleading.
        """
        if self._report is not None:
            return self._report.step >= view.step
        return self._tail.step is None or self._tail.step >= view.step

    def _stamp(self) -> tuple[str, int]:
        """Return an identifier of the current report file, which is replaced by every report."""
        try:
            return self._node, report_file(self._settings.log_dir, self._node).stat().st_mtime_ns
        except OSError:
            return self._node, 0


def _is_told(text: str, told: Iterable[str]) -> bool:
    """Return whether a line with the same message was already shown, from the worker or the scheduler."""
    return any(text == one or _message(text) == _message(one) for one in told)


def _message(text: str) -> str:
    """Return a line without its sender.

    For example, ``worker 0: rank 0, step 3: …`` and ``worker 0 (rank 0), step 3: …`` give the same result.
    """
    sender = _SENDER.match(text)
    return text[sender.end() :] if sender else text
