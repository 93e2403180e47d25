"""Where this process is: ``hvd.init``, ``rank``, ``size`` and what a root rank means.

Never here: collectives. The one idea: between ``init`` and ``elastic.run`` a process has the place its seat will have,
but no group yet, so a script may scale its learning rate and name its files, and may not yet talk to its peers.
"""

from __future__ import annotations

import torch.distributed as dist

from samebits.errors import UsageError
from samebits.training.group import device
from samebits.training.process import context
from samebits.training.state.base_state import source_of_sync


def init() -> None:
    """Take this process's role and, in a worker, wait for a seat: ``samebits.init()``.

    With ``ENABLE_RECOVERY=0`` the process group is made as well.
    """
    context.init()
    process = context.current("hvd.init()")
    if not dist.is_initialized():
        dist.init_process_group(device.backend_of(process.device))


def shutdown() -> None:
    """Nothing: a worker gives up its seat when its process ends, and how it ended says whether on purpose."""


def is_initialized() -> bool:
    """Whether :func:`init` has been called."""
    try:
        context.current("hvd.is_initialized()")
    except UsageError:
        return False
    return True


def rank() -> int:
    """This process's rank; before ``elastic.run`` the one its seat will have."""
    return context.get_rank()


def size() -> int:
    """The number of workers; before ``elastic.run`` the one the job is to have."""
    return context.get_world_size()


def local_rank() -> int:
    """This process's index among its host's workers."""
    return context.get_local_rank()


def local_size() -> int:
    """The number of workers on this host; before ``elastic.run`` as if one host had all."""
    generation = context.current("hvd.local_size()").generation
    return size() if generation is None else generation.local_world_size


def has_group() -> bool:
    """Whether this process has entered a generation, so that it has peers to talk to."""
    return context.current("a collective").generation is not None


def root(rank: int) -> int:
    """Within a state's ``sync`` rank 0 stands for the rank with the newest commit: in Horovod rank 0 always is that."""
    source = source_of_sync()
    return rank if source is None or rank != 0 else source
