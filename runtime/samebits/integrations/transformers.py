"""Hugging Face Transformers' names: ``from samebits.integrations.transformers import Trainer``.

Everything here is ``samebits.training.integrations.transformers``'s, imported when a name is first used.
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
