"""Write the newest values of ``state.report(loss=…)`` to a file for display, and check losses for anomalies.

Reporting adds almost nothing to a step: values are converted to numbers at most twice a second, because the conversion
waits for an accelerator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from samebits.core.watch.anomalies import AnomalyVerdict, Band, Odd
from samebits.errors import AnomalyError, GenerationEndedError, StoreError, UsageError
from samebits.service import log
from samebits.store.progress_report import LONGEST_NAME, MOST_VALUES, ProgressReport, is_name, write_report
from samebits.training.group import transfer
from samebits.training.process.context import Worker

INTERVAL_S = 0.5
NAMED = 4
WATCHED = {"loss": "loss", "grad_norm": "gradient norm"}
"""Values checked for anomalies: on an accelerator every ``INTERVAL_S`` seconds, else at every report."""


def _stopped(rank: int, step: int, text: str) -> AnomalyError:
    return AnomalyError(
        f"rank {rank}, step {step}: {text}. Fix: check this step's data and learning rate, or set LOSS_ANOMALY=tell"
    )


class Reporter:
    """Handles the reports of one process. Rank 0's are written to a file if a launcher has created a folder for them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = float("-inf")
        self._total_steps: int | None = None
        self._bands = {name: Band() for name in WATCHED}
        self._looks_at = float("-inf")  # time at which values on an accelerator are checked next
        self._odd: dict[str, Odd] = {}  # anomalies that are being recomputed
        self._accepted: set[tuple[str, int]] = set()  # names and steps at which it was not a transient error
        self._asks_again = False
        self._unwritten: tuple[Worker, int, dict[str, Any]] | None = None

    def take(self, process: Worker, rank: int, step: int, total_steps: int | None, values: Mapping[str, Any]) -> None:
        """Store the reported values, and write them to the file if the interval has passed.

        Raises:
            UsageError: a name or a value cannot be shown.
        """
        wrong = [name for name in values if not is_name(name)]
        if wrong or len(values) > MOST_VALUES:
            what = f"the name {wrong[0]!r}" if wrong else f"{len(values)} values"
            raise UsageError(
                f"state.report: {what}; expected at most {MOST_VALUES} values with printable names of at most "
                f"{LONGEST_NAME} characters. Fix: report fewer values, or shorter names"
            )
        if total_steps is not None:
            if not isinstance(total_steps, int) or total_steps < 1:
                raise UsageError(f"state.report(total_steps={total_steps!r}): expected a whole number from 1 on")
            self._total_steps = total_steps
        self._look(process, rank, step, values)
        if rank != 0:
            return
        kept = {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in values.items()}
        self._unwritten = (process, step, kept)
        if self._clock() >= self._due_at:
            self.flush()

    def _look(self, process: Worker, rank: int, step: int, values: Mapping[str, Any]) -> None:
        """Check losses and norms for anomalies, and log, recompute or raise as LOSS_ANOMALY requires."""
        policy = process.settings.loss_anomaly
        if policy == "off" or not any(name in values for name in WATCHED):
            return
        waits = any(isinstance(values.get(name), torch.Tensor) and not values[name].is_cpu for name in WATCHED)
        now = self._clock()
        if waits and now < self._looks_at and not self._odd:
            return
        if waits:
            self._looks_at = now + INTERVAL_S
        for name, title in WATCHED.items():
            given = values.get(name)
            try:
                number = float(given.detach() if isinstance(given, torch.Tensor) else given)  # type: ignore[arg-type]
                problem = self._bands[name].take(step, number)
            except (TypeError, ValueError, RuntimeError):
                continue  # missing or not a number, which rank 0 reports when it writes
            # while a repetition is requested, the values up to the commit still belong to the first pass
            if name in self._odd and (self._asks_again or self._compare(process, rank, step, name, number, problem)):
                continue
            if (name, step) in self._accepted and math.isfinite(number):
                continue
            if problem and policy == "recompute" and process.settings.enable_recovery:
                self._odd[name] = Odd(step, title, number, problem)
                self._asks_again = True
                text = f"the {title} {problem}: all ranks return to the last commit and compute it again"
                self._say(process, rank, step, text, comes_again=True)
            elif problem:
                text = f"the {title} {problem}"
                if policy == "stop":
                    raise _stopped(rank, step, text)
                self._say(process, rank, step, text)

    def begin(self) -> None:
        """Begin a generation: every step since the last commit is computed again, so none needs to be requested."""
        self._asks_again = False

    def vote(self, process: Worker) -> None:
        """Raise before a commit if any rank wants the step recomputed. A collective if LOSS_ANOMALY=recompute.

        A faulty value on one rank may already be in the gradient of every rank.

        Raises:
            GenerationEndedError: the step must be recomputed from the last commit.
        """
        if process.settings.loss_anomaly != "recompute" or not process.settings.enable_recovery:
            return
        asks, self._asks_again = self._asks_again, False
        asking = [rank for rank, one in enumerate(transfer.gather(int(asks), process.device)) if one]
        if asking:
            ranks = ", ".join(map(str, asking[:NAMED]))
            raise GenerationEndedError(f"rank {ranks} has reported an anomaly: this step is repeated")

    def _compare(self, process: Worker, rank: int, step: int, name: str, number: float, problem: str) -> bool:
        """Judge a value from a recomputed step, and return whether the anomaly is resolved.

        Raises:
            AnomalyError: the recomputed value is the same non-finite number, so training cannot continue.
        """
        odd = self._odd[name]
        problem = problem or self._bands[name].problem(number)
        verdict = odd.judge(step, number, problem)
        if verdict is None:
            return False
        del self._odd[name]
        text = odd.sentence(verdict, number)
        if verdict is AnomalyVerdict.LASTING and not math.isfinite(number):
            raise _stopped(rank, odd.step, text)
        if verdict in (AnomalyVerdict.LASTING, AnomalyVerdict.UNSTEADY):
            self._accepted.add((name, step))
        self._say(process, rank, odd.step, text, is_verdict=True)
        return verdict is not AnomalyVerdict.MISSED

    @staticmethod
    def _say(
        process: Worker, rank: int, step: int, text: str, *, is_verdict: bool = False, comes_again: bool = False
    ) -> None:
        log.warn(f"rank {rank}, step {step}: {text}")
        process.agent.report_anomaly(step, text, is_verdict=is_verdict, comes_again=comes_again)

    def flush(self) -> None:
        """Write the last report if it has not been written yet."""
        if self._unwritten is None:
            return
        (process, step, values), self._unwritten = self._unwritten, None
        self._due_at = self._clock() + INTERVAL_S
        log_dir = process.settings.log_dir
        try:
            numbers = {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"state.report: a value is not a number ({error}). Fix: pass numbers or one-element tensors"
            ) from None
        if not log_dir.is_dir():
            return  # started without a launcher, so nothing reads the file
        try:
            write_report(log_dir, process.agent.node, ProgressReport(step, self._total_steps, numbers))
        except StoreError:
            return  # checkpoints already report a full disk
