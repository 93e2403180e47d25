"""Send restore points to the ranks that lack them, and a few numbers to all ranks, over the generation's group.

A lost peer therefore ends a transfer as it ends any collective. A point is sent in pieces: while one is in flight, the
sender prepares the next and the receiver stores the previous one.

An accelerator's collective that is aborted may end without an error and leave any bytes in its output. So every result
is read with :func:`on_host`, which raises if the group was broken before the read was over.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from samebits.errors import CheckpointError, LayoutError
from samebits.spelling import spelled
from samebits.store.checkpoint import MAX_PREFACE_BYTES, IncomingPoint, LoadedPoint, Outgoing, sizes_of
from samebits.training.group.breaker import Breaker
from samebits.training.group.group import current_breaker
from samebits.training.main_thread_time import main_thread

_AT_ONCE = 2  # pieces in flight, each with its own tag
_OPENING_TAG = _AT_ONCE
_OPENING_BYTES = 64 * 1024
"""Fixed size of the first message; the description of a small state fits into it and needs no second message."""
_LENGTH = struct.Struct("<Q")


def on_host(result: torch.Tensor, breaker: Breaker | None = None) -> torch.Tensor:
    """Copy a collective's result to the host, once it is available.

    Args:
        result: the collective's output.
        breaker: the group's breaker; None: that of torch's current default group.

    Raises:
        GenerationEndedError: the group was broken, so the bytes are undefined.
    """
    breaker = breaker or current_breaker()
    there = result.cpu()
    breaker.check()
    return there


def send(point: Outgoing, ranks: Sequence[int], meanwhile: Callable[[], object], device: torch.device) -> None:
    """Send a point in pieces to several ranks, which call ``receive``.

    Args:
        point: the point to send.
        ranks: the receivers.
        meanwhile: called while the first pieces are in flight.
        device: this process's device.
    """
    preface = bytearray(_LENGTH.pack(len(point.preface)) + point.preface).ljust(_OPENING_BYTES, b"\0")
    opening = torch.frombuffer(preface, dtype=torch.uint8).to(device)
    parts = [part for part in (opening[:_OPENING_BYTES], opening[_OPENING_BYTES:]) if part.numel()]
    opened = [dist.isend(part, rank, tag=_OPENING_TAG) for part in parts for rank in ranks]
    sizes = sizes_of(point.data_bytes)
    buffers = _buffers(sizes, torch.device("cpu"))

    def launch(number: int) -> tuple[torch.Tensor, list[dist.Work | None]]:
        piece = buffers[number % _AT_ONCE][: sizes[number]]
        point.fill(piece.numpy().data)
        sent = piece.to(device)
        return sent, [dist.isend(sent, rank, tag=number % _AT_ONCE) for rank in ranks]

    travelling = deque(launch(number) for number in range(min(_AT_ONCE, len(sizes))))
    meanwhile()
    for number in range(_AT_ONCE, len(sizes)):
        _arrive(travelling.popleft()[1])
        travelling.append(launch(number))
    for _, works in travelling:
        _arrive(works)
    _arrive(opened)


def receive(
    source: int,
    begin: Callable[[memoryview], IncomingPoint],
    meanwhile: Callable[[IncomingPoint], object],
    device: torch.device,
) -> LoadedPoint:
    """Receive the point that ``source`` sends.

    Args:
        source: the sending rank.
        begin: called with the preface; returns where the pieces go.
        meanwhile: called while the first pieces are in flight.
        device: this process's device.

    Raises:
        CheckpointError: the received data differs from what was sent.
    """
    incoming = begin(_preface_from(source, device))
    sizes = sizes_of(incoming.data_bytes)
    buffers = _buffers(sizes, device)

    def ask(number: int) -> tuple[torch.Tensor, list[dist.Work | None]]:
        piece = buffers[number % _AT_ONCE][: sizes[number]]
        return piece, [dist.irecv(piece, source, tag=number % _AT_ONCE)]

    travelling = deque(ask(number) for number in range(min(_AT_ONCE, len(sizes))))
    meanwhile(incoming)
    for number in range(len(sizes)):
        piece, works = travelling.popleft()
        _arrive(works)
        incoming.take(on_host(piece).numpy().data)
        if number + _AT_ONCE < len(sizes):
            travelling.append(ask(number + _AT_ONCE))
    return incoming.point()


def share(
    point: Outgoing | None, source: int, begin: Callable[[memoryview], IncomingPoint], device: torch.device
) -> LoadedPoint | None:
    """Send a point in pieces to all ranks, and return it on all ranks except the source. A collective.

    Args:
        point: the point at the source; None on the other ranks.
        source: the sending rank.
        begin: called with the preface; returns where the pieces go.
        device: this process's device.

    Raises:
        CheckpointError: the received data differs from what was sent.
    """
    preface = broadcast(None if point is None else memoryview(bytearray(point.preface)), source, device)
    travels = begin(preface) if point is None else point
    for size in sizes_of(travels.data_bytes):
        piece = torch.empty(size, dtype=torch.uint8)
        if isinstance(travels, Outgoing):
            travels.fill(piece.numpy().data)
        piece = piece.to(device)
        dist.broadcast(piece, source)
        main_thread.messages += 1
        if isinstance(travels, IncomingPoint):
            travels.take(on_host(piece).numpy().data)
    return travels.point() if isinstance(travels, IncomingPoint) else None


def _preface_from(source: int, device: torch.device) -> memoryview:
    opening = torch.empty(_OPENING_BYTES, dtype=torch.uint8, device=device)
    dist.recv(opening, source, tag=_OPENING_TAG)
    (size_bytes,) = _LENGTH.unpack_from(on_host(opening).numpy().data)
    if size_bytes > MAX_PREFACE_BYTES:
        raise CheckpointError(f"rank {source} announces a point whose description has {size_bytes} bytes")
    end = _LENGTH.size + size_bytes
    if end > _OPENING_BYTES:
        rest = torch.empty(end - _OPENING_BYTES, dtype=torch.uint8, device=device)
        dist.recv(rest, source, tag=_OPENING_TAG)
        opening = torch.cat([opening, rest])
    return on_host(opening).numpy().data[_LENGTH.size : end]


def _buffers(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes[:_AT_ONCE]]


def _arrive(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "all of these ranks are in the group"
        work.wait()
        main_thread.messages += 1  # only gloo's works count themselves


def broadcast(packed: memoryview | None, source: int, device: torch.device) -> memoryview:
    """Send bytes from ``source``, where ``packed`` holds them, and return them on every rank. A collective."""
    size = torch.tensor([0 if packed is None else len(packed)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    if packed is None:
        content = torch.empty(int(on_host(size).item()), dtype=torch.uint8, device=device)
    else:
        content = torch.frombuffer(packed, dtype=torch.uint8).to(device)
    dist.broadcast(content, source)
    return memoryview(on_host(content).numpy().data)


def tell(numbers: Sequence[int], source: int, device: torch.device) -> list[int]:
    """Return ``source``'s 64-bit numbers on every rank. A collective.

    The other ranks pass a list of the same length with any numbers.
    """
    told = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    dist.broadcast(told, source)
    return [int(one) for one in on_host(told).tolist()]


def gather(number: int, device: torch.device) -> list[int]:
    """Return every rank's 64-bit number, in rank order. A collective."""
    return begin_gather(number, device)()


