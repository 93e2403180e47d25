"""Horovod's API: ``import samebits.horovod as hvd`` replaces ``import horovod.torch as hvd``.

The names are those of ``samebits.training.horovod``, imported on first use, so that a scheduler never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.training.horovod import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from samebits.training import horovod

    if name not in horovod.__all__:
        raise AttributeError(f"module 'samebits.horovod' has no attribute {name!r}")
    return getattr(horovod, name)


def __dir__() -> list[str]:
    from samebits.training import horovod

    return horovod.__all__
