"""Curves that go back with the state: TensorBoard's, or those of a run such as W&B's.

Here lives what a loss does to a curve; the values are the script's own. The one idea: the training function is called
again after every loss, and the state then says at which step, so one call at its top is all that a curve needs: what
was drawn of later steps never was, and the place is marked. Only rank 0 draws; a new rank 0 is told the same.
"""

from __future__ import annotations

from typing import Any, Protocol

from samebits.training.state.base_state import State

__all__ = ["RunCurves", "TensorBoardCurves"]

RECOVERY = "samebits/recovery"
STEP = "samebits/step"


class _Run(Protocol):
    """What is used of ``wandb.Run``, and of whatever is made like it."""

    def log(self, data: dict[str, Any]) -> None:
        """Values that belong together."""


class TensorBoardCurves:
    """A ``SummaryWriter`` whose curves go back with the state.

    ::

        curves = TensorBoardCurves(SummaryWriter("runs"), state)

        @samebits.elastic.run
        def train(state):
            curves.begin()
            ...
            state.commit()
            curves.add_scalar("loss", loss)

    Args:
        writer: of ``torch.utils.tensorboard`` or ``tensorboardX``; None on the ranks that draw nothing.
        state: whose steps are the curves' x.
    """

    def __init__(self, writer: Any, state: State) -> None:
        self._writer, self._state = writer, state
        self._recoveries = 0

    def begin(self) -> None:
        """The training function begins, for the first time or anew: what lies behind the state's step is taken back.

        TensorBoard hides what an earlier start of a writer has written from a step on (``purge_step``); the same entry
        is written here, and a text that marks the step.
        """
        step = self._state.completed_steps
        if self._writer is None or not (step or self._recoveries):
            self._recoveries += self._writer is not None
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._writer.file_writer.add_event(start)
        self._writer.add_text(RECOVERY, f"goes on from step {step}", step + 1)
        self._writer.flush()
        self._recoveries += 1

    def add_scalar(self, tag: str, value: float) -> None:
        """Draw one value at the state's step; called after ``commit()``."""
        if self._writer is not None:
            self._writer.add_scalar(tag, value, self._state.completed_steps)


class RunCurves:
    """A run such as W&B's. It cannot take back what was logged, so each value says its step and how often it went back.

    The step is a value of its own (``samebits/step``; ``run.define_metric("*", step_metric="samebits/step")`` makes it
    the x of all charts), because W&B drops what is logged at a step below its last. ``samebits/recovery`` counts how
    often this job's training function has begun in this process, so a chart can be grouped by it.

    Args:
        run: has ``log(dict)``; None on the ranks that draw nothing.
        state: whose steps are the curves' x.
    """

    def __init__(self, run: _Run | None, state: State) -> None:
        self._run, self._state = run, state
        self._recoveries = -1

    def begin(self) -> None:
        """The training function begins, for the first time or anew."""
        self._recoveries += 1
        self.log({})

    def log(self, values: dict[str, Any]) -> None:
        """Values at the state's step; called after ``commit()``."""
        if self._run is not None:
            self._run.log({**values, STEP: self._state.completed_steps, RECOVERY: self._recoveries})
