"""Lightning's names: ``from runtime.integrations.lightning import Fabric``.

Everything here is ``runtime.training.integrations.lightning``'s, imported when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.training.integrations.lightning import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from runtime.training.integrations import lightning

    if name not in lightning.__all__:
        raise AttributeError(f"module 'runtime.integrations.lightning' has no attribute {name!r}")
    return getattr(lightning, name)
