"""Pipeline stages: parts of a model that are spread over one dimension of a mesh.

Before the first generation a process has no rank, so its script builds the parts of all stages. When the first
generation forms, each rank keeps the parameters of its own stages; those of the other stages move to the meta device,
where they need no memory. Stages and schedules of ``torch.distributed.pipelining`` that the script keeps from one call
of its function to the next are reinitialized in each generation, with its group. Nothing of an interrupted microbatch
therefore remains in them, and nothing else uses the buffer of an abandoned receive.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from samebits.errors import UsageError
from samebits.training import torch_private
from samebits.training.group import meshes
from samebits.training.group.calling_place import calling_place
from samebits.training.group.failure import is_communication_failure
from samebits.training.sharding import filling

__all__ = ["Pipeline", "refuse"]

_SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
_SCHEDULES_LOGGER = "torch.distributed.pipelining.schedules"
_DECLINED = "or run with ENABLE_RECOVERY=0"


class Pipeline:
    """A model whose parts are the stages of a pipeline.

    Stage ``i`` belongs to rank ``i % size`` along the mesh dimension, as in torch's schedules.

    Args:
        name: the model's name in the state.
        parts: the part of every stage, in order.
        mesh: the mesh dimension, as ``mesh["pp"]``.

    Raises:
        UsageError: an argument has the wrong type, or the parts cannot be divided evenly among the ranks.
    """

    def __init__(self, name: str, parts: object, mesh: Any) -> None:
        if not isinstance(parts, nn.ModuleList) or not len(parts):
            raise UsageError(
                f"{calling_place()}: TorchState(pipeline=…): {name} is a {type(parts).__name__}. Fix: give it the "
                "parts of all stages in order, as nn.ModuleList(parts)"
            )
        if getattr(mesh, "ndim", 0) != 1 or not mesh.mesh_dim_names:
            raise UsageError(
                f'{calling_place()}: TorchState(pipeline=…) needs one named mesh dimension. Fix: pipeline=mesh["pp"], '
                "with mesh_dim_names given to init_device_mesh"
            )
        self.name = name
        self.parts = list(parts)
        self.mesh = mesh
        self.dimension: str = mesh.mesh_dim_names[0]
        self._size = _declared_size(mesh)
        if len(self.parts) % self._size:
            raise UsageError(
                f"{calling_place()}: TorchState(pipeline=…): {len(self.parts)} stages cannot be spread evenly over the "
                f'{self._size} ranks along "{self.dimension}". Fix: as many stages as ranks, or a multiple'
            )
        for index, part in enumerate(self.parts):
            _require_part(f"state.{name}.{index}", part)
        self.root = meshes.root_of(mesh) or torch_private.root_of_mesh(mesh)
        self._built: dict[int, weakref.ref[Any]] = {}
        self._require_apart()

    def _require_apart(self) -> None:
        """Raise if stages share a parameter, because each stage would train it differently."""
        seen: dict[int, str] = {}
        for index, part in enumerate(self.parts):
            for path, one in part.named_parameters():
                here = f"state.{self.name}.{index}.{path}"
                if seen.setdefault(id(one), here).split(".")[2] != str(index):
                    raise UsageError(
                        f"{here} is the same parameter as {seen[id(one)]}, but a stage cannot train another "
                        f"stage's parameter. Fix: give each stage parameters of its own, {_DECLINED}"
                    )

    @property
    def rank(self) -> int:
        """This process's rank along the mesh dimension. Valid after a group was formed."""
        return int(self.mesh.get_local_rank())

    def own_parts(self) -> list[nn.Module]:
        """Return the parts of this rank's stages."""
        return self.parts[self.rank :: self._size]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all stages."""
        for part in self.parts:
            yield from part.parameters()

    def keep_own(self) -> None:
        """Free the parameters of other ranks' stages."""
        for index, part in enumerate(self.parts):
            if index % self._size != self.rank:
                filling.allocate(part, torch.device("meta"))

    # ---- stages and schedules of torch

    def follow(self) -> None:
        """Track the stages and schedules that the script builds from now on."""
        torch_private.follow_pipelines(self._about_to_build)
        logging.getLogger(_SCHEDULES_LOGGER).addFilter(_is_no_lost_peer)

    def _about_to_build(self, built: Any, given: dict[str, Any]) -> None:
        """Check a schedule that is about to be built, and record the stage or schedule for :meth:`renew`."""
        if "stage_index" not in given:
            self._require_supported(type(built).__name__, given)
        self._built.pop(id(built), None)  # a dead object may have had this id; stages must come before their schedules
        self._built[id(built)] = weakref.ref(built)

    def _require_supported(self, schedule: str, given: dict[str, Any]) -> None:
        if schedule not in _SCHEDULES:
            raise UsageError(
                f"{calling_place()}: the schedule {schedule} is not supported. Fix: use one of "
                f"{', '.join(_SCHEDULES)}, {_DECLINED}"
            )
        for stage in given.get("stages") or [given["stage"]]:
            if type(stage).__name__ != "PipelineStage":
                raise UsageError(
                    f"{calling_place()}: a stage of a traced pipeline ({type(stage).__name__}) is not supported. Fix: "
                    f"build it as PipelineStage(part, …), {_DECLINED}"
                )
            self._require_own(stage)

    def _require_own(self, stage: Any) -> None:
        index, expected = stage.stage_index, range(self.rank, len(self.parts), self._size)
        if stage.num_stages != len(self.parts) or index not in expected or stage.submod is not self.parts[index]:
            raise UsageError(
                f"{calling_place()}: stage {index} of {stage.num_stages} does not belong to this rank, which trains "
                f"parts {', '.join(map(str, expected))} of the {len(self.parts)} in state.{self.name}. Fix: "
                f"PipelineStage({self.name}[i], i, {len(self.parts)}, device, group=…) for each of these i"
            )
        if stage.group_size != self._size or stage.group_rank != self.rank:
            raise UsageError(
                f"{calling_place()}: stage {index} communicates over a group other than that of the dimension "
                f'"{self.dimension}". Fix: PipelineStage(…, group=mesh.get_group("{self.dimension}"))'
            )

    def renew(self) -> None:
        """Reinitialize the stages and schedules that still exist, with this generation's group."""
        group = self.mesh.get_group()
        for key, one in list(self._built.items()):
            if (built := one()) is None:
                del self._built[key]
            else:
                torch_private.renew_pipelined(built, group)


