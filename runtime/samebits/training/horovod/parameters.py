"""``hvd.broadcast_parameters`` and ``broadcast_optimizer_state``, from one rank to all.

Recovery needs neither. Before ``elastic.run`` both do nothing, because a generation begins by setting every rank's
state to rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from samebits.errors import UsageError
from samebits.training.group import transfer
from samebits.training.horovod import collectives, world
from samebits.training.process import context
from samebits.training.state.handlers import OptimizerHandler


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """Set the tensors of ``model.state_dict()`` or ``model.named_parameters()`` to the root's values on every rank.

    Before ``elastic.run`` this has no effect: ``elastic.run`` makes its state equal on all ranks.
    """
    items = params.items() if isinstance(params, Mapping) else list(params)
    wrong = [name for name, one in items if one is not None and not isinstance(one, torch.Tensor)]
    if wrong:
        raise UsageError(
            f"hvd.broadcast_parameters: {', '.join(wrong)} is not a tensor. Fix: use hvd.broadcast_object for it"
        )
    if not world.has_group():
        return
    for _, tensor in sorted(items, key=lambda item: item[0]):
        if tensor is not None:
            collectives.broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Set the optimizer's state to the root's on every rank, without taking a step.

    Before ``elastic.run`` this has no effect.
    """
    if not world.has_group():
        return
    handler, root = OptimizerHandler(optimizer), world.root(root_rank)
    is_root = world.rank() == root
    packed = collectives.pack(handler.contents(), "hvd.broadcast_optimizer_state") if is_root else None
    received = transfer.broadcast(packed, root, context.current("hvd.broadcast_optimizer_state").device)
    if not is_root:
        handler.load(collectives.unpack(received))
