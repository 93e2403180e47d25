"""Random numbers of a step: the same wherever it runs, and those of the checkpoints that exist."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from runtime.training import rng


def drawn() -> list[Any]:
    return [random.random(), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item(), torch.randn(1).item()]


def drawn_at(seed: int, rank: int, step: int) -> list[Any]:
    rng.seed_for(seed, rank, step)
    return drawn()


def test_a_step_draws_the_same_whatever_was_drawn_and_seeded_before() -> None:
    steps = [0, 1, 63, 64, 65, 10**9]
    forwards = [drawn_at(7, 3, step) for step in steps]
    rng.seed_for(8, 2, 64)
    numpy.random.randn(3)  # an odd number: NumPy keeps the other one of a pair
    assert [drawn_at(7, 3, step) for step in reversed(steps)] == forwards[::-1]


def test_every_part_of_the_key_matters() -> None:
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, 67), (3, 2, 1)]
    for one, *others in zip(*(drawn_at(*key) for key in keys), strict=True):
        assert one not in others


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ((0, 0, 0), [0.643202910390513, 0.24340299353599593, 0.48932827987674155]),
        ((5, 3, 64), [0.5872017226651598, 0.3207624779819037, 0.9215641128450116]),
        ((12345, 1, 100000), [0.36828562691588695, 0.18850438550092097, 0.056978864655380934]),
    ],
)
def test_jobs_that_exist_go_on_with_the_numbers_they_began_with(key: tuple[int, int, int], first: list[float]) -> None:
    rng.seed_for(*key)
    assert [random.random(), numpy.random.rand(), torch.rand(1, dtype=torch.float64).item()] == first
