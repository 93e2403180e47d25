"""Curves that go back with the state: ``from samebits.integrations.tracking import TensorBoardCurves, RunCurves``.

Everything here is that of ``samebits.training.integrations``, imported when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.training.integrations.tracking import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from samebits.training.integrations import tracking

    if name not in tracking.__all__:
        raise AttributeError(f"module 'samebits.integrations.tracking' has no attribute {name!r}")
    return getattr(tracking, name)