def refuse() -> None:
    """Refuse stages and schedules from now on, because the state has no pipeline."""
    if torch_private.uses_pipelines():
        torch_private.follow_pipelines(_refuse)


def _refuse(built: object, _: object) -> None:
    raise UsageError(
        f"{calling_place()}: {type(built).__name__}(…), but the state has no pipeline, so a lost stage could not be "
        'restored. Fix: TorchState(nn.ModuleList(parts), optimizer, pipeline=mesh["pp"]), with the parts of all stages '
        f"in order, {_DECLINED}"
    )


def _require_part(path: str, part: nn.Module) -> None:
    """Raise if a stage's part would prevent a bit-identical recovery."""
    if isinstance(part, DistributedDataParallel):
        raise UsageError(
            f"{path} is in DistributedDataParallel, which reduces over all stages. Fix: "
            f'fully_shard(part, mesh=mesh["dp_replicate", "dp_shard"]), also where dp_shard is 1, {_DECLINED}'
        )
    for name, one in part.named_modules():
        if isinstance(one, _BatchNorm) and one.track_running_stats:
            raise UsageError(
                f"{path}{name and '.'}{name} ({type(one).__name__}) keeps running statistics, which torch's shape "
                "inference changes in the first step of every generation. Fix: another norm, or "
                f"track_running_stats=False, {_DECLINED}"
            )


def _is_no_lost_peer(_: logging.LogRecord) -> bool:
    """Log filter that keeps a schedule from logging its whole plan as an error when a peer is lost."""
    error = sys.exc_info()[1]
    return error is None or not is_communication_failure(error)


def _declared_size(mesh: Any) -> int:
    root = meshes.root_of(mesh)
    declaration = None if root is None else meshes.declaration_of(root)
    if declaration is None:
        return int(mesh.size())
    return declaration.sizes[declaration.names.index(mesh.mesh_dim_names[0])]
