"""A state that tells its framework when this process gets another place.

Never here: what a framework keeps of a place. The one idea: a state is bound whenever a generation begins, before the
training function is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samebits.training.state.base_state import CommitSink
from samebits.training.state.torch_state import TorchState

__all__ = ["FollowingState", "numbered"]


class FollowingState(TorchState):
    """A :class:`TorchState` whose random numbers are ``"per_step"`` unless asked otherwise, seeded as the script is.

    Args:
        follow: called whenever this process's place may be another one.
        attributes: as :class:`TorchState` has them.
    """

    def __init__(self, follow: Callable[[], None], **attributes: Any) -> None:
        super().__init__(**{"rng": "per_step", "seed": torch.initial_seed(), **attributes})
        self._follow = follow

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """As :meth:`TorchState.bind`."""
        super().bind(session, rank)
        if session is not None:
            self._follow()


def numbered(name: str, values: list[Any]) -> dict[str, Any]:
    """The first under the plain name, the others numbered."""
    return {name if not number else f"{name}_{number}": value for number, value in enumerate(values)}
