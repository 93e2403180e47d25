"""Lightning: ``from samebits.integrations.lightning import Fabric, Trainer``.

The names are those of ``samebits.training.integrations``, imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.training.integrations.lightning import *  # noqa: F403
    from samebits.training.integrations.lightning_trainer import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name in ("Trainer", "TrainerStrategy"):
        from samebits.training.integrations import lightning_trainer

        return getattr(lightning_trainer, name)
    from samebits.training.integrations import lightning

    if name not in lightning.__all__:
        raise AttributeError(f"module 'samebits.integrations.lightning' has no attribute {name!r}")
    return getattr(lightning, name)
