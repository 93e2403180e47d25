"""The data position: every sample once per epoch, split among ranks, resumable at any batch."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from samebits.service.log import LOGGER
from samebits.training.process import context
from samebits.training.state.data.sampler import ElasticSampler


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Set the rank and world size that the sampler sees."""
    world = {"rank": 0, "size": 4}
    monkeypatch.setattr(context, "get_rank", lambda: world["rank"])
    monkeypatch.setattr(context, "get_world_size", lambda: world["size"])
    return world


def taken(sampler: ElasticSampler, world: dict[str, int]) -> list[list[int]]:
    """Return what each rank takes from the sampler's position on."""
    shares = []
    for rank in range(world["size"]):
        world["rank"] = rank
        shares.append(list(sampler))
    return shares


@pytest.mark.parametrize("samples", [1, 3, 4, 5, 100, 103])
@pytest.mark.parametrize("shuffle", [False, True])
def test_epoch_holds_every_sample_and_all_ranks_take_equally_many(
    world: dict[str, int], samples: int, shuffle: bool
) -> None:
    sampler = ElasticSampler(range(samples), shuffle=shuffle, seed=3)
    shares = taken(sampler, world)
    assert {len(share) for share in shares} == {len(sampler)}
    counts = Counter(index for share in shares for index in share)
    assert set(counts) == set(range(samples))
    assert sum(counts.values()) - samples == -samples % 4  # only the padding of the last round is taken twice


def test_epochs_are_shuffled_differently_and_reproducibly(world: dict[str, int]) -> None:
    first, again = ElasticSampler(range(50), seed=1), ElasticSampler(range(50), seed=1)
    epoch_0 = taken(first, world)
    assert taken(again, world) == epoch_0
    first.set_epoch(1)
    assert taken(first, world) != epoch_0
    assert taken(ElasticSampler(range(50), seed=2), world) != epoch_0


def test_resuming_after_recorded_batches_equals_the_undisturbed_iteration(world: dict[str, int]) -> None:
    sampler = ElasticSampler(range(64), seed=5)
    undisturbed = taken(sampler, world)
    sampler.record_batch(0, batch_size=3)
    sampler.record_batch(1, batch_size=3)
    position = sampler.state_dict()
    assert position["consumed"] == 24

    resumed = ElasticSampler(range(64), seed=0)
    resumed.load_state_dict(position)
    assert taken(resumed, world) == [share[6:] for share in undisturbed]
    resumed.record_batch(0, batch_size=3)  # numbered from the new iteration's start
    assert resumed.consumed == 36


def test_short_last_batch_does_not_count_beyond_the_end(world: dict[str, int]) -> None:
    sampler = ElasticSampler(range(10))
    list(sampler)
    sampler.record_batch(0, batch_size=32)
    assert sampler.consumed == 10
    assert taken(sampler, world) == [[], [], [], []]


def test_setting_the_current_epoch_again_keeps_the_position(world: dict[str, int]) -> None:
    sampler = ElasticSampler(range(64))
    sampler.record_batch(0, batch_size=4)
    sampler.set_epoch(0)
    assert sampler.consumed == 16
    sampler.set_epoch(1)
    assert sampler.consumed == 0


def test_last_batch_is_recorded_by_its_own_size_or_the_loaders(world: dict[str, int]) -> None:
    for sizes in ([4, 4, 2], [4, 4, 4]):
        sampler = ElasticSampler(range(38))  # ten per rank, the last two padded
        list(sampler)
        seen = []
        for batch_idx, size in enumerate(sizes):
            sampler.record_batch(batch_idx, size)
            seen.append(sampler.consumed)
        assert seen == [16, 32, 38]


def test_abandoned_iteration_is_continued_by_the_next(world: dict[str, int]) -> None:
    sampler = ElasticSampler(range(64), seed=5)
    undisturbed = taken(sampler, world)
    sampler.record_batch(0, 3)
    sampler.record_batch(1, 3)
    assert taken(sampler, world) == [share[6:] for share in undisturbed]  # as after a `break`
    sampler.record_batch(0, 5)  # numbered from 0 again, of another size
    assert sampler.consumed == 24 + 20


def test_recorded_indices_count_like_batches(world: dict[str, int]) -> None:
    by_batch, by_index = ElasticSampler(range(100), seed=1), ElasticSampler(range(100), seed=1)
    share = list(by_index)
    list(by_batch)
    for batch_idx in range(3):
        by_batch.record_batch(batch_idx, 5)
        by_index.record_indices(share[5 * batch_idx : 5 * batch_idx + 5])
        assert by_index.state_dict() == by_batch.state_dict()
    assert by_index.consumed == 60


