"""What a long measurement has found so far, in a file: a line of JSON for each part of it.

Only the file lives here, never what a part says. The one idea: a line is written when its part is through, so that a
measurement may end at any moment, and costs no more than the part it was in.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = ["add", "read"]

Part = TypeVar("Part", bound=msgspec.Struct)


def add(path: Path, part: msgspec.Struct) -> None:
    """One more."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(part) + b"\n")


def read(path: Path, kind: type[Part]) -> list[Part]:
    """All that were added.

    Raises:
        ValueError: a line is none of this kind.
        OSError: the file cannot be read.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}:{number} is no part of it: {error}. Fix: remove that line") from None
    return found
