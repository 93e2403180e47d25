"""Copying tensors into views: every layout gives the same bytes."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from samebits.training.checkpoint import staging


def targets_of(sources: list[torch.Tensor], shift: int) -> list[torch.Tensor]:
    """Return adjacent views into one buffer that starts ``shift`` elements off a cache line."""
    targets = []
    for source in sources:
        buffer = torch.full((source.numel() + shift,), 0, dtype=source.dtype)
        targets.append(buffer[shift:].view(source.shape))
    return targets


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_copied_bytes_equal_the_source(shift: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(staging, "SMALL_BYTES", 4096)
    monkeypatch.setattr(staging, "_WORTH_SHARING_BYTES", 8192)
    generator = torch.Generator().manual_seed(1)
    sizes = [0, 1, 7, 64, 1000, 1024, 5000, 20_000]
    sources = [
        torch.randn(size, generator=generator).to(dtype)
        for size, dtype in itertools.product(sizes, (torch.float32, torch.bfloat16, torch.int8))
    ]
    sources += [torch.randn(40, 30, generator=generator).t(), torch.randn(100, generator=generator)[::3]]
    sources += [torch.randn(9, dtype=torch.complex64, generator=generator).conj(), torch.tensor(3.0)]
    sources += [torch.randn(50, 50, generator=generator).requires_grad_()]
    targets = targets_of(sources, shift)
    staging.copy(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
        assert not target.requires_grad


def test_shares_cover_every_move_once() -> None:
    moves = [(number, number, size * 100_000) for number, size in enumerate([90, 1, 1, 50, 3, 0, 7, 200])]
    for threads in range(1, 9):
        shares = staging._shares(moves, threads)
        assert [move for share in shares for move in share] == moves
        assert 1 <= len(shares) <= threads
    assert staging._shares([], 4) == [[]]


@pytest.mark.parametrize(
    ("cores", "ranks_here", "of_torch", "expected"),
    [(2, 1, 1, 2), (2, 4, 1, 1), (96, 8, 1, 8), (16, 4, 1, 4), (4, 4, 3, 3), (64, 1, 64, 8)],
)
def test_load_uses_this_ranks_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks_here: int, of_torch: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    assert staging.loading_threads(ranks_here) == expected
