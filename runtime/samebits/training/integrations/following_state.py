"""A state that notifies its framework when this process's rank or world size changes.

It relies on ``bind`` being called whenever a generation begins, before the training function is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samebits.training.state.base_state import CommitSink
from samebits.training.state.torch_state import TorchState

__all__ = ["FollowingState", "numbered"]


class FollowingState(TorchState):
    """A :class:`TorchState` with ``rng="per_step"`` by default, seeded like the script.

    Args:
        follow: called whenever this process's place may have changed.
        attributes: as for :class:`TorchState`.
    """

    def __init__(self, follow: Callable[[], None], **attributes: Any) -> None:
        super().__init__(**{"rng": "per_step", "seed": torch.initial_seed(), **attributes})
        self._follow = follow

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """Bind as :meth:`TorchState.bind` does, and notify the framework."""
        super().bind(session, rank)
        if session is not None:
            self._follow()


def numbered(name: str, values: list[Any]) -> dict[str, Any]:
    """Return the values by name. The first one gets the plain name, the others get a number."""
    return {name if not number else f"{name}_{number}": value for number, value in enumerate(values)}
