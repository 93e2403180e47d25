"""Take the sharded values of a state apart for points, and put them back.

Values pass through by name, with every sharded tensor replaced by a description. Its bytes are saved beside them as
this rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samebits.errors import UsageError
from samebits.training.sharding import pieces, regrouping
from samebits.training.state.handlers import ModuleHandler, OptimizerHandler, StateHandler

__all__ = ["ShardedValues"]

_PATH = "state"


class ShardedValues:
    """The sharded part of a state with FSDP2 modules.

    Args:
        handlers: of everything in the state, by name.
    """

    def __init__(self, handlers: Mapping[str, StateHandler]) -> None:
        self._handlers = handlers
        self._modules = {
            name: one.value for name, one in handlers.items() if isinstance(one, ModuleHandler) and _has_shards(one)
        }
        self._optimizers = {name: one.value for name, one in handlers.items() if isinstance(one, OptimizerHandler)}
        self._is_supported = False

    @classmethod
    def of(cls, handlers: Mapping[str, StateHandler]) -> ShardedValues | None:
        """Return the sharded part of a state; None if nothing is sharded."""
        found = cls(handlers)
        return found if found._modules else None

    def enter_group(self) -> None:
        """Attach the modules to the group that a generation has just formed.

        Raises:
            UsageError: a module cannot be attached, or not to this group.
        """
        self.require_supported()
        regrouping.attach(list(self._modules.values()), list(self._optimizers.values()))

    def require_supported(self) -> None:
        """Check that everything sharded can move to another group and into a point.

        Raises:
            UsageError: something cannot.
        """
        if self._is_supported:
            return
        for name, module in self._modules.items():
            regrouping.require_supported(name, module, list(self._optimizers.values()))
        for name, handler in self._handlers.items():
            if name in self._modules or name in self._optimizers:
                continue
            for path, _ in pieces.paths_of(handler.contents(), name):
                raise UsageError(
                    f"state.{path} is a DTensor that belongs to no fully_shard module: keep its full_tensor() there, "
                    "or run with ENABLE_RECOVERY=0"
                )
        self._is_supported = True

    def accumulates(self) -> bool:
        """Return whether a module holds gradients that are not reduced yet."""
        return any(regrouping.accumulates(one) for one in self._modules.values())

    def reset(self) -> None:
        """Discard what an interrupted step has left in the modules."""
        for module in self._modules.values():
            regrouping.reset(module)

    def take_out(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], pieces.Own]:
        """Return the values without this rank's pieces, and the pieces."""
        own: pieces.Own = {}
        taken: dict[str, Any] = pieces.take_out(values, _PATH, own)
        return taken, own

    def put_back(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a point's values in the form that the handlers load.

        Args:
            values: by name.
            own: this rank's own pieces; empty if the point is another rank's.

        Raises:
            CheckpointError: a piece is missing, or has another position than this rank's.
        """
        live = {name: one.contents() for name, one in self._handlers.items()}
        parameters = {
            f"{_PATH}.{name}.state.{number}": parameter
            for name, optimizer in self._optimizers.items()
            for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"])
            if pieces.is_distributed(parameter)
        }
        putting = pieces.Putting(
            own=own,
            mesh=next(self._parameters()).device_mesh,
            like=lambda path: parameters.get(path.rpartition(".")[0]),
        )
        loadable: dict[str, Any] = putting.back(values, _PATH, live)
        return loadable

    def shards(self) -> list[torch.Tensor]:
        """Return this rank's pieces of the parameters, in the order of their names."""
        return [pieces.local(one) for one in self._parameters()]

    def _parameters(self) -> Any:
        return (
            parameter
            for _, module in sorted(self._modules.items())
            for _, parameter in sorted(module.named_parameters())
            if pieces.is_distributed(parameter)
        )


def _has_shards(handler: ModuleHandler) -> bool:
    return regrouping.is_flattened(handler.value) or any(
        pieces.is_distributed(one) for one in handler.value.parameters()
    )
