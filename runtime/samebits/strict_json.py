"""Write JSON without control characters, and read JSON without unusable numbers.

Written text is UTF-8 and safe to print. Numbers read are finite and fit 64 bits: an integer of 400 digits would raise
OverflowError in its first sum with a float, and JSON has no NaN.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from samebits.printable import escaped

_MOST = 1 << 63
_MAY_BE_TOO_LARGE = re.compile(r"[0-9]{19}|[eE]\+?[0-9]{3}")


def dumps(value: Any, *, indent: int | None = None, is_compact: bool = False) -> str:
    """Return the value as JSON without control characters or lone surrogates; :func:`loads` gives the value back."""
    separators = (",", ":") if is_compact else None
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
    return escaped(text, keep="\n")  # outside strings, JSON's only control characters are line breaks


def loads(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON in UTF-8, is nested too deeply, or has a number that is not finite or exceeds
            64 bits.
    """
    if isinstance(text, bytes):
        text = text.decode()
    # Few texts can contain such a number; only those take the slow path.
    hooks: dict[str, Any] = {"parse_int": _whole, "parse_float": _finite} if _MAY_BE_TOO_LARGE.search(text) else {}
    try:
        return json.loads(text, parse_constant=_finite, **hooks)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _whole(text: str) -> int:
    if len(text) > 20 or not -_MOST <= (number := int(text)) < 2 * _MOST:
        raise ValueError(f"{text[:40]} has more than 64 bits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a JSON number")
    return number