def begin_gather(number: int, device: torch.device) -> Callable[[], list[int]]:
    """Start a :func:`gather`, and return a function that waits for the result.

    A collective, ordered by the call of this function.
    """
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(gathered, mine, async_op=True)
    breaker = current_breaker()

    def finish() -> list[int]:
        _arrive([work])
        return [int(one) for one in on_host(torch.cat(gathered), breaker).tolist()]

    return finish


def require_equal(digests: Sequence[int] | Mapping[int, int], what: str) -> None:
    """Compare the digests of all ranks (a sequence) or of some ranks (a mapping).

    Raises:
        LayoutError: they differ; the message names the ranks that differ from the first.
    """
    given = digests if isinstance(digests, Mapping) else dict(enumerate(digests))
    first = next(iter(given))
    different = [rank for rank, one in given.items() if one != given[first]]
    if different:
        raise LayoutError(
            f"{what} of rank {', '.join(map(str, different))} differs from rank {first}'s, so training would "
            f"diverge silently. Fix: start over with `{spelled('run', '--fresh')}`, and report this with the logs"
        )


def send_bytes(packed: bytearray, rank: int, device: torch.device) -> None:
    """Send at least one byte to a rank that calls :func:`receive_bytes`."""
    assert packed, "there is something to send"
    size = torch.tensor([len(packed)], dtype=torch.int64, device=device)
    content = torch.frombuffer(packed, dtype=torch.uint8).to(device)
    for part in (size, content):
        _arrive([dist.isend(part, rank, tag=_OPENING_TAG)])


def receive_bytes(source: int, most_bytes: int, device: torch.device) -> memoryview:
    """Receive the bytes that a rank sends with :func:`send_bytes`.

    Raises:
        CheckpointError: the announced size is zero or too large.
    """
    size = torch.zeros(1, dtype=torch.int64, device=device)
    _arrive([dist.irecv(size, source, tag=_OPENING_TAG)])
    size_bytes = int(on_host(size).item())
    if not 0 < size_bytes <= most_bytes:
        raise CheckpointError(f"rank {source} announces {size_bytes} bytes")
    content = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    _arrive([dist.irecv(content, source, tag=_OPENING_TAG)])
    return memoryview(on_host(content).numpy().data)


# ---- many tensors in one flat tensor, so that a single collective can process all of them
#
# There is one flat tensor per dtype and device, and each tensor always has the same position in it, so sums have the
# same bits. If the operation fails, no tensor is changed.

_Kind = tuple[torch.dtype, torch.device]


class FlatBuffers:
    """Reusable memory for flattening one list of tensors."""

    def __init__(self) -> None:
        self._flat: dict[_Kind, torch.Tensor] = {}

    @torch.no_grad()
    def change(self, tensors: Sequence[torch.Tensor], change: Callable[[torch.Tensor], object]) -> None:
        """Apply ``change`` to the flattened tensors and copy the results back. If it raises, no tensor is changed."""
        kinds: dict[_Kind, list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        laid_out = {kind: self._laid_out(kind, alike) for kind, alike in kinds.items()}
        for kind, (_, views) in laid_out.items():
            torch._foreach_copy_(views, kinds[kind])
        for flat, _ in laid_out.values():
            change(flat)
        for kind, (_, views) in laid_out.items():
            torch._foreach_copy_(kinds[kind], views)

    def _laid_out(self, kind: _Kind, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        sizes = [tensor.numel() for tensor in tensors]
        flat = self._flat.get(kind)
        if flat is None or flat.numel() != sum(sizes):
            flat = self._flat[kind] = torch.empty(sum(sizes), dtype=kind[0], device=kind[1])
        return flat, [part.view(one.shape) for part, one in zip(flat.split(sizes), tensors, strict=True)]
