"""Interpreter settings that are changed while a generation forms, and restored afterwards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from samebits.training.run.process_tuning import HAND_OVER_S, InterpreterTuning

AT_EASE_S = 0.004


@pytest.fixture(params=[True, False], ids=["collecting", "collector off"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Set the garbage collector as a user may have."""
    before_s, collected = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(AT_EASE_S)
    if request.param:
        gc.enable()
    else:
        gc.disable()
    yield request.param
    sys.setswitchinterval(before_s)
    if collected:
        gc.enable()


def test_settings_are_restored(collects: bool) -> None:
    tuning = InterpreterTuning()
    for _ in range(2):
        tuning.begin()
        assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(HAND_OVER_S), False)
        tuning.end()
        assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(AT_EASE_S), collects)


def test_repeated_start_or_end_has_no_effect(collects: bool) -> None:
    tuning = InterpreterTuning()
    tuning.end()
    assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(AT_EASE_S), collects)
    tuning.begin()
    tuning.begin()
    tuning.end()
    tuning.end()
    assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(AT_EASE_S), collects)


def test_garbage_is_collected_while_waiting_for_others(collects: bool) -> None:
    tuning = InterpreterTuning()
    tuning.begin()
    with tuning.waits():
        assert gc.isenabled() is collects
    assert not gc.isenabled()
    with pytest.raises(KeyboardInterrupt), tuning.waits():
        raise KeyboardInterrupt
    assert not gc.isenabled()
    tuning.end()
    assert gc.isenabled() is collects
