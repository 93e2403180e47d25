"""Horovod's names: ``import runtime.horovod as hvd`` in place of ``import horovod.torch as hvd``.

Everything here is ``runtime.training.horovod``'s, imported when a name is first used, so that a process that only
serves never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.training.horovod import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from runtime.training import horovod

    if name not in horovod.__all__:
        raise AttributeError(f"module 'runtime.horovod' has no attribute {name!r}")
    return getattr(horovod, name)


def __dir__() -> list[str]:
    from runtime.training import horovod

    return horovod.__all__
