"""``hvd.elastic``: Horovod's elastic names for SameBits' classes.

``TorchState`` has a different default: random numbers are derived for every step. A script written for Horovod expects
to continue from its peers' memory when a worker and its generators are lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samebits.training.elastic import run
from samebits.training.state.base_state import State
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.object_state import ObjectState
from samebits.training.state.torch_state import TorchState as _TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class TorchState(_TorchState):
    """A state with everything a step depends on: model, optimizer, and other values by name.

    Args:
        model, optimizer: as for Horovod; the optimizer may be a ``hvd.DistributedOptimizer``.
        attributes: values, samplers and objects with ``state_dict()``; also arguments of
            :class:`samebits.elastic.TorchState`, whose ``rng`` is ``"per_step"`` here, with the seed that was given to
            ``torch.manual_seed``.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **attributes: Any
    ) -> None:
        attributes = {"rng": "per_step", "seed": torch.initial_seed(), **attributes}
        super().__init__(model, optimizer, **attributes)
