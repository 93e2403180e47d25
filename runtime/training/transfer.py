"""Bytes between ranks of one group: a restore point from its holder to those who lack it, and a few numbers to all.

Point to point over the generation's group, so that a lost peer ends a transfer the way it ends any collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from runtime.errors import LayoutError


def send(packed: memoryview, ranks: Sequence[int], device: torch.device) -> None:
    """Send the bytes to each of the ranks, which call ``receive``."""
    size = torch.tensor([len(packed)], dtype=torch.int64, device=device)
    content = torch.frombuffer(packed, dtype=torch.uint8).to(device)
    for rank in ranks:
        dist.send(size, rank)
        dist.send(content, rank)


def receive(source: int, device: torch.device) -> memoryview:
    """The bytes that ``source`` sends."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source)
    content = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.recv(content, source)
    return memoryview(content.cpu().numpy().data)


def broadcast(packed: memoryview | None, source: int, device: torch.device) -> memoryview:
    """The bytes of ``source`` on every rank; ``packed`` is given there and nowhere else."""
    size = torch.tensor([0 if packed is None else len(packed)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    if packed is None:
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    else:
        content = torch.frombuffer(packed, dtype=torch.uint8).to(device)
    dist.broadcast(content, source)
    return memoryview(content.cpu().numpy().data)


def tell(numbers: Sequence[int], source: int, device: torch.device) -> list[int]:
    """The 64-bit numbers of ``source`` on every rank; the others give as many, of any value."""
    told = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    dist.broadcast(told, source)
    return [int(one) for one in told.tolist()]


def gather(number: int, device: torch.device) -> list[int]:
    """The 64-bit number of every rank, in their order."""
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [int(one.item()) for one in gathered]


def require_equal(digest: int, what: str, device: torch.device) -> None:
    """Compare a 63-bit digest on all ranks.

    Raises:
        LayoutError: it differs; the message names the ranks that differ from rank 0.
    """
    digests = gather(digest, device)
    different = [rank for rank, one in enumerate(digests) if one != digests[0]]
    if different:
        raise LayoutError(
            f"{what} of rank {', '.join(map(str, different))} differs from rank 0's: training on would diverge "
            "silently. Start the job anew with `bash scripts/run.sh --fresh`, and report this with the logs"
        )
