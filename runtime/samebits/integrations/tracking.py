"""Metric curves that return to the restored step: ``from samebits.integrations.tracking import RunCurves``.

The names, ``TensorBoardCurves`` among them, are those of ``samebits.training.integrations``, imported on first use.
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
