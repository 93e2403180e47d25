"""Run in a spare everything that is slow the first time.

Most of a process's first step is spent on imports and first uses: of torch's compiler package, an optimizer, autograd,
DistributedDataParallel's reducer, and this package's own code for saving a state. A spare has time for these while it
waits. The state is not changed.
"""

from __future__ import annotations

import gc

import torch
from torch import nn

from samebits.core.point import Point
from samebits.errors import CheckpointError, UsageError
from samebits.store import checkpoint as checkpoints
from samebits.training.group import ddp
from samebits.training.group.group import Group
from samebits.training.run import huge_pages
from samebits.training.state import rng, snapshot
from samebits.training.state.base_state import State

__all__ = ["warm_up"]


def warm_up(state: State, device: torch.device, alone: Group | None) -> None:
    """Use everything once that a member of a generation uses.

    The state, its weights and random numbers do not change.

    Args:
        state: the user's state, with its model and optimizers built.
        device: the device this process will train on; its context is created.
        alone: the group of one, on which the wrappers' reducers are built once.
    """
    before = rng.capture()
    layer = nn.Linear(2, 2, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 2, device=device)).sum().backward()
        optimizer.step()
    if alone is not None:
        ddp.attach_all(alone, None)
        ddp.generation_ended()
    try:
        tree, parts = snapshot.split(state.contents(), "state")
    except CheckpointError as error:
        raise UsageError(str(error).replace("state.shared.values.", "state.")) from None
    outgoing = checkpoints.Outgoing.of_state(checkpoints.PointHeader("", Point(0, 1), 1, 0, 0, ""), parts, tree, {})
    incoming = checkpoints.IncomingPoint(memoryview(outgoing.preface), "", {})
    for size_bytes in checkpoints.sizes_of(outgoing.data_bytes):
        piece = memoryview(bytearray(size_bytes))
        outgoing.fill(piece)
        incoming.take(piece)
    found = incoming.point()
    state.load(snapshot.join(found.tree, found.tensors), own=True)
    rng.restore(before)
    gc.collect()  # otherwise a recovery would have to collect this garbage
    huge_pages.gather()
