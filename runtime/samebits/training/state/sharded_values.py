"""Take the sharded values of a state apart for points, and put them back.

Values pass through by name, with every sharded tensor replaced by a description. The tensor's bytes are saved
separately, as this rank's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from samebits.core.messages import Sharding
from samebits.errors import UsageError
from samebits.training.sharding import filling, pieces, regrouping
from samebits.training.state.handlers import ModuleHandler, OptimizerHandler, StateHandler

__all__ = ["ShardedValues"]

_PATH = "state"


class ShardedValues:
    """The sharded part of a state: modules of FSDP2 or tensor parallelism.

    Args:
        handlers: handlers of all values in the state, by name.
    """

    def __init__(self, handlers: Mapping[str, StateHandler]) -> None:
        self._handlers = handlers
        self._modules = {
            name: one.value for name, one in handlers.items() if isinstance(one, ModuleHandler) and _has_shards(one)
        }
        self._optimizers = {name: one.value for name, one in handlers.items() if isinstance(one, OptimizerHandler)}
        for module in self._modules.values():
            regrouping.declare_meshes(module)
        self._is_supported = False
        self._unfilled = [one for one in self._modules.values() if filling.is_unfilled(one)]
        self._drawn_from = torch.get_rng_state()  # as the script seeded it; unfilled parameters are drawn from it
        self._is_filled = False

    @classmethod
    def of(cls, handlers: Mapping[str, StateHandler]) -> ShardedValues | None:
        """Return the sharded part of a state, or None if nothing is sharded."""
        found = cls(handlers)
        return found if found._modules else None

    def enter_group(self) -> None:
        """Attach the modules to the group that a generation has just formed.

        Raises:
            UsageError: a module cannot be attached to a group, or not to this one.
        """
        self.require_supported()
        regrouping.attach(list(self._modules.values()), list(self._optimizers.values()))
        if not self._is_filled:
            self.fill()

    def fill(self) -> None:
        """Fill the modules that were built on the meta device, after they are cut."""
        device = torch.device(next(self._parameters()).device_mesh.device_type)
        for module in self._unfilled:
            filling.fill(module, device, self._drawn_from)
        self._is_filled = True

    def require_supported(self) -> None:
        """Check that everything sharded can move to another group and into a point.

        Raises:
            UsageError: a value cannot.
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
                    f"state.{path} is a DTensor that belongs to no module. Fix: keep its full_tensor() "
                    "there, or run with ENABLE_RECOVERY=0"
                )
        if self.has_replicas:
            self._require_alike()
        self._is_supported = True

    def _require_alike(self) -> None:
        """Refuse modules that differ between the ranks that hold the same part.

        Raises:
            UsageError: a module keeps statistics of its own rank's batches.
        """
        for name, module in self._modules.items():
            for path, one in module.named_modules():
                is_local = isinstance(one, _BatchNorm) and not isinstance(one, nn.SyncBatchNorm)
                if is_local and one.track_running_stats:
                    raise UsageError(
                        f"state.{name}.{path} ({type(one).__name__}) keeps statistics of its own rank's batches, which "
                        "no replica holds. Fix: nn.SyncBatchNorm.convert_sync_batchnorm(model), "
                        "track_running_stats=False, or a mesh without a replicating dimension"
                    )

    @functools.cached_property
    def has_replicas(self) -> bool:
        """Whether any other rank holds the same part as this rank."""
        return self.sharding(1).has_replicas

    def sharding(self, world_size: int) -> Sharding:
        """Return how the mesh divides the job's ranks, and which of them hold the same part.

        Raises:
            UsageError: the modules are sharded over different meshes.
        """
        return self._use(world_size).sharding

    def data_place(self, rank: int) -> tuple[int, int] | None:
        """Return this rank's part of the data and the number of parts; None if each rank has a part of its own."""
        use = self._use(1)
        return use.data_place(rank) if use.tensor_parallel else None

    def _use(self, world_size: int) -> regrouping.MeshUse:
        uses = {name: regrouping.use_of(name, module, world_size) for name, module in self._modules.items()}
        first = next(iter(uses.values()))
        if any(use.mesh != first.mesh for use in uses.values()):
            raise UsageError(
                f"{'; '.join(f'state.{name} is sharded over {use.mesh}' for name, use in uses.items())}. Fix: give "
                "every fully_shard() and parallelize_module() the same mesh, or slices of it"
            )
        return replace(
            first,
            splits=frozenset().union(*(use.splits for use in uses.values())),
            tensor_parallel=frozenset().union(*(use.tensor_parallel for use in uses.values())),
        )

    def accumulates(self) -> bool:
        """Return whether a module holds gradients that are not reduced yet."""
        return any(regrouping.accumulates(one) for one in self._modules.values())

    def reset(self) -> None:
        """Discard the remains of an interrupted step in the modules."""
        for module in self._modules.values():
            regrouping.reset(module)

    @property
    def drawn_from(self) -> torch.Tensor | None:
        """The generator state that weights are drawn from; None if they have values already."""
        return self._drawn_from if self._unfilled and not self._is_filled else None

    def draw_from(self, drawn_from: torch.Tensor) -> None:
        """Use rank 0's generator state for weights that were built on the meta device."""
        self._drawn_from = drawn_from.clone()
        if self._is_filled:
            self.fill()

    def take_out(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], pieces.Own]:
        """Return the values without this rank's pieces, and separately the pieces."""
        own: pieces.Own = {}
        taken: dict[str, Any] = pieces.take_out(values, _PATH, own)
        return taken, own

    def put_back(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a point's values in the form that the handlers load.

        Args:
            values: the point's values by name.
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
