"""Random numbers of a step: equal wherever it runs, and compatible with existing checkpoints."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from samebits.training.state import rng


def drawn() -> list[Any]:
    return [random.random(), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item(), torch.randn(1).item()]


def drawn_at(seed: int, rank: int, step: int) -> list[Any]:
    rng.seed_for(seed, rank, step)
    return drawn()


def test_step_draws_the_same_whatever_was_drawn_or_seeded_before() -> None:
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
def test_existing_jobs_continue_with_their_numbers(key: tuple[int, int, int], first: list[float]) -> None:
    rng.seed_for(*key)
    assert [random.random(), numpy.random.rand(), torch.rand(1, dtype=torch.float64).item()] == first


# ---- an accelerator's generator


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate torch's interface of one kind of accelerator, with a CPU generator."""
    generator = torch.Generator().manual_seed(1)
    module = SimpleNamespace(
        kind="xpu", get_rng_state=generator.get_state, set_rng_state=generator.set_state, generator=generator
    )
    modules = {"xpu": module, "cuda": module}
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(module.kind)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda found: modules[torch.device(found).type])
    return module


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_accelerators_numbers_are_restored_for_every_kind(accelerator: SimpleNamespace, kind: str) -> None:
    accelerator.kind = kind
    state = rng.capture()
    first = torch.rand(3, generator=accelerator.generator)
    for _ in range(2):  # the captured state must be available twice
        rng.restore(state)
        assert torch.equal(torch.rand(3, generator=accelerator.generator), first)


def test_existing_points_have_cudas_numbers_under_its_name(accelerator: SimpleNamespace) -> None:
    accelerator.kind = "cuda"
    earlier = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": accelerator.get_rng_state()}
    first = torch.rand(3, generator=accelerator.generator)
    rng.restore(earlier)
    assert torch.equal(torch.rand(3, generator=accelerator.generator), first)
    assert rng.capture().keys() >= earlier.keys()


def test_numbers_of_another_kind_or_none_leave_an_accelerator_alone(accelerator: SimpleNamespace) -> None:
    state = rng.capture()
    before = accelerator.get_rng_state()
    accelerator.kind = "cuda"
    rng.restore(state)
    assert torch.equal(accelerator.get_rng_state(), before)


def test_without_an_accelerator_only_the_cpus_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    state = rng.capture()
    assert state.keys() == {"python", "numpy", "torch"}
    first = drawn()
    rng.restore(state)
    assert drawn() == first
