"""Give Lightning this process's rank: that of the generation or, before the first one, of its seat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.utils.data import DistributedSampler

from samebits.training.process import context

__all__ = ["seat", "take_place"]


class _Seat(ClusterEnvironment):
    """Lightning's cluster environment for this process."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return context.current("Lightning").settings.sched_host

    @property
    def main_port(self) -> int:
        return context.current("Lightning").settings.sched_port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return context.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Ignore the value: the scheduler sets it."""

    def global_rank(self) -> int:
        process = context.current("Lightning")
        return process.seat[0] if process.generation is None else process.generation.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore the value: the scheduler sets it."""

    def local_rank(self) -> int:
        return context.get_local_rank()

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any ``devices`` and ``num_nodes``, because they start no processes here."""


def seat() -> ClusterEnvironment:
    """Return the cluster environment for a strategy."""
    return _Seat()


def take_place(divided: Iterable[DistributedSampler[Any]] = ()) -> None:
    """Set this process's rank in Lightning, and in ``divided``, the samplers that Lightning has created."""
    place = _Seat()
    rank_zero_only.rank = place.global_rank()
    for sampler in divided:
        sampler.rank, sampler.num_replicas = place.global_rank(), place.world_size()
        sampler.num_samples = -(-len(sampler.dataset) // sampler.num_replicas)  # type: ignore[arg-type]
        sampler.total_size = sampler.num_samples * sampler.num_replicas
