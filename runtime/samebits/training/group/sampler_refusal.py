"""Refuse a ``DistributedSampler`` between ``samebits.init()`` and ``samebits.elastic.run``.

Such a sampler asks the process group once how many ranks share the samples. In this phase the answer is always one. So
the sampler is refused as long as the group of one is torch's default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data.distributed import DistributedSampler  # torch has loaded it already

from samebits.errors import UsageError
from samebits.training.group.calling_place import calling_place

__all__ = ["SAMPLER_ALONE", "SamplerRefusal"]

SAMPLER_ALONE = (
    "a DistributedSampler without num_replicas and rank {when} samebits.elastic.run would give every rank all samples: "
    "build it inside the function that elastic.run calls, or use samebits.ElasticSampler"
)


class SamplerRefusal:
    """Raises UsageError for a ``DistributedSampler`` without both ``num_replicas`` and ``rank``, until :meth:`end`.

    With gloo the group's own methods could refuse instead, but an accelerator's group is torch's, and its methods
    cannot be replaced. So the constructor, which subclasses call as well, is replaced.

    Args:
        alone: as in :class:`BreakableGroup`.
    """

    def __init__(self, alone: Callable[[], str]) -> None:
        self._alone = alone
        self._lasts = True
        self._constructor: Any = DistributedSampler.__init__
        self._refusing = self._wrapped(self._constructor)
        DistributedSampler.__init__ = self._refusing  # type: ignore[method-assign]

    def end(self) -> None:
        """Restore the class. Further calls do nothing."""
        self._lasts = False
        if DistributedSampler.__init__ is self._refusing:  # unless it was wrapped again meanwhile
            DistributedSampler.__init__ = self._constructor  # type: ignore[method-assign]

    def _wrapped(self, constructor: Any) -> Callable[..., None]:
        @functools.wraps(constructor)
        def construct(
            sampler: DistributedSampler[Any],
            dataset: Any,
            num_replicas: int | None = None,
            rank: int | None = None,
            *more: Any,
            **named: Any,
        ) -> None:
            if self._lasts and (num_replicas is None or rank is None):
                raise UsageError(f"{calling_place()}: {SAMPLER_ALONE.format(when=self._alone())}")
            constructor(sampler, dataset, num_replicas, rank, *more, **named)

        return construct
