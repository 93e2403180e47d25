"""List the tested versions of torch. Imports no torch, so that any process may use this module.

Differences between versions are in ``torch_private``. ``python -m tests.torch_versions`` tests them.
"""

from __future__ import annotations

import re

TRIED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The versions of torch that were tested, in order; docs/reference/support-matrix.md has the results."""


def not_tried(version: str) -> str:
    """Return a warning if this version is outside the tested range, else an empty string.

    Args:
        version: as in ``torch.__version__``; only its first two numbers count.
    """
    oldest, newest = _series(TRIED[0]), _series(TRIED[-1])
    if oldest <= _series(version) <= newest:
        return ""
    return (
        f"torch {version} was not tested: {_dotted(oldest)} to {_dotted(newest)} were. Fix: install one of those, or "
        f"test it in a checkout with `python -m tests.torch_versions {version.partition('+')[0]}`"
    )


def _series(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; empty if it does not begin with two."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _dotted(series: tuple[int, ...]) -> str:
    return ".".join(map(str, series))
