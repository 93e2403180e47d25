"""Store the parts of a long measurement in a file with one line of JSON per part.

A line is written when its part is finished, so a measurement that is interrupted loses only the current part.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = ["add", "read"]

Part = TypeVar("Part", bound=msgspec.Struct)


def add(path: Path, part: msgspec.Struct) -> None:
    """Append one part to the file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(part) + b"\n")


def read(path: Path, kind: type[Part]) -> list[Part]:
    """Read all parts.

    Raises:
        ValueError: a line has a different form.
        OSError: the file cannot be read.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}:{number} is no part of it: {error}. Fix: remove that line") from None
    return found
