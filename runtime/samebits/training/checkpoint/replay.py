"""Log each optimizer step, and compare steps that a recovery repeats with the log.

A step's record is durable before the optimizer takes the step. Every repeated step can therefore be compared before it
is taken, and the first one that differs is reported.

Logging never blocks training: if the disk fails, one warning is logged and steps continue without records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from samebits.core.messages import GenerationStarted
from samebits.errors import DivergenceError, ForeignFolderError, StoreError, UsageError
from samebits.service import log
from samebits.spelling import spelled
from samebits.store.lock import DirectoryLock
from samebits.store.step_log import STEPS_FOLDER, StepLogWriter
from samebits.store.step_record import (
    LateSamples,
    LogHeader,
    NewLine,
    RecordDifference,
    StepEntry,
    StepRecord,
    difference,
)
from samebits.training.state import snapshot
from samebits.training.state.base_state import State
from samebits.training.state.checkpoint_config import WARN, StepLog
from samebits.training.state.torch_state import TorchState


def require_steps(state: State) -> TorchState:
    """Return the state if its optimizer steps can be logged.

    Raises:
        UsageError: the state has no optimizer steps.
    """
    if isinstance(state, TorchState) and state.counts_optimizer_steps:
        return state
    raise UsageError(
        f"CheckpointConfig(step_log=…): a {type(state).__name__} has no optimizer steps that all ranks take "
        "together. Fix: use step_log only with a samebits.elastic.TorchState that has an optimizer"
    )


def weights_digest(state: State) -> str:
    """Return the hex xxh3_128 of all parameters, ordered by name; only this rank's pieces of sharded ones count."""
    digest = xxhash.xxh3_128()
    for tensor in (*state.weights(), *state.shards().values()):
        digest.update(snapshot.bytes_of(tensor))
    return digest.hexdigest()


@dataclass(slots=True)
class _Repeated:
    """The records that repeated steps must match, and how far they have matched."""

    first: int
    last: int
    expected: dict[int, StepRecord]
    compared: int = 0
    samples: bool = False
    weights: bool = False


