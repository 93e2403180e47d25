"""Training curves that go back to earlier steps when the state does, for TensorBoard or runs such as W&B's.

The training function is called again after every loss, and the state then has the step to resume from. One call at the
beginning of the function is therefore enough: it discards values of later steps and marks the step. Only rank 0 draws
curves; a new rank 0 continues the same files.
"""

from __future__ import annotations

from typing import Any, Protocol

from samebits.training.state.base_state import State

__all__ = ["RunCurves", "TensorBoardCurves"]

RECOVERY = "samebits/recovery"
STEP = "samebits/step"


class _Run(Protocol):
    """The methods of ``wandb.Run``, or of a similar class, that are used."""

    def log(self, data: dict[str, Any]) -> None:
        """Log values that belong together."""


class TensorBoardCurves:
    """A ``SummaryWriter`` whose curves go back to earlier steps when the state does.

    ::

        curves = TensorBoardCurves(SummaryWriter("runs"), state)

        @samebits.elastic.run
        def train(state):
            curves.begin()
            ...
            state.commit()
            curves.add_scalar("loss", loss)

    Args:
        writer: a writer of ``torch.utils.tensorboard`` or ``tensorboardX``; None on ranks that draw nothing.
        state: its step is the curves' x value.
    """

    def __init__(self, writer: Any, state: State) -> None:
        self._writer, self._state = writer, state
        self._recoveries = 0

    def begin(self) -> None:
        """Discard values of steps after the state's; call this first in the training function.

        TensorBoard hides the values that an earlier writer logged from a given step on (``purge_step``). This method
        writes the same entry, with a text that marks the step.
        """
        step = self._state.completed_steps
        if self._writer is None or not (step or self._recoveries):
            self._recoveries += self._writer is not None
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._writer.file_writer.add_event(start)
        self._writer.add_text(RECOVERY, f"resumes from step {step}", step + 1)
        self._writer.flush()
        self._recoveries += 1

    def add_scalar(self, tag: str, value: float) -> None:
        """Draw one value at the state's step. Call this after ``commit()``."""
        if self._writer is not None:
            self._writer.add_scalar(tag, value, self._state.completed_steps)


class RunCurves:
    """A run such as W&B's, which cannot discard values, so each value has its step and a recovery count.

    The step is a value of its own (``samebits/step``; ``run.define_metric("*", step_metric="samebits/step")`` makes it
    the x of all charts), because W&B drops values logged at a step below its last. ``samebits/recovery`` counts how
    often this job's training function has restarted in this process, so a chart can be grouped by it.

    Args:
        run: has ``log(dict)``; None on ranks that draw nothing.
        state: its step is the curves' x value.
    """

    def __init__(self, run: _Run | None, state: State) -> None:
        self._run, self._state = run, state
        self._recoveries = -1

    def begin(self) -> None:
        """Count a call of the training function."""
        self._recoveries += 1
        self.log({})

    def log(self, values: dict[str, Any]) -> None:
        """Log values at the state's step; call it after ``commit()``."""
        if self._run is not None:
            self._run.log({**values, STEP: self._state.completed_steps, RECOVERY: self._recoveries})
