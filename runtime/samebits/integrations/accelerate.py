"""Hugging Face Accelerate's names: ``from samebits.integrations.accelerate import Accelerator``.

Everything here is ``samebits.training.integrations.accelerate``'s, imported when a name is first used.
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
