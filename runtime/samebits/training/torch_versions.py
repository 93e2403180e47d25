"""Which versions of torch were tried, and what is said of the others. Imports no torch, so that anybody may ask.

Never here: what differs between them, which is ``torch_private``'s. ``python -m tests.torch_versions`` tries them.
"""

from __future__ import annotations

import re

TRIED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The versions of torch that were tested, in order; docs/reference/support-matrix.md has the results."""


def not_tried(version: str) -> str:
    """A sentence where this version is older than the oldest or newer than the newest that was tried; else empty.

    Args:
        version: as ``torch.__version__`` has it; only its first two numbers count.
    """
    oldest, newest = _series(TRIED[0]), _series(TRIED[-1])
    if oldest <= _series(version) <= newest:
        return ""
    return (
        f"torch {version} was not tried: {_dotted(oldest)} to {_dotted(newest)} were. Fix: install one of those, or "
        f"see in a checkout what `python -m tests.torch_versions {version.partition('+')[0]}` says of it"
    )


def _series(version: str) -> tuple[int, ...]:
    """The first two numbers; none where it begins with no number."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _dotted(series: tuple[int, ...]) -> str:
    return ".".join(map(str, series))
