"""The data position: every sample once an epoch, split among ranks, resumable at any batch."""

from __future__ import annotations

from collections import Counter

import pytest

from runtime.training import context
from runtime.training.sampler import ElasticSampler


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The rank and world size the sampler believes to be in."""
    world = {"rank": 0, "size": 4}
    monkeypatch.setattr(context, "get_rank", lambda: world["rank"])
    monkeypatch.setattr(context, "get_world_size", lambda: world["size"])
    return world


def taken(sampler: ElasticSampler, world: dict[str, int]) -> list[list[int]]:
    """What each rank takes from the sampler's position on."""
    shares = []
    for rank in range(world["size"]):
        world["rank"] = rank
        shares.append(list(sampler))
    return shares


@pytest.mark.parametrize("samples", [1, 3, 4, 5, 100, 103])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_holds_every_sample_and_all_ranks_take_equally_many(
    world: dict[str, int], samples: int, shuffle: bool
) -> None:
    sampler = ElasticSampler(range(samples), shuffle=shuffle, seed=3)
    shares = taken(sampler, world)
    assert {len(share) for share in shares} == {len(sampler)}
    counts = Counter(index for share in shares for index in share)
    assert set(counts) == set(range(samples))
    assert sum(counts.values()) - samples == -samples % 4  # only what fills up the last round is taken twice


def test_epochs_are_shuffled_differently_and_reproducibly(world: dict[str, int]) -> None:
    first, again = ElasticSampler(range(50), seed=1), ElasticSampler(range(50), seed=1)
    epoch_0 = taken(first, world)
    assert taken(again, world) == epoch_0
    first.set_epoch(1)
    assert taken(first, world) != epoch_0
    assert taken(ElasticSampler(range(50), seed=2), world) != epoch_0


def test_going_on_after_recorded_batches_takes_what_the_undisturbed_iteration_takes(world: dict[str, int]) -> None:
    sampler = ElasticSampler(range(64), seed=5)
    undisturbed = taken(sampler, world)
    sampler.record_batch(0, batch_size=3)
    sampler.record_batch(1, batch_size=3)
    position = sampler.state_dict()
    assert position["consumed"] == 24

    resumed = ElasticSampler(range(64), seed=0)
    resumed.load_state_dict(position)
    assert taken(resumed, world) == [share[6:] for share in undisturbed]
    resumed.record_batch(0, batch_size=3)  # numbered from the new iteration's beginning
    assert resumed.consumed == 36


def test_a_short_last_batch_does_not_count_beyond_the_end(world: dict[str, int]) -> None:
    sampler = ElasticSampler(range(10))
    list(sampler)
    sampler.record_batch(0, batch_size=32)
    assert sampler.consumed == 10
    assert taken(sampler, world) == [[], [], [], []]


def test_naming_the_present_epoch_again_keeps_the_position(world: dict[str, int]) -> None:
    sampler = ElasticSampler(range(64))
    sampler.record_batch(0, batch_size=4)
    sampler.set_epoch(0)
    assert sampler.consumed == 16
    sampler.set_epoch(1)
    assert sampler.consumed == 0
