"""Hugging Face Accelerate: ``from samebits.integrations.accelerate import Accelerator``.

The names are those of ``samebits.training.integrations.accelerate``, imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.training.integrations.accelerate import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from samebits.training.integrations import accelerate

    if name not in accelerate.__all__:
        raise AttributeError(f"module 'samebits.integrations.accelerate' has no attribute {name!r}")
    return getattr(accelerate, name)
