"""One rank of a plain gloo group: rank 0 sends a point to all others in many pieces. ``<rank> <world> <port> <way>``.

The ways: ``whole``; ``damaged``, with a byte of a late piece changed on the way; ``shared``, by a broadcast. Each
receiver prints what it got.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store.checkpoint import IncomingPoint, Outgoing, PointHeader, streaming
from samebits.training.group import transfer
from samebits.training.state import snapshot

streaming.PIECE_BYTES = 1000
HEADER = PointHeader("job", Point(7, 1), 3, 0, 0, "0")
LAYOUT = {"wrapper": [1, 2]}
CPU = torch.device("cpu")


def state_of(rank: int) -> dict[str, torch.Tensor]:
    """Return so many tensors that their description does not fit into the opening message."""
    generator = torch.Generator().manual_seed(rank)
    return {f"{'a long name ' * 8}{number}": torch.randn(number % 23, generator=generator) for number in range(600)}


class _Damaged(Outgoing):
    """Changes one byte of piece 20 after it was hashed."""

    def fill(self, piece: memoryview) -> None:
        number = self._number
        super().fill(piece)
        if number == 20:
            piece[5] ^= 1


def _never(preface: memoryview) -> IncomingPoint:
    raise AssertionError("the source receives nothing")


def main() -> None:
    rank, world_size, port, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo")
    mine, expected = state_of(rank), state_of(0)
    seen: list[object] = []
    if rank == 0:
        tree, parts = snapshot.split(mine, "state")
        kind = _Damaged if way == "damaged" else Outgoing
        outgoing = kind.of_state(HEADER, parts, tree, LAYOUT)
        assert len(outgoing.preface) > transfer._OPENING_BYTES
        if way == "shared":
            assert transfer.share(outgoing, 0, _never, CPU) is None
            dist.barrier()
            return
        try:
            transfer.send(outgoing, tuple(range(1, world_size)), lambda: seen.append(LAYOUT), CPU)
            assert seen == [LAYOUT]
            dist.barrier()
        except RuntimeError:
            assert way == "damaged", "the rank that found the damage has left"
        return
    _, tensors = snapshot.take_apart(mine, "state")
    targets = snapshot.in_place(tensors)

    def begin(preface: memoryview) -> IncomingPoint:
        return IncomingPoint(preface, "job", targets)

    try:
        if way == "shared":
            found = transfer.share(None, 0, begin, CPU)
            assert found is not None
            seen.append(found.layout)
        else:
            found = transfer.receive(0, begin, lambda incoming: seen.append(incoming.layout), CPU)
    except CheckpointError as error:
        print("refused:", error, flush=True)
        return
    assert seen == [LAYOUT]
    assert found.header == HEADER
    assert all(torch.equal(mine[name], value) for name, value in expected.items())
    print("whole", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
