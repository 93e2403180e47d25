"""Horovod's names: ``import samebits.horovod as hvd`` in place of ``import horovod.torch as hvd``.

Everything here is ``samebits.training.horovod``'s, imported when a name is first used, so that a process that only
serves never loads torch.
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
