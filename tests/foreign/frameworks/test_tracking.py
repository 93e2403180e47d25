"""Curves of a state that rolls back: as read by TensorBoard, and as passed to a run such as W&B's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from samebits.integrations import tracking
from samebits.integrations.tracking import RunCurves, TensorBoardCurves


class Steps:
    """The used part of a state."""

    completed_steps = 0


def trained(curves: TensorBoardCurves, state: Steps, steps: range, value: float) -> None:
    curves.begin()
    for step in steps:
        state.completed_steps = step  # as commit() does
        curves.add_scalar("loss", value)


def shown(folder: Path) -> tuple[list[tuple[int, float]], list[str]]:
    """Return what TensorBoard shows: the points of the loss, and the marks."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    marks = [event.tensor_proto.string_val[0].decode() for event in reader.Tensors("samebits/recovery/text_summary")]
    return [(event.step, event.value) for event in reader.Scalars("loss")], marks


def test_rolled_back_steps_are_removed_and_the_place_is_marked(tmp_path: Path) -> None:
    state = Steps()
    writer = SummaryWriter(str(tmp_path))
    curves = TensorBoardCurves(writer, state)
    trained(curves, state, range(1, 11), 1.0)
    state.completed_steps = 5  # every rank was lost: back to a checkpoint
    trained(curves, state, range(6, 9), 2.0)
    writer.close()
    points, marks = shown(tmp_path)
    assert points == [*((step, 1.0) for step in range(1, 6)), *((step, 2.0) for step in range(6, 9))]
    assert marks == ["resumes from step 5"]


def test_replacement_continues_in_a_file_of_its_own(tmp_path: Path) -> None:
    state = Steps()
    for steps, value in [(range(1, 11), 1.0), (range(6, 9), 2.0)]:
        writer = SummaryWriter(str(tmp_path), filename_suffix=f".{value:g}")
        state.completed_steps = steps[0] - 1
        trained(TensorBoardCurves(writer, state), state, steps, value)
        writer.close()
    points, marks = shown(tmp_path)
    assert [step for step, value in points if value == 2.0] == [6, 7, 8]
    assert [step for step, value in points if value == 1.0] == [1, 2, 3, 4, 5]
    assert marks == ["resumes from step 5"]


def test_recovery_at_step_0_is_marked_too(tmp_path: Path) -> None:
    state = Steps()
    writer = SummaryWriter(str(tmp_path))
    curves = TensorBoardCurves(writer, state)
    trained(curves, state, range(1, 4), 1.0)
    state.completed_steps = 0
    trained(curves, state, range(1, 3), 2.0)
    writer.close()
    assert shown(tmp_path) == ([(1, 2.0), (2, 2.0)], ["resumes from step 0"])


def test_ranks_without_a_writer_log_nothing() -> None:
    state = Steps()
    trained(TensorBoardCurves(None, state), state, range(1, 4), 1.0)
    curves = RunCurves(None, state)
    curves.begin()
    curves.log({"loss": 1})


def test_run_gets_the_step_and_the_number_of_rollbacks() -> None:
    told: list[dict[str, Any]] = []

    class Run:
        def log(self, data: dict[str, Any]) -> None:
            told.append(data)

    state = Steps()
    curves = RunCurves(Run(), state)
    curves.begin()
    state.completed_steps = 7
    curves.log({"loss": 0.5})
    state.completed_steps = 5
    curves.begin()
    assert told == [
        {"samebits/step": 0, "samebits/recovery": 0},
        {"loss": 0.5, "samebits/step": 7, "samebits/recovery": 0},
        {"samebits/step": 5, "samebits/recovery": 1},
    ]


def test_there_are_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Writer'"):
        _ = tracking.Writer
