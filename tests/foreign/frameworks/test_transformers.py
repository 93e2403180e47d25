"""Transformers' Trainer ends with the undisturbed bits after a restart and after a replacement by a spare."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.foreign.frameworks.conftest import EXAMPLES

pytestmark = [pytest.mark.system, pytest.mark.thorough]

TRAINER = EXAMPLES / "transformers_trainer.py"


def test_trainer_ends_with_the_undisturbed_bits(ends_with_the_undisturbed_bits: Callable[..., None]) -> None:
    """An epoch has 20 batches per rank, the last one smaller, in 10 steps. One kill follows an epoch's last step."""
    ends_with_the_undisturbed_bits(TRAINER, steps=30, kills=["1:7", "0:20"])
