"""Number types for ``argparse``, each with bounds.

Bare ``int`` and ``float`` also accept nan, inf, 1_000 and numbers that overflow later, so no option uses them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

MOST_PORT = 65535
MOST_COUNT = 999_999
MOST_STEP = 2**63 - 1
MOST_NUMBER = 1e9
_WHOLE = re.compile(r"[0-9]{1,19}")
_NUMBER = re.compile(r"[0-9]{1,10}(\.[0-9]{0,9})?|\.[0-9]{1,9}|[0-9](\.[0-9]{1,9})?e-?[0-9]{1,2}")


def whole(least: int = 0, most: int = MOST_COUNT) -> Callable[[str], int]:
    """Return a type for whole numbers from ``least`` to ``most``, in decimal digits."""

    def number_in(text: str) -> int:
        number = int(text) if _WHOLE.fullmatch(text) else -1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected a whole number from {least} to {most}")
        return number

    return number_in


def seconds(text: str) -> float:
    """Parse a number of seconds, 0 or more."""
    return _number_in(text, "seconds, 0 or more", 0.0)


def interval(text: str) -> float:
    """Parse a number of seconds above 0."""
    return _number_in(text, "seconds above 0", 1e-9)


def share(text: str) -> float:
    """Parse a number, 0 or more."""
    return _number_in(text, "a number, 0 or more", 0.0)


def _number_in(text: str, expected: str, least: float) -> float:
    number = float(text) if _NUMBER.fullmatch(text) else -1.0
    if not least <= number <= MOST_NUMBER:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected {expected}, at most {MOST_NUMBER:.0f}")
    return number


port = whole(most=MOST_PORT)
step_number = whole(most=MOST_STEP)
