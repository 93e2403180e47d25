"""Lightning's Trainer, killed and restarted, killed and replaced by a spare: the undisturbed run's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.foreign.frameworks.conftest import EXAMPLES

pytestmark = [pytest.mark.system, pytest.mark.thorough]

TRAINER = EXAMPLES / "lightning_trainer.py"


def test_trainers_fit_ends_with_the_undisturbed_bits(ends_with_the_undisturbed_bits: Callable[..., None]) -> None:
    """Rank 0 dies behind the step that ends the first epoch, whose evaluation is done again."""
    ends_with_the_undisturbed_bits(TRAINER, steps=15, kills=["0:4", "1:7"])
