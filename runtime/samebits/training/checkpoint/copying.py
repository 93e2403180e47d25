"""Tensors into views of the same kinds: as fast as the memory takes them.

Nothing but the copying lives here. The one idea: torch's own copy shares out each large tensor among its threads and is
at its best where the target is aligned to cache lines; a file without gaps aligns only some of its tensors, and for
small ones the threads' meeting costs more than the bytes, so those go by plain memmove, shared out as whole tensors.

Tensors of an accelerator are fetched by itself (``pinning``).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from samebits.training.checkpoint import pinning

SMALL_BYTES = 1024 * 1024
_CACHE_LINE_BYTES = 64
_WORTH_SHARING_BYTES = 8 * 1024 * 1024
_MOST_THREADS = 8

_Move = tuple[int, int, int]  # target, source, bytes


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, a contiguous CPU tensor of the same dtype and shape."""
    moves: list[_Move] = []
    others: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    elsewhere: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if not source.is_cpu:
            elsewhere[0].append(target)
            elsewhere[1].append(source)
            continue
        size = target.nbytes
        address = target.data_ptr()
        is_plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
        if is_plain and (size < SMALL_BYTES or address % _CACHE_LINE_BYTES):
            moves.append((address, source.data_ptr(), size))
        else:
            others[0].append(target)
            others[1].append(source)
    shares = _shares(moves, threads())
    pending = [_pool().submit(_move, share) for share in shares[1:]]
    _move(shares[0])
    if others[0]:
        with torch.no_grad():
            torch._foreach_copy_(*others)
    if elsewhere[0]:
        pinning.fetch(*elsewhere)
    for one in pending:
        one.result()


def threads() -> int:
    """How many share large copies: as many as torch has, within reason."""
    return min(torch.get_num_threads(), _MOST_THREADS)


def loading_threads(local_world_size: int) -> int:
    """How many share a load: none of the ranks of this host trains meanwhile, and each has its part of the cores."""
    return min(max(torch.get_num_threads(), len(os.sched_getaffinity(0)) // local_world_size), _MOST_THREADS)


def _move(moves: Sequence[_Move]) -> None:
    for move in moves:
        ctypes.memmove(*move)


def _shares(moves: list[_Move], count: int) -> list[list[_Move]]:
    """About the same number of bytes for each thread; all for one where there are few."""
    total = sum(size for _, _, size in moves)
    if count == 1 or total < _WORTH_SHARING_BYTES:
        return [moves]
    shares: list[list[_Move]] = [[]]
    taken = 0
    for move in moves:
        if taken * count >= total * len(shares):
            shares.append([])
        shares[-1].append(move)
        taken += move[2]
    return shares


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="samebits-copy")
