"""``torchrun --rdzv-backend=samebits``: the module that torch loads from the entry point ``torchrun.handlers``.

torch loads this module in every process that imports its elastic package, whatever backend the process uses. So nothing
else is imported here before such a rendezvous is created.
"""

from __future__ import annotations

from typing import Any


def backend() -> Any:
    """Return the function that creates the rendezvous; torch's registry calls it with its parameters."""
    return create


def create(parameters: Any) -> Any:
    """Create the rendezvous of one torchrun agent.

    Args:
        parameters: ``torch.distributed.elastic.rendezvous.RendezvousParameters``.
    """
    from samebits.integrations import torchrun_rendezvous
    from samebits.launcher.kept_scheduler import KeptScheduler

    return torchrun_rendezvous.create(parameters, KeptScheduler)
