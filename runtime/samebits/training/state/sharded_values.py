"""Split the sharded values of a state into saved pieces, and put them back together.

Every sharded tensor is replaced by a description. The bytes of this rank's shard are saved separately.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from samebits.core.messages import Sharding
from samebits.errors import UsageError
from samebits.training.process import context
from samebits.training.sharding import filling, pieces, regrouping, replicas
from samebits.training.sharding.pipeline import Pipeline
from samebits.training.state.handlers import ModuleHandler, OptimizerHandler, StateHandler

_PATH = "state"


class ShardedValues:
    """The sharded part of a state: FSDP2 or tensor-parallel modules, or pipeline stages.

    Args:
        handlers: handlers of all values in the state, by name.
        pipeline: the pipeline whose stages a module of the state contains, if any.
    """

    def __init__(self, handlers: Mapping[str, StateHandler], pipeline: Pipeline | None = None) -> None:
        self._handlers = handlers
        self._pipeline = pipeline
        self._staged = frozenset() if pipeline is None else frozenset(map(id, pipeline.parameters()))
        self._modules = {
            name: one.value
            for name, one in handlers.items()
            if isinstance(one, ModuleHandler) and (_has_shards(one) or (pipeline is not None and pipeline.name == name))
        }
        self._optimizers = {name: one.value for name, one in handlers.items() if isinstance(one, OptimizerHandler)}
        for module in self._modules.values():
            regrouping.declare_meshes(module)
        self._is_supported = False
        self._unfilled = [one for one in self._modules.values() if filling.is_unfilled(one)]
        self._drawn_from = torch.get_rng_state()  # as the script seeded it; unfilled parameters are drawn from it
        self._is_filled = False
        self._is_apart = False  # whether this rank has only its own pipeline stages
        self._shrinks: int | None = None  # the mesh dimension whose size may change

    @classmethod
    def of(cls, handlers: Mapping[str, StateHandler], pipeline: Pipeline | None = None) -> ShardedValues | None:
        """Return the sharded part of a state, or None if nothing is sharded."""
        found = cls(handlers, pipeline)
        return found if found._modules else None

    def enter_group(self) -> None:
        """Attach the modules to the new generation's process group.

        Raises:
            UsageError: a module cannot be attached to any group, or not to this one.
        """
        self.require_supported()
        self.keep_own_stages()
        regrouping.attach(list(self._modules.values()), list(self._optimizers.values()), self._pipeline)
        if not self._is_filled:
            self.fill()
        if self._pipeline is not None:
            self._pipeline.follow()
            self._pipeline.renew()

    def keep_own_stages(self) -> None:
        """Free the parameters of pipeline stages that belong to other ranks. Further calls have no effect."""
        if self._pipeline is not None and not self._is_apart:
            self._pipeline.keep_own()
            self._is_apart = True
            for optimizer in self._optimizers.values():
                for parameter in filter(self._is_elsewhere, list(optimizer.state)):
                    del optimizer.state[parameter]

    def fill(self) -> None:
        """Initialize modules that were built on the meta device, after they have been sharded."""
        for module in self._unfilled:
            filling.fill(module, self._own_parts(module), torch.device(self._mesh.device_type), self._drawn_from)
        self._is_filled = True

    def _own_parts(self, module: nn.Module) -> list[nn.Module]:
        pipeline = self._pipeline
        if pipeline is None or module is not self._handlers[pipeline.name].value:
            return [module]
        return pipeline.own_parts()

    @property
    def _mesh(self) -> Any:
        meshes = (one.device_mesh for one in self._parameters() if pieces.is_distributed(one))
        return next(meshes, None) or self._require_pipeline().mesh

    def _require_pipeline(self) -> Pipeline:
        assert self._pipeline is not None, "a state without DTensors is sharded only by a pipeline"
        return self._pipeline

    def require_supported(self) -> None:
        """Check that all sharded values can be moved to another process group and saved.

        Raises:
            UsageError: one of them cannot.
        """
        if self._is_supported:
            return
        for name, module in self._modules.items():
            regrouping.require_supported(name, module, list(self._optimizers.values()), self._pipeline_of(name))
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
        """Raise if modules differ between ranks that hold the same shard.

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

    @property
    def is_pipeline(self) -> bool:
        """Whether the ranks hold the stages of a pipeline."""
        return self._pipeline is not None

    @functools.cached_property
    def has_replicas(self) -> bool:
        """Whether another rank holds the same shards as this rank."""
        return self.sharding(1).has_replicas

    def sharding(self, world_size: int) -> Sharding:
        """Return how the mesh divides the state among the job's ranks, and which ranks hold the same part.

        Raises:
            UsageError: the modules are sharded over different meshes.
        """
        sharding = self._use(world_size).sharding
        return sharding if self._shrinks is None else Sharding(sharding.sizes, sharding.replicates, self._shrinks)

    def let_shrink(self, least: int, most: int) -> None:
        """Let the number of workers change between these numbers, by whole shard groups.

        Raises:
            UsageError: the mesh has no replicas, or their number cannot change.
        """
        self._shrinks = regrouping.let_shrink(self._use(most), least, most)

    def data_place(self, rank: int) -> tuple[int, int] | None:
        """Return this rank's index and the number of data parts; None if each rank has its own part."""
        use = self._use(1)
        if self._shrinks is not None:
            use = replace(use, sizes=self.sharding(1).resized(context.get_world_size()).sizes)
        return use.data_place(rank) if use.same_samples else None

    def _use(self, world_size: int) -> regrouping.MeshUse:
        uses = {
            name: regrouping.use_of(name, module, world_size, self._pipeline_of(name))
            for name, module in self._modules.items()
        }
        first = next(iter(uses.values()))
        if any(use.mesh != first.mesh for use in uses.values()):
            raise UsageError(
                f"{'; '.join(f'state.{name} is sharded over {use.mesh}' for name, use in uses.items())}. Fix: give "
                "every fully_shard() and parallelize_module() the same mesh, or slices of it"
            )
        return replace(
            first,
            splits=frozenset().union(*(use.splits for use in uses.values())),
            model_parallel=frozenset().union(*(use.model_parallel for use in uses.values())),
            data_parallel=frozenset().union(*(use.data_parallel for use in uses.values())),
        )

    def _pipeline_of(self, name: str) -> Pipeline | None:
        return self._pipeline if self._pipeline is not None and self._pipeline.name == name else None

    @property
    def not_summable(self) -> str:
        """Why virtual workers cannot sum the gradients of the modules, with the fix; "" if they can."""
        if reason := replicas.unsupported(self._modules):
            return reason
        use = self._use(1)
        is_known = replicas.shard_count(use, self._modules.values()) is not None
        return "" if is_known else f"the device mesh {use.mesh}. {replicas.FIX}"

    @property
    def shard_count(self) -> int:
        """Into how many shards each replica divides its samples, if the gradients can be summed."""
        return replicas.shard_count(self._use(1), self._modules.values()) or 1

    def reduce_within_shard_groups(self) -> replicas.ReplicaPlace:
        """Reduce gradients only within shard groups, and return this rank's place among the replicas."""
        return replicas.reduce_within_shard_groups(self._modules.values())

    def reduce_over_replicas(self) -> None:
        """Let FSDP2 reduce gradients over the replicas again."""
        replicas.reduce_over_replicas(self._modules.values())

    def accumulates(self) -> bool:
        """Return whether a module holds gradients that have not been reduced yet."""
        return any(regrouping.accumulates(one) for one in self._modules.values())

    def reset(self) -> None:
        """Discard what an interrupted step has left behind in the modules."""
        for module in self._modules.values():
            regrouping.reset(module)

    @property
    def drawn_from(self) -> torch.Tensor | None:
        """The generator state from which initial weights are drawn, or None if all weights have values."""
        return self._drawn_from if self._unfilled and not self._is_filled else None

    def draw_from(self, drawn_from: torch.Tensor) -> None:
        """Set the generator state, from rank 0, from which weights on the meta device are initialized."""
        self._drawn_from = drawn_from.clone()
        if self._is_filled:
            self.fill()

    def take_out(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], pieces.Own]:
        """Replace this rank's shards in the values by descriptions, and return both the values and the shards."""
        own: pieces.Own = {}
        taken: dict[str, Any] = pieces.take_out(values, _PATH, own)
        return taken, own

    def put_back(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Combine the saved values and shards into values that the handlers can load.

        Args:
            values: the point's values by name.
            own: this rank's own pieces; empty if the point is another rank's.

        Raises:
            CheckpointError: a piece is missing, or its position is not this rank's.
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
            mesh=self._mesh,
            like=lambda path: parameters.get(path.rpartition(".")[0]),
            is_elsewhere=self._is_elsewhere,
        )
        loadable: dict[str, Any] = putting.back(values, _PATH, live)
        return {name: self._without_others(name, one) for name, one in loadable.items()}

    def _without_others(self, name: str, values: Any) -> Any:
        """Remove the moments of other ranks' stages from an optimizer's values; return other values as they are."""
        optimizer = self._optimizers.get(name)
        if optimizer is None or not self._is_apart:
            return values
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        own = {key: one for key, one in values["state"].items() if not self._is_elsewhere(parameters[key])}
        return {**values, "state": own}

    def _is_elsewhere(self, live: object) -> bool:
        return self._is_apart and isinstance(live, torch.Tensor) and pieces.is_without_memory(live)

    def is_apart(self, parameter: torch.Tensor) -> bool:
        """Return whether different ranks hold different parts of a parameter."""
        return pieces.is_distributed(parameter) or id(parameter) in self._staged

    def shards(self) -> dict[str, torch.Tensor]:
        """Return the parameters of which this rank holds a shard, sorted by name."""
        return {name: one for name, one in self._named_parameters() if not self._is_elsewhere(one)}

    def _parameters(self) -> Iterator[Any]:
        return (parameter for _, parameter in self._named_parameters())

    def _named_parameters(self) -> Iterator[tuple[str, Any]]:
        return (
            (f"{module_name}.{name}", parameter)
            for module_name, module in sorted(self._modules.items())
            for name, parameter in sorted(module.named_parameters())
            if self.is_apart(parameter)
        )


def _has_shards(handler: ModuleHandler) -> bool:
    return regrouping.is_flattened(handler.value) or any(
        pieces.is_distributed(one) for one in handler.value.parameters()
    )
