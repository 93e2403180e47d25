"""Hugging Face Transformers: ``from samebits.integrations.transformers import Trainer``.

The names are those of ``samebits.training.integrations.transformers``, imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.training.integrations.transformers import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from samebits.training.integrations import transformers

    if name not in transformers.__all__:
        raise AttributeError(f"module 'samebits.integrations.transformers' has no attribute {name!r}")
    return getattr(transformers, name)
