"""The refusal of a ``DistributedSampler`` between ``samebits.init()`` and ``samebits.elastic.run``.

Never here: the refusal of collectives, which the group itself does. The one idea: such a sampler asks the process group
how many share the samples, and keeps the answer for good; in this phase the answer is one, whatever group follows. So
it is refused for exactly as long as the group of one is torch's.
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
    """While it lasts, a ``DistributedSampler`` that is not told both ``num_replicas`` and ``rank`` is a UsageError.

    On gloo the group's own answers could be refused instead; an accelerator's group is torch's, and its methods cannot
    be replaced. So the constructor is, which subclasses call as well.

    Args:
        alone: as :class:`BreakableGroup` has it.
    """

    def __init__(self, alone: Callable[[], str]) -> None:
        self._alone = alone
        self._lasts = True
        self._constructor: Any = DistributedSampler.__init__
        self._refusing = self._wrapped(self._constructor)
        DistributedSampler.__init__ = self._refusing  # type: ignore[method-assign]

    def end(self) -> None:
        """The class is torch's own again; without effect the second time."""
        self._lasts = False
        if DistributedSampler.__init__ is self._refusing:  # else somebody has wrapped it once more
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
