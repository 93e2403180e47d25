"""Tensors in contiguous buffers: changed together, each in its own place, or not at all."""

from __future__ import annotations

import pytest
import torch

from samebits.training.group.transfer import FlatBuffers


def tensors() -> list[torch.Tensor]:
    return [torch.ones(2, 3), torch.arange(4.0, dtype=torch.float64), torch.zeros(()), torch.ones(3, 2).t()]


def test_each_tensor_is_changed_in_its_own_place_and_kinds_stay_apart() -> None:
    given, seen = tensors(), []
    flat = FlatBuffers()

    def number(one: torch.Tensor) -> None:
        seen.append((one.dtype, one.numel()))
        one.copy_(torch.arange(one.numel()))

    for _ in range(2):
        flat.change(given, number)
    assert seen == [(torch.float32, 13), (torch.float64, 4)] * 2
    assert given[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert given[1].tolist() == [0, 1, 2, 3]
    assert given[2].item() == 6
    assert given[3].tolist() == [[7, 8, 9], [10, 11, 12]]


def test_memory_is_reused_and_follows_a_change_of_size() -> None:
    places: list[tuple[int, int]] = []
    flat = FlatBuffers()
    for sizes in ([2, 3], [2, 3], [7]):
        flat.change([torch.ones(size) for size in sizes], lambda one: places.append((one.data_ptr(), one.numel())))
    assert places[0] == places[1]
    assert places[2][1] == 7


def test_failure_in_the_second_kind_leaves_the_first_unchanged() -> None:
    given = tensors()

    def change(one: torch.Tensor) -> None:
        if one.dtype is torch.float64:
            raise RuntimeError("a member was lost")
        one.zero_()

    with pytest.raises(RuntimeError, match="lost"):
        FlatBuffers().change(given, change)
    assert all(torch.equal(now, before) for now, before in zip(given, tensors(), strict=True))