def test_length_is_that_of_the_iteration_that_started(world: dict[str, int]) -> None:
    """A schedule that reads a loader's length in the middle of an epoch gets the same answer in every step."""
    sampler = ElasticSampler(range(64))
    loader = DataLoader(range(64), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    list(sampler)
    for batch_idx in range(4):
        assert (len(sampler), len(loader)) == (16, 4)
        sampler.record_batch(batch_idx, 4)
    position = {**sampler.state_dict(), "consumed": 32}
    sampler.load_state_dict(position)
    assert (len(sampler), len(loader)) == (8, 2)
    sampler.set_epoch(1)
    assert len(sampler) == 16


def test_epoch_without_samples_is_warned_of_the_second_time(
    world: dict[str, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    sampler = ElasticSampler(range(8))
    sampler.load_state_dict({"seed": 0, "epoch": 3, "consumed": 8})
    with caplog.at_level(logging.WARNING):
        assert list(sampler) == []
        assert not caplog.records  # what a recovery at the end of an epoch finds
        assert list(sampler) == []
    assert "epoch 3" in caplog.text and "set_epoch" in caplog.text
    caplog.clear()
    sampler.set_epoch(4)
    assert len(list(sampler)) == 2
    assert not caplog.records


def test_iteration_that_started_before_its_epoch_is_reported_once(
    world: dict[str, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is inspected, and the loop continues with that iterator after its set_epoch()."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    sampler = ElasticSampler(range(8))
    with caplog.at_level(logging.WARNING):
        list(sampler)
        sampler.set_epoch(0)  # the current epoch
        sampler.record_batch(0, 1)
        assert not caplog.records
        list(sampler)
        sampler.set_epoch(1)
        sampler.record_batch(0, 1)
        sampler.record_batch(1, 1)
    assert caplog.text.count("this batch is from an iteration") == 1
    assert (
        "began before epoch 1: after a loss" in caplog.text
        and "Fix: call sampler.set_epoch() before iter(loader)" in caplog.text
    )


def test_large_seed_is_accepted(world: dict[str, int]) -> None:
    shares = taken(ElasticSampler(range(8), seed=2**62 + 1), world)
    assert sorted(index for share in shares for index in share) == list(range(8))


# ---- the world changes in the middle of an epoch

Stay = tuple[int, int, int, int]  # world size, batch size, recorded batches, batches taken beyond them

STAYS = st.lists(
    st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=8
)


class Ranks:
    """All ranks of a job, each with its own sampler, through different world sizes."""

    def __init__(self, world: dict[str, int], samples: int, seed: int, shuffle: bool) -> None:
        self.world = world
        self.samples = samples
        self.position = ElasticSampler(range(samples), shuffle=shuffle, seed=seed).state_dict()
        self.shuffle = shuffle
        self.seen: Counter[int] = Counter()

    def stay(self, size: int, batch_size: int, batches: int, beyond: int) -> None:
        """Run a generation that ends after some committed batches and some that are lost with it."""
        self.world["size"] = size
        positions = []
        for rank in range(size):
            self.world["rank"] = rank
            sampler = ElasticSampler(range(self.samples), shuffle=self.shuffle, seed=99)
            sampler.load_state_dict(self.position)
            loader = DataLoader(range(self.samples), batch_size=batch_size, sampler=sampler)  # type: ignore[arg-type]
            for batch_idx, batch in enumerate(loader):
                if batch_idx == batches + beyond:
                    break
                if batch_idx < batches:
                    sampler.record_batch(batch_idx, len(batch) if rank % 2 else batch_size)
                    self.seen.update(batch.tolist())
            positions.append(sampler.state_dict())
        assert positions == [positions[0]] * size, "the ranks stand at different places"
        self.position = positions[0]

    def finish(self) -> int:
        """Use the remaining samples; return the world size this happens at."""
        self.stay(self.world["size"], 4, self.samples + 1, 0)
        return self.world["size"]


@settings(max_examples=150, deadline=None)
@given(samples=st.integers(0, 120), seed=st.integers(0, 5), shuffle=st.booleans(), stays=STAYS)
def test_changing_world_neither_repeats_nor_skips_a_sample(
    samples: int, seed: int, shuffle: bool, stays: list[Stay]
) -> None:
    world = {"rank": 0, "size": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "get_rank", lambda: world["rank"])
        patch.setattr(context, "get_world_size", lambda: world["size"])
        ranks = Ranks(world, samples, seed, shuffle)
        for stay in stays:
            ranks.stay(*stay)
            assert ranks.position["consumed"] <= samples
            if ranks.position["consumed"] < samples:
                assert sum(ranks.seen.values()) == len(ranks.seen) == ranks.position["consumed"]
        last = ranks.finish()
    assert set(ranks.seen) == set(range(samples)), "a sample was skipped"
    filled_up = sum(ranks.seen.values()) - samples
    assert 0 <= filled_up < max([last, *(size for size, *_ in stays)]), "more than one round was padded"
    assert ranks.position["consumed"] == samples


def test_recorded_samples_are_those_of_this_rank(world: dict[str, int]) -> None:
    sampler = ElasticSampler(range(50), seed=5)
    told: list[list[int]] = []
    sampler.on_record = lambda indices: told.append(list(indices))
    world["rank"] = 2
    share = list(sampler)
    assert len(share) == 13
    sampler.record_batch(0, 5)
    sampler.record_batch(1, 5)
    sampler.record_batch(2, 3)
    sampler.record_indices((7, 8))
    assert told == [share[:5], share[5:10], share[10:], [7, 8]]
    told.clear()
    sampler.load_state_dict({"seed": 5, "epoch": 0, "consumed": 20})  # the loader has not been iterated again yet
    sampler.record_batch(0, 5)
    assert told == [[]]
    rest = list(sampler)
    sampler.record_batch(0, 2)
    assert told[1:] == [rest[:2]]
