"""Transformers' Trainer, killed and restarted, killed and replaced by a spare: the undisturbed run's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.foreign.frameworks.conftest import EXAMPLES

pytestmark = [pytest.mark.system, pytest.mark.thorough]

TRAINER = EXAMPLES / "transformers_trainer.py"


def test_the_trainer_ends_with_the_undisturbed_bits(ends_with_the_undisturbed_bits: Callable[..., None]) -> None:
    """An epoch has 20 batches a rank, the last one of them smaller, in 10 steps: one kill is behind an epoch's last."""
    ends_with_the_undisturbed_bits(TRAINER, steps=30, kills=["1:7", "0:20"])
