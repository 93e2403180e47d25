"""A global batch over any number of ranks: assignment of micro-batches, and sums with equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from samebits.errors import UsageError
from samebits.training.process import context
from samebits.training.state.data.global_batch import (
    BlockSum,
    GlobalBatch,
    TreeNode,
    block_of,
    split_of,
    subtrees_within,
    sum_of,
)
from samebits.training.state.data.sampler import ElasticSampler

COUNTS = st.integers(1, 40)
WORLDS = st.integers(1, 12)


def leaves(node: TreeNode) -> list[int]:
    return list(range(*node))


@given(COUNTS)
def test_node_is_split_after_a_full_tree(count: int) -> None:
    if count > 1:
        middle = split_of((0, count))
        assert middle & (middle - 1) == 0 and count / 2 <= middle < count
        assert split_of((7, 7 + count)) == 7 + middle, "a subtree's shape does not depend on its place"


@given(COUNTS, WORLDS)
def test_blocks_cover_all_micro_batches_once_with_whole_subtrees(count: int, world: int) -> None:
    blocks = [block_of(rank, world, count) for rank in range(world)]
    assert [one for block in blocks for one in leaves(block)] == list(range(count))
    sizes = {high - low for low, high in blocks}
    assert max(sizes) - min(sizes) <= 1
    for block in blocks:
        nodes = subtrees_within((0, count), block) if count else []
        assert [one for node in nodes for one in leaves(node)] == leaves(block)
        assert len(nodes) <= 2 * count.bit_length(), "few are sent"


@settings(deadline=None)
@given(COUNTS, WORLDS, st.integers(0, 2**32))
def test_sum_has_the_same_bits_in_every_world(count: int, world: int, seed: int) -> None:
    values = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)) * 10.0 ** torch.arange(-2, 3)

    def total(size: int) -> torch.Tensor:
        parts: dict[TreeNode, torch.Tensor] = {}
        for rank in range(size):
            block = block_of(rank, size, count)
            mine = BlockSum(count, block)
            for number in leaves(block):
                mine.add(number, values[number].clone())
                assert len(mine._parts) <= count.bit_length() + len(mine._wanted)
            parts |= dict(zip(subtrees_within((0, count), block), mine.sums(), strict=True))
        return sum_of((0, count), parts)

    assert torch.equal(total(world), total(1))
    assert torch.allclose(total(1).double(), values.double().sum(0), rtol=1e-4, atol=1e-3)


SAMPLES, FEATURES = 37, 6


class World:
    """The simulated rank and world size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size, self.rank = size, 0
        monkeypatch.setattr(context, "get_rank", lambda: self.rank)
        monkeypatch.setattr(context, "get_world_size", lambda: self.size)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(2)
    inputs, labels = torch.randn(SAMPLES, FEATURES, generator=drawn), torch.randint(0, 3, (SAMPLES,), generator=drawn)
    return TensorDataset(torch.arange(SAMPLES), inputs, labels)


def batches_for(bare: nn.Module, **sizes: int) -> GlobalBatch:
    return GlobalBatch(ElasticSampler(data(), seed=4), bare.parameters(), **{"size": 12, "micro": 5, **sizes})


def test_one_step_equals_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, 1)
    bare = model().eval()  # no dropout: the reference is computed in one piece
    batches = batches_for(bare)
    loader = DataLoader(data(), batch_sampler=batches)
    order = ElasticSampler(data(), seed=4).rest_of_epoch()
    seen: list[int] = []
    for number, step in enumerate(batches.steps(loader)):
        taken: list[int] = []
        for indices, inputs, labels in step:
            taken += indices.tolist()
            step.backward(F.cross_entropy(bare(inputs), labels))
        loss = step.reduce()
        wanted = order[12 * number : 12 * number + 12]
        assert taken == wanted
        seen += taken
        _, inputs, labels = data()[wanted]
        reference = F.cross_entropy(bare(inputs), labels)
        assert abs(loss - reference.item()) < 1e-6
        for parameter, grad in zip(
            bare.parameters(), torch.autograd.grad(reference, list(bare.parameters())), strict=True
        ):
            assert parameter.grad is not None and torch.allclose(parameter.grad, grad, atol=1e-6)
        assert batches.sampler.consumed == min(12 * (number + 1), SAMPLES)
    assert sorted(seen) == list(range(SAMPLES))
    assert list(batches.steps(loader)) == []


def test_ranks_share_each_global_batch_and_know_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 4)
    batches = batches_for(model())
    by_rank = []
    for world.rank in range(4):
        by_rank.append(list(batches))
        assert len(batches) == len(by_rank[-1])
    assert [len(of) for of in by_rank] == [0, 3, 3, 4], "with three micro-batches per step one rank has none"
    assert sorted(one for of in by_rank for micro in of for one in micro) == list(range(SAMPLES))


def test_invalid_arguments_are_refused() -> None:
    bare = model()
    for sizes in ({"micro": 0}, {"micro": 13}):
        with pytest.raises(UsageError, match=r"expected 1 ≤ micro ≤ size\. Fix: "):
            batches_for(bare, **sizes)
    with pytest.raises(UsageError, match="no parameter that needs a gradient"):
        GlobalBatch(ElasticSampler(data()), [], size=2, micro=1)


def first_step(bare: nn.Module) -> tuple[Any, Iterator[Any]]:
    batches = batches_for(bare)
    step = next(batches.steps(DataLoader(data(), batch_sampler=batches)))
    return step, iter(step)


def test_skipped_micro_batch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, 1)
    bare = model()
    step, micros = first_step(bare)
    with pytest.raises(UsageError, match=r"step\.reduce\(\) was called after only 0 of 3 micro-batches\. Fix: "):
        step.reduce()
    _, inputs, labels = next(micros)
    with pytest.raises(UsageError, match="was skipped"):
        next(micros)
    step, micros = first_step(bare)
    _, inputs, labels = next(micros)
    step.backward(F.cross_entropy(bare(inputs), labels))
    with pytest.raises(UsageError, match="once for each micro-batch"):
        step.backward(F.cross_entropy(bare(inputs), labels))


def test_unused_and_narrow_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, 1)
    bare = nn.Linear(FEATURES, 3).bfloat16()
    idle = nn.Parameter(torch.ones(2))
    batches = GlobalBatch(ElasticSampler(data()), [*bare.parameters(), idle], size=37, micro=10)
    (step,) = batches.steps(DataLoader(data(), batch_sampler=batches))
    for _, inputs, labels in step:
        step.backward(F.cross_entropy(bare(inputs.bfloat16()).float(), labels))
    step.reduce()
    assert idle.grad is not None and idle.grad.tolist() == [0, 0]
    assert bare.weight.grad is not None and bare.weight.grad.dtype == torch.bfloat16