class Replay:
    """The step log of this process's slot, and the comparison of repeated steps with it.

    Args:
        asked: the user's settings for the log.
        state: the state whose steps are logged.
        directory: the slot's checkpoint folder; the log is a subfolder of it.
        header: identity of the log (job, slot, node).
        oldest_step: as for ``StepLogWriter.open``.

    Raises:
        UsageError: the state has no optimizer steps to log.
    """

    def __init__(
        self,
        asked: StepLog,
        state: State,
        directory: Path,
        header: LogHeader,
        oldest_step: Callable[[], int] | None = None,
    ) -> None:
        self.slot = header.slot
        self._asked = asked
        self._state = require_steps(state)
        self._directory = directory
        self._header = header
        self._oldest_step = oldest_step
        self._lock = DirectoryLock(directory / STEPS_FOLDER, f"worker {header.node}")
        self._writer: StepLogWriter | None = None
        self._failed_before = False
        self._place: GenerationStarted | None = None
        self._taken: list[int] = []  # samples recorded by the loop since the last commit or record
        self._pending: list[StepEntry] = []  # written with the next record
        self._open: StepRecord | None = None  # the step that began last
        self._logged_step = 0
        self._line: dict[int, StepRecord] = {}  # logged records of the steps after the last commit
        self._line_from: int | None = None  # that commit's step; None until the log was read
        self._repeated: _Repeated | None = None

    # ---- the session's calls

    def begin(self, generation: GenerationStarted, step: int) -> None:
        """Begin a generation at the commit of ``step``. Later steps in the log will be repeated.

        Raises:
            ForeignFolderError: the log belongs to another job.
        """
        self._state.follow_samples(self._took)
        self._place, self._open, self._repeated, self._logged_step = generation, None, None, step
        self._taken.clear()
        self._pending = [one for one in self._pending if isinstance(one, LateSamples) and one.step == step]
        if self._line_from is None or step < self._line_from:
            self._line_from, self._line = step, self._logged_after(step)
        self._forget_up_to(step)
        logged = dict(self._line)
        worlds = {(one.world_size, one.rank) for one in logged.values()}
        if worlds - {(generation.world_size, generation.rank)}:
            self._begin_line(step, f"rank {generation.rank} of {generation.world_size} now")
            if max(logged) > step + 1:  # a single step may have been logged and never taken
                log.say(
                    f"the step log of slot {self.slot} starts over at step {step + 1}: the steps up to "
                    f"{max(logged)} were logged with a different world size or rank and are not compared"
                )
        elif logged:
            self._repeated = _Repeated(step + 1, max(logged), logged)

    def follow(self, follows: bool) -> None:
        """Record the loop's samples from now on, or pause while a step is repeated for comparison."""
        self._state.follow_samples(self._took if follows else None)

    def before_step(self) -> None:
        """Make the next step's record durable, and compare it with the log.

        Raises:
            DivergenceError: the log has a different record of this step.
        """
        step = self._state.beginning_step
        if step <= self._logged_step or self._place is None:
            return  # called for another optimizer of the same step
        self._step_is_over()
        record = StepRecord(
            step=step,
            generation=self._place.generation,
            world_size=self._place.world_size,
            rank=self._place.rank,
            seed=self._state.step_seed,
            learning_rates=self._state.learning_rates,
            samples=tuple(self._taken),
            weights=weights_digest(self._state) if step % self._asked.digest_every == 0 else None,
        )
        self._taken.clear()
        self._compare(record)
        self._append(record)
        self._open, self._logged_step, self._line[step] = record, step, record

    def committed(self, step: int) -> None:
        """Close the record of ``step``. Samples recorded from now on belong to the next step."""
        self._forget_up_to(step)
        if self._open is None:
            self._taken.clear()
            return
        if self._taken:
            self._pending.append(LateSamples(self._open.step, tuple(self._taken)))
        self._open = replace(self._open, samples=(*self._open.samples, *self._taken), is_complete=True)
        self._taken.clear()

    def finished(self) -> None:
        """Compare the last step and flush the log at the end of training."""
        self._step_is_over()
        self._say_repeated()
        if self._pending and self._writer is not None:
            self._make_durable(self._pending)

    def close(self) -> None:
        """Release the log for another process."""
        self._state.follow_samples(None)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._lock.release()

    # ---- comparing

    def _took(self, samples: Sequence[int]) -> None:
        self._taken += samples

    def _compare(self, found: StepRecord) -> None:
        repeated = self._repeated
        logged = None if repeated is None else repeated.expected.get(found.step)
        if repeated is None or logged is None:
            return
        differs = difference(logged, found)
        if differs is not None:
            self._diverged(logged, differs)
            return
        repeated.samples |= bool(logged.samples and found.samples)
        repeated.weights |= None not in (logged.weights, found.weights)

    def _step_is_over(self) -> None:
        """Complete the record of the last step that began, whose samples are now all known."""
        found, self._open = self._open, None
        if found is None:
            return
        if found.step in self._line:
            self._line[found.step] = replace(found, is_complete=True)
        if self._repeated is None:
            return
        self._compare(replace(found, is_complete=True))
        if self._repeated is not None:
            self._repeated.compared += found.step in self._repeated.expected
            if found.step >= self._repeated.last:
                self._say_repeated()

    def _diverged(self, logged: StepRecord, differs: RecordDifference) -> None:
        step, self._repeated = logged.step, None
        text = (
            f"step {step} differs from the log, and is the first that does: {differs.what} {differs.one} when "
            f"generation {logged.generation} logged it, {differs.other} now"
        )
        if self._asked.on_divergence != WARN:
            raise DivergenceError(
                f"{text}. The script, the data or the settings have changed since then, or the script is not "
                f"deterministic. Fix: correct that and run `{spelled('recover')}`, or accept the difference with "
                'CheckpointConfig(step_log=samebits.StepLog(on_divergence="warn"))'
            )
        log.warn(f"{text}; later steps are not compared with the log")
        self._begin_line(step, f"step {step} differed: {differs.what}")

    def _begin_line(self, step: int, reason: str) -> None:
        """Start a new line in the log, so that existing records after ``step`` are no longer compared."""
        self._pending.append(NewLine(step, reason))
        self._line = {one: record for one, record in self._line.items() if one <= step}

    def _say_repeated(self) -> None:
        """Log which steps were replayed. A single step is not logged, because it may never have been taken before."""
        repeated, self._repeated = self._repeated, None
        if repeated is None or repeated.compared == 0 or repeated.first == repeated.last:
            return
        last = min(repeated.last, self._logged_step)
        missing = last - repeated.first + 1 - repeated.compared
        same = [what for what, was in (("same samples", repeated.samples), ("same weights", repeated.weights)) if was]
        log.say(
            f"steps {repeated.first} to {last} were replayed: {', '.join(same or ['same seed, same learning rate'])}"
            + (f" ({missing} of them were not in the log)" if missing else "")
        )

    # ---- the log

    def _forget_up_to(self, step: int) -> None:
        """Drop the records up to ``step`` from memory. To go back further, the log must be read again."""
        for one in range((self._line_from or 0) + 1, step + 1):
            self._line.pop(one, None)
        self._line_from = step

    def _logged_after(self, step: int) -> dict[int, StepRecord]:
        """Return the logged records after ``step``. If the log is unreadable, log a warning and return none."""
        try:
            return (self._writer or self._opened(step)).line_after(step)
        except ForeignFolderError:
            raise
        except StoreError as error:
            self._say_failed(step, error)
            return {}

    def _opened(self, step: int) -> StepLogWriter:
        if not self._lock.is_held:
            self._lock.acquire()
        writer = self._writer = StepLogWriter.open(self._directory, self._header, self._oldest_step)
        for problem in writer.problems:
            log.warn(problem)
        if step and not writer.last_step:
            log.say(
                f"the step log of slot {self.slot} begins at step {step + 1}: this host has no record of the steps "
                "before it"
            )
        elif step > writer.last_step + 1:  # a gap of one is normal: a rank can die before it logs a step
            log.say(
                f"the step log of slot {self.slot} continues at step {step + 1}: the steps from {writer.last_step + 1} "
                "on were taken elsewhere"
            )
        return writer

    def _append(self, record: StepRecord) -> None:
        self._pending.append(record)
        if self._make_durable(self._pending) and self._failed_before:
            log.say(f"steps are logged again, from step {record.step} on")
            self._failed_before = False

    def _make_durable(self, entries: list[StepEntry]) -> bool:
        step = entries[-1].step
        try:
            (self._writer or self._opened(step - 1)).append(entries)
        except ForeignFolderError:
            raise
        except StoreError as error:
            self._say_failed(step, error)
            entries[:] = [one for one in entries if isinstance(one, NewLine)]
            return False
        entries.clear()
        return True

    def _say_failed(self, step: int, error: StoreError) -> None:
        if not self._failed_before:
            log.warn(f"step {step} could not be written to the step log ({error}); training continues")
        self._failed_before = True
