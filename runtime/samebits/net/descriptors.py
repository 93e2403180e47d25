"""Check and raise the limit on open files and sockets (getrlimit(2), RLIMIT_NOFILE)."""

from __future__ import annotations

import resource

from samebits.errors import SettingsError

_OF_A_PROCESS = 64  # a worker in a job of two has 32 open, and the script's data files add to that
_OF_A_WORKER = 2  # in the scheduler, its connection and its pidfd; in another worker, gloo's connection and a spare one
_UNLIMITED = 1 << 20
_USUAL = 1024  # a Linux shell's soft limit; enough for a job of some hundred workers


def needed_descriptors(workers: int = 0) -> int:
    """Return how many descriptors a process needs in a job of ``workers`` workers and spares."""
    return _OF_A_PROCESS + _OF_A_WORKER * workers


def hard_limit() -> int:
    """Return how many descriptors a process of this user may have at most."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard if hard != resource.RLIM_INFINITY else _UNLIMITED


def require_descriptors(workers: int = 0) -> None:
    """Raise the limit to at least what a job of ``workers`` workers and spares needs.

    Without this check, libzmq would abort the process, or the job would stall with only a line in one of its logs.

    Raises:
        SettingsError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_descriptors(workers)
    if hard_limit() < needed:
        raise SettingsError(
            [
                f"the hard limit of open files is {hard}, and a process of this job needs {needed}. "
                f"Fix: raise it with `ulimit -n {max(needed, _USUAL)}` (as root), or use a shell without that limit"
            ]
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def raise_descriptor_limit() -> int:
    """Raise the limit to the maximum for this user, and return it.

    Raises:
        SettingsError: the hard limit is too low for any process of a job.
    """
    require_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard_limit()
