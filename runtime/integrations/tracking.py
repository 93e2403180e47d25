"""Curves that go back with the state: ``from runtime.integrations.tracking import TensorBoardCurves, RunCurves``.

Everything here is that of ``runtime.training.integrations``, imported when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.training.integrations.tracking import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from runtime.training.integrations import tracking

    if name not in tracking.__all__:
        raise AttributeError(f"module 'runtime.integrations.tracking' has no attribute {name!r}")
    return getattr(tracking, name)
