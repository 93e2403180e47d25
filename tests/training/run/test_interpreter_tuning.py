"""InterpreterTuning: what is switched in the interpreter while a generation is formed, and that it is switched back."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from samebits.training.run.interpreter_tuning import HAND_OVER_S, InterpreterTuning

AT_EASE_S = 0.004


@pytest.fixture(params=[True, False], ids=["collecting", "collector off"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """As a user may have set it."""
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


def test_haste_ends_as_it_began(collects: bool) -> None:
    tuning = InterpreterTuning()
    for _ in range(2):
        tuning.begin()
        assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(HAND_OVER_S), False)
        tuning.end()
        assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(AT_EASE_S), collects)


def test_haste_that_begins_or_ends_twice_is_the_same(collects: bool) -> None:
    tuning = InterpreterTuning()
    tuning.end()
    assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(AT_EASE_S), collects)
    tuning.begin()
    tuning.begin()
    tuning.end()
    tuning.end()
    assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(AT_EASE_S), collects)


def test_garbage_is_collected_while_others_are_waited_for(collects: bool) -> None:
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
