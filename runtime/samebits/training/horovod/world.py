"""``hvd.init``, ``rank``, ``size``, and which rank is the root.

Between ``init`` and ``elastic.run``, a process has the rank of its future seat but no group yet. A script may therefore
scale its learning rate and name its files, but not communicate.
"""

from __future__ import annotations

import torch.distributed as dist

from samebits.errors import UsageError
from samebits.training.group import device
from samebits.training.process import context
from samebits.training.state.base_state import source_of_sync


def init() -> None:
    """Take this process's role and, in a worker, wait for a seat: ``samebits.init()``.

    With ``ENABLE_RECOVERY=0`` this also creates the process group.
    """
    context.init()
    process = context.current("hvd.init()")
    if not dist.is_initialized():
        dist.init_process_group(device.backend_of(process.device))


def shutdown() -> None:
    """Do nothing: a worker leaves the job when its process exits.

    The exit status shows whether this was intended.
    """


def is_initialized() -> bool:
    """Return whether :func:`init` was called."""
    try:
        context.current("hvd.is_initialized()")
    except UsageError:
        return False
    return True


def rank() -> int:
    """Return this process's rank. Before ``elastic.run``, it is the rank that its seat will have."""
    return context.get_rank()


def size() -> int:
    """Return the number of workers. Before ``elastic.run``, it is the job's intended number."""
    return context.get_world_size()


def local_rank() -> int:
    """Return this process's index among its host's workers."""
    return context.get_local_rank()


def local_size() -> int:
    """Return the number of workers on this host.

    Before ``elastic.run``, it is the number of all workers, as if they shared one host.
    """
    generation = context.current("hvd.local_size()").generation
    return size() if generation is None else generation.local_world_size


def has_group() -> bool:
    """Return whether this process is part of a generation and can reach the other ranks."""
    return context.current("a collective").generation is not None


def root(rank: int) -> int:
    """Return the rank to use as root. In a state's ``sync``, 0 means the rank with the newest commit, as in Horovod."""
    source = source_of_sync()
    return rank if source is None or rank != 0 else source
