"""How many files and sockets this process may have open: a stranger's connections must not use them up."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> int:
    """Allow as many descriptors as this user may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20
